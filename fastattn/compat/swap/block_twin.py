"""A copy of a block with random weights that records what its forward reads and drops."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..sdpa import torch_attention
from .code_numbers import numbers_in_code

# What every module has, and every forward reads.
OF_ANY_MODULE = frozenset(vars(nn.Module()))


class Refused(Exception):
    """Why a block is left alone."""


class Dropout(TorchFunctionMode):
    """Leaves dropout out, and notes its probability and what it is applied to.

    Attributes:
        found: (probability, tensor), None in place of the tensor: the weights inside of torch's
            scaled_dot_product_attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[float, Tensor | None]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            given = dict(zip(("input", "p", "train"), args, strict=False)) | kwargs
            p = given.get("p", 0.5)
            if p > 0 and given.get("training", given.get("train", True)):
                self.found.append((p, given["input"]))
            return given["input"]
        if func is torch_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = dict(zip(names, args, strict=False)) | kwargs
            p = given.pop("dropout_p", 0.0)
            if p > 0:
                self.found.append((p, None))
            return func(**given)
        return func(*args, **kwargs)


class Twin:
    """A copy of a block; the block itself is not touched.

    Attributes:
        block: the copy in its own dtype, in eval mode, with random weights and no hooks.
        exact: the same in fp64. Each dropout that can be found there has a probability of its own.
        reads: what the forward of `exact` has read so far, by path.
        paths: of dropouts, by probability.
    """

    def __init__(self, module: nn.Module) -> None:
        self.block = copy.deepcopy(module).eval()
        for part in self.block.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
        _randomise(self.block)
        self.exact = copy.deepcopy(self.block).double()
        self.reads: dict[str, Any] = {}
        self._in_code = {f"{n} in its code": n for n in numbers_in_code(type(module))}
        self._holders: dict[str, Any] = {}
        _watch(self.exact, module, "", self._holders, self.reads)
        self.paths = _mark_dropouts(self.exact, self._holders)

    def parameters(self) -> list[nn.Parameter]:
        """Those of `exact` that may have gradients."""
        return [p for p in self.exact.parameters() if p.is_floating_point()]

    def run(
        self, x: Tensor, *given: Tensor, training: bool = False
    ) -> tuple[Tensor, list[tuple[float, Tensor | None]]]:
        """The output of `exact`, and what it would have dropped.

        Raises:
            Refused: it gives no tensor, keeps something, draws other random numbers, or drops
                outside of training. Whatever else it raises is its own.
        """
        self.exact.train(training)
        before = _state(self.exact)
        dropout = Dropout()
        with own_generators(x.device) as moved, dropout:
            out = type(self.exact).forward(self.exact, x, *given)
        self.exact.eval()
        if not isinstance(out, Tensor):
            raise Refused(f"its forward returns {type(out).__name__}, not a tensor")
        after = _state(self.exact)
        changed = [name for name in after if after[name] != before.get(name)]
        if changed:
            raise Refused(f"its forward sets {', '.join(changed)}")
        if moved():
            raise Refused("it draws random numbers for something else than dropout")
        if dropout.found and not training:
            raise Refused("it drops in eval mode too")
        return out, dropout.found

    def numbers(self) -> dict[str, int]:
        """The largest of the whole numbers that each path read holds, and the size of buffers."""
        found = {**self.reads, **dict(self.exact.named_buffers()), **self._in_code}
        largest = {path: max(_integers(value), default=0) for path, value in found.items()}
        return {path: n for path, n in largest.items() if n > 1}

    def breaks_without(self, path: str, run: Callable[[], object]) -> bool:
        """Whether the forward fails if a number is another: then it is the size of something."""
        prefix, _, name = path.rpartition(".")
        holder = self._holders.get(prefix)
        if holder is None or type(self.reads.get(path)) is not int:
            return False
        there = name in vars(holder)
        value = self.reads[path]
        vars(holder)[name] = value - 1
        try:
            run()
        except Refused:
            return False
        except Exception:
            return True
        finally:
            if there:
                vars(holder)[name] = value
            else:
                del vars(holder)[name]
            self.reads[path] = value
        return False


