"""Masks and scores as Python functions of torch tensors, translated to @triton.jit functions.

A function (b, h, q_pos, k_pos) or (score, b, h, q_pos, k_pos), as FlexAttention takes them, runs
once on `Element`s, which record what it computes. The tensors that it reads by index are found on
the way. Their sizes become data, so other lengths need no compilation; other numbers do.
"""

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

from . import elements, stand_ins, symbols
from .elements import Element, NotTranslated
from .symbols import LANGUAGE, NotDifferentiable, Pointer, Symbol

_PLACES = ("b", "h", "q_pos", "k_pos")
# Parameters before the tensors, by option.
PARAMETERS = {
    "mask_mod": _PLACES,
    "score_mod": ("x", *_PLACES),
    "score_mod_grad": ("dx", "x", *_PLACES),
}
# Of the numbers that the parameters stand for.
_DTYPES = dict.fromkeys(("x", "dx"), torch.float32)
# Bound of indices: their products with fewer than 64 have 32 bits.
_LONGEST = 2**25


class _Row:
    """A tensor that is indexed in its first dims alone."""

    def __init__(self, trace: "_Trace", tensor: Tensor, indices: tuple[Any, ...]) -> None:
        self.trace, self.tensor, self.indices = trace, tensor, indices

    def __getitem__(self, index: Any) -> Any:
        return self.trace.indexed(self.tensor, (*self.indices, *_as_tuple(index)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotTranslated(f"uses .{name} of a row of a tensor {list(self.tensor.shape)}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotTranslated(f"calls {function.__name__} of a row of a tensor")


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


class _Trace(TorchFunctionMode):
    """Runs functions on `Element`s, and collects the tensors that they read.

    tensors: by id. learned: ids of those that a score reads. learns: whether one is run. sizes:
    sizes and strides that the functions need, by place of the tensor, kind and dim.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.learns = False
        self.tensors: dict[int, Tensor] = {}
        self.learned: set[int] = set()
        self.sizes: dict[tuple[int, str, int], int] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Apply a function of torch: as it is to tensors alone, else to elements."""
        kwargs = kwargs or {}
        if not any(isinstance(x, (Element, _Row)) for x in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        if function.__name__ == "__getitem__":
            return self.indexed(args[0], _as_tuple(args[1]))
        return elements.apply(function.__name__, *args, **kwargs)

    def read(self, x: Any) -> Any:
        """An operand; of a tensor its only element."""
        if isinstance(x, _Row):
            raise NotTranslated(f"uses a row of a tensor {list(x.tensor.shape)}: it needs an index")
        if not isinstance(x, Tensor):
            return x.item() if type(x).__module__ == "numpy" else x
        if x.numel() != 1:
            raise NotTranslated(f"uses a tensor {list(x.shape)} as a whole: it needs an index")
        return self.indexed(x, (0,) * x.dim())

    def indexed(self, tensor: Tensor, indices: tuple[Any, ...]) -> Any:
        """The element of a tensor at these indices, or the row that is left."""
        if len(indices) > tensor.dim():
            raise NotTranslated(f"indexes a tensor {list(tensor.shape)} {len(indices)} times")
        given = tuple(map(self.read, indices))
        for x in given:
            if not elements.is_integer(x):
                what = f"{x.dtype} number" if isinstance(x, Element) else type(x).__name__
                raise NotTranslated(f"indexes a tensor by a {what}: integers alone are known")
        if len(given) < tensor.dim():
            return _Row(self, tensor, given)
        number = self._number(tensor)
        steps = [self._from_start(number, dim, x) for dim, x in enumerate(given)] or [0]
        offset = steps.pop()
        for dim, x in enumerate(steps):
            offset = x * self._size(number, "stride", dim) + offset
        pointer = Pointer(number, tensor.dtype.is_floating_point, offset, [])
        return Element(pointer.load(None, None), tensor.dtype)

    def _number(self, tensor: Tensor) -> int:
        """The place of a tensor among those that are read, which it now is."""
        self.tensors.setdefault(id(tensor), tensor)
        if self.learns:
            self.learned.add(id(tensor))
        return list(self.tensors).index(id(tensor))

    def _from_start(self, number: int, dim: int, x: Any) -> Any:
        """An index counted from the start of its dim; a negative one counts from the end."""
        if not isinstance(x, Element):
            return x if x >= 0 else self._size(number, "size", dim) + x
        if x.natural:
            return x.value
        return LANGUAGE.where(x.value < 0, x.value + self._size(number, "size", dim), x.value)

    def _size(self, number: int, kind: str, dim: int) -> Symbol:
        """A size, or the stride of the contiguous tensor, as an element of `sizes`."""
        shape = list(self.tensors.values())[number].shape
        value = shape[dim] if kind == "size" else shape[dim + 1 :].numel()
        self.sizes.setdefault((number, kind, dim), value)
        place = list(self.sizes).index((number, kind, dim))
        return Pointer("sizes", False, place, []).load(None, None)

    def run(self, option: str, function: Any, tensors: tuple[Tensor, ...]) -> Any:
        """The result of an option's function, as a value of Triton.

        tensors: of a @triton.jit function.
        """
        self.learns = option != "mask_mod"
        names = PARAMETERS[option]
        leaves = {name: Symbol(name, active=name == "x") for name in names}
        if stand_ins.is_jit(function):
            return self._run_jit(function, leaves, tensors)
        given = [
            Element(leaves[name], _DTYPES.get(name, torch.int64), name in ("b", "h"), _LONGEST)
            for name in names
        ]
        try:
            inspect.signature(function).bind(*given)
        except TypeError as error:
            raise NotTranslated(f"must take ({', '.join(names)}): {error}") from error
        return _value(option, self.read(function(*given)), leaves)

    def _run_jit(
        self, function: Any, leaves: Mapping[str, Symbol], tensors: tuple[Tensor, ...]
    ) -> Any:
        pointers = [Pointer(self._number(x), x.dtype.is_floating_point, 0, []) for x in tensors]
        try:
            return stand_ins.over(LANGUAGE, function)(*leaves.values(), *pointers)
        except NotDifferentiable as error:
            raise NotTranslated(f"cannot be joined with Python functions: {error}") from error

    def read_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that all functions take: those that were read, then their sizes."""
        read = []
        for place, x in self.tensors.items():
            # No operation without need: a transform of torch.func would wrap the tensor.
            x = x if place in self.learned or not x.is_floating_point() else x.detach()
            read.append(x if x.is_contiguous() else x.contiguous())
        if self.sizes:
            far = max(x.numel() for x in read) >= 2**31
            read.append(_on_device(tuple(self.sizes.values()), read[0].device, far))
        return tuple(read)

    def parameters(self, option: str) -> tuple[str, ...]:
        """Names of the parameters of an option's function."""
        names = [f"tensor_{n}" for n in range(len(self.tensors))]
        return (*PARAMETERS[option], *names, *(["tensor_sizes"] if self.sizes else []))


def _on_device(values: tuple[int, ...], device: torch.device, far: bool) -> Tensor:
    """Sizes as a tensor, which is kept for later calls unless a trace or CUDA graph owns it.

    far: offsets that are computed from them need 64 bits.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or is_in_torch_dispatch_mode():
        return _filled.__wrapped__(values, device, far)
    return _filled(values, device, far)


@lru_cache(256)
def _filled(values: tuple[int, ...], device: torch.device, far: bool) -> Tensor:
    dtype = torch.int64 if far else torch.int32
    with torch._C._DisableFuncTorch():  # a transform would wrap the tensor
        # Filled on the device: for a copy the host would wait, and a graph records none.
        return torch.cat([torch.full((1,), x, dtype=dtype, device=device) for x in values])


def _value(option: str, result: Any, leaves: Mapping[str, Symbol]) -> Any:
    """The result of a Python function as a value of Triton."""
    if not isinstance(result, (Element, bool, int, float)):
        kind = type(result).__name__
        raise NotTranslated(f"returns a {kind}, not a number that depends on the indices")
    if option == "mask_mod":
        k_pos: Any = leaves["k_pos"]
        seen = elements.truth(result)
        return seen if isinstance(seen, Symbol) else k_pos == k_pos if seen else k_pos != k_pos
    value, x = elements.fraction(result), leaves["x"]
    # A score has the shape of its tile.
    whole = any(y is x for y in symbols.ordered(value))
    return value if whole else LANGUAGE.zeros_like(x) + value


def translated(
    functions: Mapping[str, tuple[Any, tuple[Tensor, ...]]], device: torch.device | None = None
) -> dict[str, Any]:
    """@triton.jit functions of options, all of the same tensors, and these as mod_tensors.

    functions: by option, Python's or Triton's, each with the mod_tensors that Triton's takes.
    device: of the call.

    Raises:
        ValueError: a function does what cannot be translated, or reads a tensor of another device.
    """
    trace = _Trace(device or torch.device("cpu"))
    token = elements.READER.set(trace)
    results = {}
    try:
        for option, (function, tensors) in functions.items():
            try:
                with trace:
                    results[option] = trace.run(option, function, tensors)
            except (NotTranslated, NotDifferentiable) as error:
                name = getattr(function, "__name__", type(function).__name__)
                raise ValueError(
                    f"{option} must be a @triton.jit function, or a Python function that "
                    f"translates to one; {name} {error}"
                ) from error
    finally:
        elements.READER.reset(token)
    for x in trace.tensors.values():
        if device is not None and x.device != device:
            raise ValueError(
                f"{' and '.join(functions)} must read tensors on q's device, {device}, got one "
                f"{list(x.shape)} on {x.device}"
            )
    made: dict[str, Any] = {
        option: symbols.function(option, trace.parameters(option), result)
        for option, result in results.items()
    }
    return {**made, "mod_tensors": trace.read_tensors()}
