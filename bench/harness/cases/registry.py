"""The list of implementations: fastattn and torch by backend, peers, and the naive formula.

For each case an implementation gives a reason that it cannot serve it, or prepares a function from
q, k, v to o. Masks, packing and compilation are outside the timer.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import reference
from ...functional.decode import decode_attention, explain_decode
from ...functional.fused_attention import attention, explain
from .case import Case
from .fp8 import EIGHT_BITS
from .inputs import Attention, Implementation, Inputs, Unserved
from .peers import PEERS, why_no_option

# The backend that `auto` selects.
OURS = "fastattn"
PORTABLE = "fastattn-triton"
# The same with deterministic=False.
ONE_PASS = "fastattn-one-pass"
# Peers of the ratios: torch's fused kernels.
CUDNN = "sdpa-cudnn"
TORCH_PEERS = ("sdpa-flash", CUDNN, "flex")
# Most scores of a case for implementations that materialise them.
_MOST_SCORES = 2**30


def named(backend: str) -> str:
    """Name of our implementation with a backend."""
    return OURS if backend == "auto" else f"{OURS}-{backend}"


# Implementations by the order in which `auto` takes their kernels, its own record first.
BY_DEFAULT = (OURS, named("hopper"), PORTABLE)


def _holds_all_scores(case: Case) -> str | None:
    scores = case.B * case.H_q * case.T_q * case.T_k
    if scores > _MOST_SCORES:
        return f"holds {scores} scores in memory; measured up to {_MOST_SCORES}"
    return None


def _fastattn(backend: str, *, deterministic: bool = True) -> Implementation:
    def serves(case: Case) -> str | None:
        if not deterministic and case.direction == "forward":
            return f"it has the forward of {named(backend)}"
        # A forced backend reports the rest at the call.
        decodes = backend == "hopper" and case.family == "decode"
        return "it has no kernels for decoding" if decodes else None

    def prepare(case: Case, inputs: Inputs) -> Attention:
        if case.family == "decode":
            given = _arguments(case, inputs) | {"backend": backend}
            return lambda q, k, v: decode_attention(q, inputs.view, **given)
        how = _arguments(case, inputs) | {"backend": backend, "deterministic": deterministic}
        choice = explain(inputs.q, inputs.k, inputs.v, **how)
        if not (deterministic or choice.one_pass):
            raise Unserved(choice.reasons["one-pass"])
        return lambda q, k, v: attention(q, k, v, **how)

    name = named(backend)
    if not deterministic:
        name = ONE_PASS if backend == "triton" else f"{name}-one-pass"
    return Implementation(name, serves, prepare, chooses=_chosen if backend == "auto" else None)


def _arguments(case: Case, inputs: Inputs) -> dict[str, Any]:
    if case.family == "decode":  # a new token sees all keys, causal or not
        return {"window": case.window, **inputs.option}
    return {"causal": case.causal, "window": case.window, **inputs.arguments()}


def _chosen(case: Case, inputs: Inputs) -> str:
    """The implementation that `auto` is in this case."""
    how = _arguments(case, inputs)
    if case.family == "decode":
        return named(explain_decode(inputs.q, inputs.view, **how).backend)
    return named(explain(inputs.q, inputs.k, inputs.v, **how).backend)


def _naive(case: Case, inputs: Inputs) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = reference.attention(q, k, v, **_arguments(case, inputs))
        assert isinstance(o, Tensor)
        return o

    return call


def _sdpa(case: Case, inputs: Inputs) -> Attention:
    """scaled_dot_product_attention for a case."""
    ids = inputs.option.get("documents")
    whole = case.window is None and case.lengths is None and ids is None
    is_causal = whole and case.causal and case.T_q == case.T_k
    mask = None
    if not (is_causal or (whole and (not case.causal or case.T_q == 1))):
        options = {"causal": case.causal, "window": case.window, **inputs.padding()}
        sizes = (case.T_q, case.T_k)
        mask = reference.visible_mask(*sizes, device=inputs.q.device, **options)
        if ids is not None:
            mask = mask & (ids[:, None, :, None] == ids[:, None, None, :])

    grouped = case.H_q != case.H_k
    how: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": grouped}
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how)


def _pinned_sdpa(name: str, backend: SDPBackend) -> Implementation:
    def serves(case: Case) -> str | None:
        if case.device != "cuda":
            return "torch's backends can be pinned on a GPU only"
        all_scores = _holds_all_scores(case) if backend == SDPBackend.MATH else None
        return why_no_option(case) or all_scores

    def prepare(case: Case, inputs: Inputs) -> Attention:
        call = _sdpa(case, inputs)

        def pinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return call(q, k, v)

        return try_pinned(pinned, inputs)

    return Implementation(f"sdpa-{name}", serves, prepare)


def try_pinned(pinned: Attention, inputs: Inputs) -> Attention:
    """Return a pinned backend's call, or raise `Unserved` with torch's warnings if it refuses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pinned(inputs.q, inputs.k, inputs.v)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
        else:
            return pinned
    words = [str(warning.message).split(" (Triggered")[0] for warning in caught]
    kept = " ".join(text for text in words if "disabled" not in text)
    raise Unserved(" ".join(kept.split())[:300] or "torch refuses without a reason")


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    _fastattn("triton"),
    _fastattn("triton", deterministic=False),
    _pinned_sdpa("flash", SDPBackend.FLASH_ATTENTION),
    _pinned_sdpa("cudnn", SDPBackend.CUDNN_ATTENTION),
    *PEERS,
    _pinned_sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION),
    _fastattn("torch"),
    Implementation("sdpa", why_no_option, _sdpa),
    _pinned_sdpa("math", SDPBackend.MATH),
    Implementation("naive", _holds_all_scores, _naive),
    # Last: faulty kernels with barriers can hang the device.
    _fastattn("auto"),
    _fastattn("hopper"),
    _fastattn("hopper", deterministic=False),
    *EIGHT_BITS,
)
BY_NAME = {one.name: one for one in IMPLEMENTATIONS}
ON_CPU = tuple(BY_NAME[name] for name in ("fastattn-torch", "sdpa", "naive"))
