"""Attention functions: check arguments, choose a backend, compute."""

from .attend import attention as attention
from .attend import attention_varlen as attention_varlen
from .attend import explain as explain
