"""A verification case: a named call, checked by the error budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import attention, attention_varlen
from ..calls import CALLS, Made
from ..compare import DIFFERENTIABLE, assert_matches_reference
from ..inputs import make_qkv, to_device

# A case takes a `Setting` and returns the worst error as a share of its budget; it raises
# AssertionError on a wrong result.
Check = Callable[["Setting"], float]


class Subject(NamedTuple):
    """Kernels that one verdict covers.

    family: one of `cases.FAMILIES`. dtype: "bfloat16" and so on. head_dim: the largest of its
    class: 64, 128, 256 or 512.
    """

    backend: str
    family: str
    dtype: str
    head_dim: int


class Case(NamedTuple):
    """quick: part of a quick verification. interpreted: runs in seconds in the interpreter."""

    name: str
    check: Check
    quick: bool = True
    interpreted: bool = False


class Setting(NamedTuple):
    """Subject and device of cases."""

    subject: Subject
    device: torch.device

    @property
    def small(self) -> bool:
        """Whether sizes are small, for the slow interpreter."""
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.subject.dtype)
        return dtype

    @property
    def lengths(self) -> tuple[int, int]:
        """T_q and T_k: whole tiles, and a partial one in each direction."""
        return (37, 45) if self.small else (300, 333)

    def qkv(self, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Random q with B x H = 2 x 4, k and v with 2 x 2, unless `sizes` differ."""
        T_q, T_k = self.lengths
        default = {"B": 2, "H_q": 4, "H_k": 2, "T_q": T_q, "T_k": T_k, "D": self.subject.head_dim}
        return make_qkv(**{**default, **sizes}, dtype=self.dtype, device=self.device)

    def attention(self, *inputs: Tensor, **options: Any) -> Any:
        """`attention`, or `attention_varlen` for packed tensors, with the backend."""
        function: Any = attention_varlen if inputs[0].dim() == 3 else attention
        return function(*inputs, backend=self.subject.backend, **options)

    def check(self, call: str, given: Made, **options: Any) -> float:
        """`PublicCall.check` of one of CALLS by the backend."""
        return CALLS[call].check(given, self.subject.backend, **options)

    def compare(
        self,
        *,
        sizes: dict[str, Any] | None = None,
        nan_past: list[int] | None = None,
        **how: Any,
    ) -> float:
        """`assert_matches_reference` for a call; keys past the lengths `nan_past` are NaN.

        sizes: of `qkv`. how: its arguments, and options, moved to the device.
        """
        clean = self.qkv(**(sizes or {}))
        q, k, v = (x.detach().clone() for x in clean)
        for b, length in enumerate(nan_past or ()):
            k[b, :, length:] = v[b, :, length:] = torch.nan
        options = to_device(how, self.device)
        for name, x in options.items():
            if name in DIFFERENTIABLE and x.is_floating_point():
                options[name] = x.to(self.dtype)
        if nan_past is not None:
            options["key_lengths"] = torch.tensor(nan_past, device=self.device)
        return assert_matches_reference(self.attention, q, k, v, clean=clean, **options)


def same_bits(run: Callable[[], tuple[Tensor, ...]], times: int = 20) -> float:
    """Check that a call has the same bits each time."""
    first = run()
    for _ in range(times - 1):
        again = run()
        different = [i for i, x in enumerate(first) if not torch.equal(x, again[i])]
        assert not different, f"results {different} differ bitwise when the call is repeated"
    return 0.0
