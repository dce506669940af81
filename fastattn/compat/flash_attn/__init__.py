"""The flash-attn package's functions, with its layout and conventions."""

from . import installation, version_2
from .installation import install as install
from .installation import uninstall as uninstall
from .version_2 import __version__ as __version__
from .version_2 import flash_attn_func as flash_attn_func
from .version_2 import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from .version_2 import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from .version_2 import flash_attn_varlen_func as flash_attn_varlen_func
from .version_2 import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from .version_2 import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from .version_2 import flash_attn_with_kvcache as flash_attn_with_kvcache

__all__ = [*version_2.__all__, *installation.__all__]
