"""`swap`: the attention of a whole model served by this library, where it stands."""

from .model import Swap as Swap
from .model import swap as swap
