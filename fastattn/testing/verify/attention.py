"""Cases of `attention` and `attention_varlen`: directions, options and shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...functional import call_options
from ..calls import made, packed_rows
from ..inputs import make_qkv
from ..option_examples import option_examples, sets_that_cover_pairs, together
from .case import Case, Setting, same_bits

_REACH = 9
# Options with the most registers, which have tiles of their own.
_DEMANDING = ("stride", "mask", "mask-mod", "score-mod", "bias", "relative-bias", "dropout")
_AT_ONCE = 3
_QUICK_SETS = 2  # of them in a quick verification
# Options that represent others of their kind.
_TYPICAL = (
    *("lengths", "window", "padding", "documents", "softcap", "alibi", "sinks"),
    *("bias", "bias-with-holes"),
    *("relative-bias", "dropout", "mask", "mask-mod", "score-mod", "stride"),
    *("relative-keys", "relative-query"),
)
_FEW = 20  # queries and keys, where only names of options are needed


def forward(options: bool = True) -> Iterator[Case]:
    """o and lse without gradients."""
    yield from _plain(options, backward=False)
    yield Case("few queries", _few_queries, quick=options, interpreted=True)
    yield from _repeated(_repeats_forward)


def backward(options: bool = True) -> Iterator[Case]:
    """o, lse and gradients, in two passes."""
    yield from _plain(options, backward=True)
    if options:
        yield from with_options("")
    yield from _repeated(_repeats_backward)


def one_pass(options: bool = True) -> Iterator[Case]:
    """Gradients in one pass with atomics."""
    yield from _plain(options, backward=True, deterministic=False)


def with_options(registers: str) -> Iterator[Case]:
    """Options of a register class (`options.Tags`): alone, and in sets of the largest class."""
    examples = _all_examples(_FEW, _FEW, 16)
    for name, arguments in examples.items():
        # Causal order is in the cases of each direction.
        if _registers(arguments) == registers and name != "causal":
            typical = name in _TYPICAL
            yield Case(name, partial(_together, names=(name,)), quick=typical, interpreted=typical)
    sets = sets_that_cover_pairs({name: examples[name] for name in _DEMANDING}, _AT_ONCE)
    sets = [names for names in sets if _registers(together(examples, names)) == registers]
    for index, names in enumerate(sets):
        quick, interpreted = index < _QUICK_SETS, index == 0
        case = partial(_together, names=names)
        yield Case(" + ".join(names), case, quick=quick, interpreted=interpreted)


def packed(**how: Any) -> Iterator[Case]:
    """Packed sequences, some of them empty."""
    yield Case("causal", partial(_packed, causal=True, **how), interpreted=True)
    yield Case("full", partial(_packed, **how))
    yield Case("many sequences", partial(_many_sequences, causal=True, **how))


def packed_in_any_pass() -> Iterator[Case]:
    """`packed` with gradients in two passes and in one."""
    yield from packed()
    yield Case("one pass", partial(_packed, causal=True, deterministic=False))


def _plain(options: bool, **how: Any) -> Iterator[Case]:
    """Causal and full calls in shapes that cover every edge of a tile.

    options: also with lengths, and with head dims between classes.
    """
    causal = {**how, "causal": True}
    compare = Setting.compare
    yield Case("full", partial(compare, **how), interpreted=True)
    yield Case("causal", partial(compare, sizes={"layout": "bthd"}, **causal), interpreted=True)
    heads = {"H_q": 16, "H_k": 4, "T_q": 17, "T_k": 17}
    yield Case("many heads", partial(compare, sizes=heads, **causal))
    yield Case("more tiles than multiprocessors", partial(_many_tiles, **causal))
    if options:
        yield Case("NaN past lengths", partial(past_lengths, **causal), interpreted=True)
        yield Case("odd head dim", partial(_odd_head_dim, **causal), quick=False)


def _repeated(check: Callable[..., float]) -> Iterator[Case]:
    yield Case("5 repeats", partial(check, times=5))
    yield Case("20 repeats", partial(check, times=20), quick=False)


def past_lengths(setting: Setting, **how: Any) -> float:
    """Keys past the lengths are NaN."""
    _, T_k = setting.lengths
    return setting.compare(nan_past=[T_k - 6, T_k // 3], **how)


def _few_queries(setting: Setting) -> float:
    """Few queries, so that keys are split among programs."""
    sizes = {"T_q": 1, "T_k": 260 if setting.small else 1500}
    return setting.compare(sizes=sizes, backward=False)


def _odd_head_dim(setting: Setting, **how: Any) -> float:
    """A head dim other than a power of two, and narrower values."""
    D = setting.subject.head_dim * 5 // 8
    return setting.compare(sizes={"D": D, "D_v": D - 8}, **how)


def _many_tiles(setting: Setting, **how: Any) -> float:
    """8 heads of so many queries have more tiles of 128 than there are multiprocessors."""
    count = torch.cuda.get_device_properties(setting.device).multi_processor_count
    T = 128 * (count // 8 + 1) + 77
    return setting.compare(sizes={"T_q": T, "T_k": T + 33}, **how)


def _repeats_forward(setting: Setting, times: int) -> float:
    inputs = setting.qkv(requires_grad=False)

    def run() -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = setting.attention(*inputs, causal=True, return_lse=True)
        return outputs

    return same_bits(run, times)


def _repeats_backward(setting: Setting, times: int) -> float:
    inputs = setting.qkv()

    def run() -> tuple[Tensor, ...]:
        o = setting.attention(*inputs, causal=True)
        return torch.autograd.grad(o.float().square().sum(), inputs)

    return same_bits(run, times)


def _packed(setting: Setting, **how: Any) -> float:
    ends_q, ends_k = ((0, 17, 17, 35, 36), (0, 9, 20, 20, 41))
    if not setting.small:
        ends_q, ends_k = ((0, 700, 700, 829, 1000), (0, 500, 620, 620, 1100))
    return _compare_packed(setting, ends_q, ends_k, **how)


def _many_sequences(setting: Setting, **how: Any) -> float:
    """Many sequences, so that a multiprocessor gets several tiles, assigned by length.

    Holds for up to 132 multiprocessors: see `kernels.hopper.host.mask_of`.
    """
    number, longest = (5, 30) if setting.small else (17, 1100)
    ends = (0, *itertools.accumulate(37 * n * n % longest for n in range(number)))
    return _compare_packed(setting, ends, ends, H_q=8, H_k=8, **how)


def _compare_packed(
    setting: Setting,
    ends_q: tuple[int, ...],
    ends_k: tuple[int, ...],
    *,
    H_q: int = 4,
    H_k: int = 2,
    **how: Any,
) -> float:
    sizes = {"B": 1, "H_q": H_q, "H_k": H_k, "T_q": ends_q[-1], "T_k": ends_k[-1]}
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), (ends_q, ends_k), strict=True))
    starts = {
        name: torch.tensor(x, dtype=torch.int32, device=setting.device) for name, x in ends.items()
    }
    rows = packed_rows(*(x.detach() for x in setting.qkv(**sizes, layout="bthd")))
    return setting.check("attention_varlen", made(*rows, **starts), **how)


def _all_examples(T_q: int, T_k: int, D: int) -> dict[str, dict[str, Any]]:
    return option_examples(4, 2, T_q, T_k, D, reach=_REACH)


def _registers(options: dict[str, Any]) -> str:
    q, k, v = make_qkv(2, 4, 2, _FEW, D=16, requires_grad=False)
    return call_options.dense_options(q, k, v, **options).registers


def _together(setting: Setting, *, names: tuple[str, ...]) -> float:
    examples = _all_examples(*setting.lengths, setting.subject.head_dim)
    return setting.compare(**together(examples, names))
