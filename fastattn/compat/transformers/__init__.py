"""`attn_implementation="fastattn"` for models of Hugging Face transformers."""

from .attend import NAME as NAME
from .attend import attention_forward as attention_forward
from .attend import register as register
from .continuous import enable_continuous_batching as enable_continuous_batching
from .masks import attention_mask as attention_mask
from .models import unserved as unserved
