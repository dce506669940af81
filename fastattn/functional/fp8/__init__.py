"""FP8 attention: codes and scales, and functions on them."""

from .codes import PackedValues as PackedValues
from .codes import pack_values as pack_values
from .codes import quantize_fp8 as quantize_fp8
from .fp8_attention import attention_fp8 as attention_fp8
from .fp8_attention import attention_varlen_fp8 as attention_varlen_fp8
from .fp8_attention import explain_fp8 as explain_fp8
