"""`swap`: the attention modules of a whole model, exchanged for ours."""

from .model import Swap as Swap
from .model import swap as swap
