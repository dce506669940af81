"""The repairs behind `interpreter.mend`: bfloat16, NaN, TF32, memory checks, cheap helper calls.

Triton's interpreter runs a kernel's Python source; each tl operation ends in a method of one
`InterpreterBuilder`, on handles that pair a NumPy array with a Triton dtype. NumPy has no bfloat16,
so such a handle carries the bits as uint16. The classes here override what the stock ones get wrong,
one concept a class, and `install` puts them in the stock ones' places.

Works with Triton 3.6, 3.7 and 3.8.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from .interpreter import OutOfBoundsError

Array = npt.NDArray[Any]

# --------------------------------------------------------------------- bfloat16
