"""The functions of the flash-attn package, in its layout and with its conventions."""

from .functions import __version__ as __version__
from .functions import flash_attn_func as flash_attn_func
from .functions import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from .functions import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from .functions import flash_attn_varlen_func as flash_attn_varlen_func
from .functions import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from .functions import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from .functions import flash_attn_with_kvcache as flash_attn_with_kvcache
from .functions import install as install
from .functions import uninstall as uninstall
