"""`swap`: replace the attention of an existing model by fastattn's, in place."""

from .model import Swap as Swap
from .model import swap as swap
