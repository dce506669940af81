"""`swap`: serve the attention of an existing model by this library, in place."""

from .model import Swap as Swap
from .model import swap as swap
