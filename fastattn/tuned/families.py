"""Families of kernels: what one verdict of `fastattn verify` covers, and the families of a call.

Portable kernels have a family for each direction and for each class of registers. Kernels that
`auto` takes only if a GPU has run them right have one for each option in each direction, such as
"backward+alibi_slopes"; a call needs all of its own.
"""

from torch import Tensor

from .. import kernels, tracing
from ..options import OPTIONS, Options

# Backends whose kernels `auto` takes only if a GPU has run them right.
UNPROVEN = ("hopper",)
# Verdicts and times hold for heads up to these widths.
HEAD_DIMS = (64, 128, 256, 512)
# Numbers that every kernel takes, and what comes with another field.
_NO_FAMILY = {
    "query_offset", "causal", "scale", "first_head", "dropout_seed", "mod_tensors",
    "score_mod_grad", "cu_seqlens_k", "atomic_dq",
}  # fmt: skip


def _named(field: str) -> str:
    """The option that a field of `Options` belongs to."""
    if field in OPTIONS:
        return field
    by_option = (name for name, spec in OPTIONS.items() if field in spec.fields)
    return next(by_option, "packed" if field == "cu_seqlens_q" else field)


# Place, default and option of each field that makes another family.
_FIELDS = tuple(
    (place, default, _named(name))
    for place, (name, default) in enumerate(Options._field_defaults.items())
    if name not in _NO_FAMILY
)

# Names of options with a family, and of others.
NAMES = tuple(dict.fromkeys(name for _, _, name in _FIELDS))


def of_call(
    backend: str, directions: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[str, ...]:
    """The families of `fastattn verify` that a call belongs to.

    directions: "forward", "backward", "one-pass" or "fp8"; q, k and v may be packed.
    """
    if backend not in UNPROVEN:
        packed = ("packed",) if options.cu_seqlens_q is not None else ()
        registers = (options.registers,) if options.registers else ()
        return (*directions, *packed, *registers) if "forward" in directions else directions
    used = [x for place, default, x in _FIELDS if _differs(options[place], default)]
    if not q.shape[-1] == v.shape[-1] == head_dim_class(q.shape[-1]):
        used.append("head_dim")
    names = [f"{direction}{x}" for direction in directions for x in ("", *(f"+{y}" for y in used))]
    if "backward" in directions and _in_parts(q, k, options):
        names.append("backward+parts")
    return tuple(dict.fromkeys(names))


def _differs(value: object, default: object) -> bool:
    return value is not None if default is None else value != default


def _in_parts(q: Tensor, k: Tensor, options: Options) -> bool:
    """Whether programs share a tile of keys; where sizes may change, whether they might."""
    if tracing.may_be_traced(q):
        heads = k.shape[1] if k.dim() == 3 else k.shape[0] * k.shape[1]
        T_k = k.shape[0] if k.dim() == 3 else k.shape[2]
        return not tracing.always(kernels.hopper_host.enough_tiles(heads, T_k, k.device))
    return kernels.hopper_host.parts_of_keys(q, k, options) > 1


def head_dim_class(D: int) -> int:
    """The smallest of HEAD_DIMS that is at least head_dim."""
    return next((width for width in HEAD_DIMS if width >= D), D)


def sources(backend: str, family: str) -> str:
    """The group of `environment.SOURCES` that a family's kernels are made of."""
    if backend not in UNPROVEN:
        return "all"
    return "hopper forward" if family.partition("+")[0] in ("forward", "fp8") else "hopper backward"
