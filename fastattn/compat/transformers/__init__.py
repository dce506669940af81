"""`attn_implementation="fastattn"` for models of Hugging Face transformers."""

from .continuous import enable_continuous_batching as enable_continuous_batching
from .hf_attention import NAME as NAME
from .hf_attention import attention_forward as attention_forward
from .hf_attention import register as register
from .masks import attention_mask as attention_mask
from .models import unserved as unserved
