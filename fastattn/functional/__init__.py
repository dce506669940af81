"""Attention functions: check arguments, choose a backend, compute."""

from .fused_attention import attention as attention
from .fused_attention import attention_varlen as attention_varlen
from .fused_attention import explain as explain
