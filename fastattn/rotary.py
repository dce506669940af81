"""Rotary position embedding: tables and application.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864,
equations 14, 15 and 34: pair i at position p is rotated by the angle p * base ** (-2 i /
rotary_dim), so that the product of a rotated query and key depends only on the distance of their
positions.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import checks
from .rotary_scaling import RotaryScaling, plain_frequencies
from .tracing import may_keep, transforming

RotaryStyle = Literal["half", "interleaved"]


def rotary_tables(
    positions: int | Tensor,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every rotation angle.

    Args:
        positions: a length T, for positions 0..T-1; or integers [T], or [B, T] per batch row, of
            any sign.
        rotary_dim: the even number of rotated channels per head.
        base: the slowest pair turns by about 1 / base radians per position, the fastest by 1.
        scaling: other frequencies, for long contexts; see `fastattn.rotary_scaling`.
        device: device of the tables; default: `positions`' device, or torch's default device.
        dtype: floating dtype of the tables. The angles are computed in fp64: fp32 would have an
            error of 2**-24 * position radians, visible in long contexts.
    Returns:
        (cos, sin), each [T, rotary_dim // 2] or [B, T, rotary_dim // 2].
    Raises:
        TypeError: `positions` is not integral, `dtype` is not floating, or another argument has
            a wrong type.
        ValueError: `positions` is negative as a length or not 1-d or 2-d as a tensor, `rotary_dim`
            is not even and positive, or `base` is not positive.
    """
    rotary_dim = check_rotary_dim(rotary_dim)
    base = checks.check_positive("base", base)
    checks.check_float_dtype("dtype", dtype)
    if scaling is not None and not hasattr(scaling, "frequencies"):
        raise TypeError(
            "scaling must be of fastattn.rotary_scaling or implement RotaryScaling, "
            f"got {checks.type_name(scaling)}"
        )
    if isinstance(positions, Tensor):
        _check_positions(positions)
        device = positions.device if device is None else device
        positions = positions.to(device)
    else:
        positions = torch.arange(checks.check_count("positions", positions, 0), device=device)

    if scaling is None:
        frequency, amplitude = plain_frequencies(rotary_dim, base, positions.device), 1.0
    else:
        frequency = scaling.frequencies(rotary_dim, base, positions.device)
        amplitude = scaling.amplitude
    angle = positions.to(torch.float64).unsqueeze(-1) * frequency
    return (angle.cos() * amplitude).to(dtype), (angle.sin() * amplitude).to(dtype)


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor | None = None, *, style: RotaryStyle | None = None
) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of each head.

    Args:
        x: [B, H, T, D], floating, any strides.
        cos, sin: [T, R // 2], or [B, T, R // 2] for positions per row, from `rotary_tables`; R <= D
            is the number of rotated channels. Or one complex tensor cos + i sin, Llama's freqs_cis,
            without sin.
        style: which channels form pair i of the R // 2 pairs:
            "half":        (i, i + R // 2), as in GPT-NeoX and LLaMA;
            "interleaved": (2 i, 2 i + 1), as in the paper and GPT-J.
            Default: "half"; for a complex tensor "interleaved", as in Llama's code.
    Returns:
        [B, H, T, D] in x's dtype, computed in fp32 (fp64 for fp64 x) and rounded once. Dense, with
        heads and tokens in x's memory order. Differentiable in x, cos and sin.
    Raises:
        TypeError: x, cos or sin is not a floating tensor, or cos is real and sin is missing.
        ValueError: a shape disagrees, R exceeds D, the devices differ, or `style` is unknown.
    """
    if sin is None and isinstance(cos, Tensor) and cos.is_complex():
        cos, sin, style = cos.real, cos.imag, style or "interleaved"
    if sin is None:
        raise TypeError(f"sin must be given unless cos is complex, got cos = {checks.kind(cos)}")
    style = "half" if style is None else style
    check_rotary_style(style)
    _check_tables(x, cos, sin)
    return rotated(x, cos, sin, style)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, style: RotaryStyle) -> Tensor:
    """`apply_rotary` of checked arguments, without an operation that changes nothing."""
    # Keeps the memory order: the result of a transposed projection has the same layout.
    heads_inside = x.stride(1) < x.stride(2)
    if heads_inside:
        x = x.transpose(1, 2)
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    if dtype != wide or cos.dtype != wide or sin.dtype != wide:
        x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)
    if heads_inside or cos.dim() == 3:
        cos, sin = (t.unsqueeze(-2 if heads_inside else -3) for t in (cos, sin))
    pairs = cos.shape[-1]
    R = 2 * pairs
    if style == "half":
        a, b = x[..., :pairs], x[..., pairs:R]
    else:
        a, b = x[..., 0:R:2], x[..., 1:R:2]
    pieces: tuple[Tensor, ...] = (a * cos - b * sin, b * cos + a * sin)
    if style == "interleaved":
        pieces = (torch.stack(pieces, dim=-1).flatten(-2),)
    if x.shape[-1] > R:
        pieces = (*pieces, x[..., R:])
    turned = torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]
    turned = turned if dtype == wide else turned.to(dtype)
    return turned.transpose(1, 2) if heads_inside else turned


class RotaryPositions:
    """`rotary_tables` of positions from 0, kept and extended on demand.

    A cache that rotates keys as it stores them needs the whole tables (`up_to`); other callers need
    the rows of their tokens (`at`). Under torch.compile and traces, `at` computes the rows.

    Args:
        rotary_dim, base, scaling: as for `rotary_tables`.
    """

    def __init__(
        self, rotary_dim: int, *, base: float = 10000.0, scaling: RotaryScaling | None = None
    ) -> None:
        self.rotary_dim, self.base, self.scaling = check_rotary_dim(rotary_dim), base, scaling
        self._kept: tuple[Tensor, Tensor] | None = None
        # By length, the tables whose addresses are in CUDA graphs.
        self._recorded: dict[int, tuple[Tensor, Tensor]] = {}

    def up_to(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin), fp32 [N, rotary_dim // 2], of positions 0..N-1 with N >= length."""
        kept = self._kept
        if kept is None or kept[0].shape[0] < length or kept[0].device != device:
            # Doubles the length: a text that grows token by token extends them rarely.
            n = length if kept is None else max(length, 2 * kept[0].shape[0])
            # A later backward pass cannot save an inference tensor.
            with torch.inference_mode(False):
                kept = self.of(torch.arange(n, device=device))
            # In a transform of torch.func they are wrapped, and no use after it.
            if may_keep(device) and not transforming():
                self._kept = kept
        elif not may_keep(device):
            self._recorded[kept[0].shape[0]] = kept
        return kept

    def at(
        self, first: int | Tensor, count: int, bound: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin), fp32 [count, rotary_dim // 2], or [B, ...] if first is a tensor.

        Args:
            first: position of the first token, or integers [B]. Tokens past bound are padding.
            count: tokens per row.
            bound: all positions are below it.
            device: of the tables.
        """
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            steps = torch.arange(count, device=device)
            return self.of(steps + (first[:, None] if isinstance(first, Tensor) else first))
        cos, sin = self.up_to(bound, device)
        if isinstance(first, int):
            return cos[first : first + count], sin[first : first + count]
        steps = torch.arange(count, device=device)
        rows = (first[:, None] + steps).clamp(max=cos.shape[0] - 1)
        return cos[rows], sin[rows]

    def of(self, positions: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """`rotary_tables` of other positions."""
        how: Any = {"base": self.base, "scaling": self.scaling, "device": device}
        return rotary_tables(positions, self.rotary_dim, **how)


# Types of a layer's rotary_tables.
RotaryTables = RotaryPositions | tuple[Tensor, Tensor] | Tensor


def check_rotary_dim(rotary_dim: Any, head_dim: int | None = None) -> int:
    """Check for an even, positive int, at most head_dim if given; returns a Python int."""
    rotary_dim = checks.check_int("rotary_dim", rotary_dim)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive, got {rotary_dim}")
    if head_dim is not None and rotary_dim > head_dim:
        raise ValueError(f"rotary_dim must be at most head_dim = {head_dim}, got {rotary_dim}")
    return rotary_dim


def check_rotary_style(style: str) -> None:
    """Raise ValueError unless `style` names a pairing."""
    if not isinstance(style, str) or style not in ("half", "interleaved"):
        raise ValueError(f"rotary style must be 'half' or 'interleaved', got {style!r}")


def check_tables(cos: Any, sin: Any, x: Tensor, sizes: checks.Sizes) -> None:
    """Check real tables [T, R//2] or [B, T, R//2] of any kind: their memory is not read here."""
    for name, table in (("cos", cos), ("sin", sin)):
        if isinstance(table, Tensor) and table.is_complex():
            raise TypeError(
                f"{name} must be a float tensor, got {table.dtype}; of a complex freqs_cis "
                "they are .real and .imag"
            )
        dims = "B T R//2" if getattr(cos, "ndim", 0) == 3 else "T R//2"
        checks.check_input(name, table, "float", dims, x, sizes, dense=False)


def _check_positions(positions: Tensor) -> None:
    if positions.dtype == torch.bool or positions.is_floating_point() or positions.is_complex():
        raise TypeError(f"positions must have an integer dtype, got {positions.dtype}")
    checks.check_input("positions", positions, "", "B? T", positions, {}, dense=False)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    sizes: checks.Sizes = {}
    checks.check_input("x", x, "float", "B H T D", x, sizes, dense=False)
    check_tables(cos, sin, x, sizes)
    if 2 * sizes["R//2"] > sizes["D"]:
        raise ValueError(
            f"cos and sin rotate {2 * sizes['R//2']} channels, but x has only D = {sizes['D']} a "
            "head"
        )