def _randomise(block: nn.Module) -> None:
    """Weights that keep the size of what they multiply; buffers, such as masks, stay."""
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.is_floating_point():
                size = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.5
                drawn = torch.randn(parameter.shape, generator=generator, device="cpu")
                parameter.copy_(drawn * size)


def _mark_dropouts(exact: nn.Module, holders: dict[str, Any]) -> dict[float, str]:
    """Give every dropout a probability of its own, by which it is known; their paths."""
    paths: dict[float, str] = {}

    def mark(path: str) -> float:
        paths[p := 0.25 + len(paths) / 1024] = path
        return p

    for name, child in exact.named_children():
        if isinstance(child, nn.Dropout):
            child.p = mark(name)
    for prefix, holder in holders.items():
        for name, value in vars(holder).items():
            if "drop" in name and type(value) in (int, float) and 0 <= value < 1:
                vars(holder)[name] = mark(f"{prefix}.{name}" if prefix else name)
    return paths


def _watch(
    holder: Any, original: Any, path: str, holders: dict[str, Any], reads: dict[str, Any]
) -> Any:
    """Note in reads all that is read of a copied object and of the plain objects in it.

    Returns:
        The object, or another one of its contents where its class cannot be changed. All of them
        enter holders, by path.
    """
    for name, value in list(vars(holder).items()):
        plain = hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, Tensor))
        # What a deep copy shares with the block, such as a function or a logger, is not ours.
        before = vars(original).get(name)
        if plain and value is not before and type(value) is type(before) and path.count(".") < 2:
            there = f"{path}.{name}" if path else name
            vars(holder)[name] = _watch(value, before, there, holders, reads)
    kind: Any = type(holder)

    def note(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)
        if not name.startswith("__") and name not in OF_ANY_MODULE:
            reads[f"{path}.{name}" if path else name] = value
        return value

    try:
        watched: Any = type(kind.__name__, (kind,), {"__getattribute__": note, "__slots__": ()})
        try:
            # Past the __setattr__ of a frozen dataclass.
            object.__setattr__(holder, "__class__", watched)
        except TypeError:
            kept, holder = vars(holder), watched.__new__(watched)
            vars(holder).update(kept)
    except TypeError:
        # A class without subclasses: all that the object holds may be read.
        reads[f"{path}.*"] = dict(vars(holder))
    holders[path] = holder
    return holder


def _state(block: nn.Module) -> dict[str, tuple[int, int]]:
    """What a forward could leave behind: attributes, children and buffers, and changes in them."""
    found = {name: x for name, x in vars(block).items() if name != "training"}
    for kept in (block._buffers, block._modules, block._parameters):
        found.update(kept)
    return {name: (id(x), _revision(x)) for name, x in found.items()}


def _revision(x: Any) -> int:
    """A number that is another one after most changes in place."""
    if isinstance(x, Tensor):
        return x._version
    return len(x) if isinstance(x, (list, dict, set)) else 0


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, Integral) and not isinstance(value, bool):
        yield int(value)
    elif isinstance(value, Tensor):
        yield from value.shape
        if value.numel() == 1 and not value.is_floating_point():
            yield int(value)
    elif isinstance(value, dict):
        for x in value.values():
            yield from _integers(x)
    elif isinstance(value, (tuple, list)):
        for x in value:
            yield from _integers(x)


@contextmanager
def own_generators(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Leave torch's generators as they are after the block; gives whether they moved in it."""
    cuda = [device] if device.type == "cuda" else []

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]

    with torch.random.fork_rng(cuda):
        before = states()
        after = before

        def moved() -> bool:
            return not all(map(torch.equal, before, after))

        yield moved
        after = states()
