"""Known calls with options: whatever differs alone, the outcome is its; no tensor is kept."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fuzz.cases import Case, legal
from fuzz.tensors import inputs
from fuzz.values import drawn_options
from outcomes import differing, forget, others, outcome, succeeded
from torch import Tensor

from fastattn import attention, attention_varlen, decode_attention
from fastattn.cache.views import view_of_tensors
from fastattn.functional import call_memo
from fastattn.options import LEARNED, OPTIONS
from fastattn.testing.calls import CALLS
from fastattn.testing.inputs import to_device

pytestmark = pytest.mark.usefixtures("nothing_known")

Arguments = dict[str, Any]
FUNCTIONS = {f.__name__: f for f in (attention, attention_varlen, decode_attention)}
# Users' functions read globals, and Triton looks at those again at each launch.
OF_USERS = {"mask_mod", "mod_tensors", "score_mod", "score_mod_grad"}
NOT_KNOWN = {
    "attention": OF_USERS | {"positions"},  # a pair of tensors
    "attention_varlen": OF_USERS,
    "decode_attention": OF_USERS,
}
# For kernels they get their batch dim, or whole vectors of 16 bytes, at each call.
LAID_ANEW = {"query2", "key2"}
# What a call may be made in, and the options that it may be given beside.
AROUND: tuple[Arguments, ...] = (
    {"autocast": torch.bfloat16}, {"autocast": torch.float16}, {"no_grad": True},
    {"environment": "torch"}, {"environment": "none"}, {"backend": "none"},
)  # fmt: skip
EACH = [(call, name) for call in FUNCTIONS for name, row in OPTIONS.items() if call in row.calls]


def case_of(call: str, *names: str) -> Case:
    """A call with these options, and those that they need."""
    B, T_q, T_k = {"attention_varlen": (1, 16, 16), "decode_attention": (2, 1, 8)}.get(
        call, (2, 8, 8)
    )
    return legal(Case(
        seed=0, call=call, backend="triton", B=B, H_k=1, G=2, T_q=T_q, T_k=T_k, D=16, D_v=16,
        dtype=torch.float32, layouts=("plain",) * 3, tile=(16, 16), options=names,
        traits=frozenset(() if CALLS[call].learns else ("forward",)),
    ))  # fmt: skip


def arguments_of(case: Case, device: str) -> Arguments:
    q, k, v = inputs(case)
    given: Arguments = {"q": q, "k": k, "v": v, "return_lse": True}
    if case.packed:
        packed = {name: given[name].transpose(1, 2).flatten(0, 1) for name in "qkv"}
        given |= {**packed, "cu_seqlens_q": torch.tensor([0, 6, 16])}
    if case.call == "decode_attention":
        given["lengths"] = torch.tensor([7, 8], dtype=torch.int32)
    return {**to_device(given, device), **options_of(case, device)}


def options_of(case: Case, device: str, salt: str = "") -> Arguments:
    """Drawn values; of a `BlockMask` the function, as its lists are made once."""
    drawn = drawn_options(case, 2, salt)
    return to_device({name: getattr(x, "mask_mod", x) for name, x in drawn.items()}, device)


def run(
    call: str, *, autocast: torch.dtype | None = None, no_grad: bool = False,
    environment: str | None = None, **given: Any,
) -> Any:  # fmt: skip
    """o, lse, and the gradients of q, k, v and of the options that learn."""
    learn = ("q", "k", "v", *LEARNED) if CALLS[call].learns else ()
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in given.items()
        if name in learn and isinstance(x, Tensor)
    }
    given |= leaves
    device = given["q"].device
    if call == "decode_attention":
        lengths = given.pop("lengths")
        given["cache"] = view_of_tensors(given.pop("k"), given.pop("v"), lengths)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        if environment is not None:
            patch.setenv("FASTATTN_BACKEND", environment)
        with (
            torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None),
            torch.set_grad_enabled(not no_grad),
        ):
            results = FUNCTIONS[call](**given)
    results = results if isinstance(results, tuple) else (results,)
    if not results[0].requires_grad:
        return results
    ones = [torch.ones_like(x) for x in results]
    of = torch.autograd.grad(results, list(leaves.values()), ones, allow_unused=True)
    return *results, *of


def is_shifted(x: Any) -> bool:
    """Whether x starts between 16 bytes."""
    return isinstance(x, Tensor) and x.data_ptr() % 16 > 0


def changed(given: Arguments, other: Arguments, names: set[str]) -> Iterator[Arguments]:
    """Arguments that differ in one of these, or that the call has not."""
    for name in names & given.keys():
        for x in (other[name], *(() if name in OF_USERS else others(given[name]))):
            yield {**given, name: x}
        if name in OPTIONS:
            yield {n: x for n, x in given.items() if n != name}
        if isinstance(given[name], Tensor):
            for also in names & given.keys() - {name}:  # one tensor given twice
                yield {**given, name: given[also]}


def assert_none_is_forgotten(call: str, calls: list[Arguments]) -> None:
    """Each call's outcome is as if nothing were known, although all that went before are."""
    expected = []
    for given in calls:
        forget()
        expected.append(outcome(partial(run, call), **given))
    forget()
    for n, given in enumerate(calls):
        actual = outcome(partial(run, call), **given)
        assert actual == expected[n], differing(calls[0], given)
    assert succeeded(expected[0]), expected[0]
    assert any(x != expected[0] for x in expected)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("call", FUNCTIONS)
def test_no_input_is_forgotten(call: str, backend: str, device: str, one_thread: None) -> None:
    """Nor what a call is made in."""
    given = {**arguments_of(case_of(call, "causal"), device), "backend": backend}
    open_to = {name: x for name, x in given.items() if name != "backend"}
    calls = [given, *changed(given, given, set(given) - {"backend"})]
    # Of one row of packed sequences a copy has another stride, which says nothing.
    if (call, backend) == ("attention_varlen", "triton"):
        calls = [x for x in calls if not any(is_shifted(x[name]) for name in "qkv")]
    calls += [{**open_to, "environment": backend, **around} for around in AROUND]
    assert_none_is_forgotten(call, calls)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("call", FUNCTIONS)
def test_no_option_is_forgotten(
    call: str, backend: str, device: str, checked: list[str], one_thread: None
) -> None:
    """And of tensors alone nothing is checked but once."""
    for name in (name for of, name in EACH if of == call):
        case = case_of(call, name)
        given = {**arguments_of(case, device), "backend": backend}
        other = options_of(case, device, "/other")
        calls = [given, *changed(given, other, {*case.options})]
        assert_none_is_forgotten(call, calls)
        forget()
        outcome(partial(run, call), **given)
        del checked[:]
        outcome(partial(run, call), **given)
        assert len(checked) == (0 if is_known(call, given, backend) else 1), name


def is_known(call: str, given: Arguments, backend: str) -> bool:
    """Whether a second call with these arguments is found in the memo."""
    laid = LAID_ANEW if backend == "triton" else set()
    laid = laid | {"relative_query"} if laid and call == "attention_varlen" else laid
    return not given.keys() & (NOT_KNOWN[call] | laid) and not any(map(has_no_key, given.values()))


def has_no_key(x: Any) -> bool:
    """Whether x is a pair of tensors, or a tensor with torch's negative bit."""
    return (
        isinstance(x[0], Tensor) if isinstance(x, tuple) else isinstance(x, Tensor) and x.is_neg()
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("call", FUNCTIONS)
def test_nothing_that_a_call_brought_is_kept(call: str, backend: str, device: str) -> None:
    names = {name for of, name in EACH if of == call} - NOT_KNOWN[call] - LAID_ANEW
    names -= {"relative_query", "dropout_seed", "dropout", "batch_invariant", "query_offset"}
    given = {**arguments_of(case_of(call, *names), device), "backend": backend}
    given = {name: x for name, x in given.items() if not has_no_key(x)}
    for _ in range(2):
        results = run(call, **given, no_grad=True)
    held = [x for x in (*given.values(), *results) if isinstance(x, Tensor)]
    tracked = [weakref.ref(x) for x in held] + [weakref.ref(x.untyped_storage()) for x in held]
    assert call_memo._slot.cache_info().currsize == 1
    del given, held, results
    gc.collect()
    assert [x() for x in tracked] == [None] * len(tracked)


def test_copies_for_one_call_beside_tables_of_another(device: str) -> None:
    """A relative query that starts between 16 bytes is copied, its launch is for one call."""
    for name in ("key_padding_mask", "attn_mask"):
        given = arguments_of(case_of("attention", "relative_query", name), device)
        query = given["relative_query"]
        shifted = torch.empty(query.numel() + 1, device=device)[1:].view_as(query).copy_(query)
        alone = {n: x for n, x in given.items() if n != name}
        calls = [alone, given, *({**given, "relative_query": shifted} for _ in range(2))]
        assert_none_is_forgotten("attention", calls)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_decoding_as_rows_grow_is_one_call(backend: str, device: str, checked: list[str]) -> None:
    """The bound on the lengths is not in the key, unless a mask must reach as far."""
    given = arguments_of(case_of("decode_attention"), device)
    bias = torch.zeros(1, 8, device=device)
    for options, expected in (({}, 1), ({"attn_bias": bias}, 3)):
        for bound in (7, 8):
            rows = (given["k"], given["v"], given["lengths"].clamp(max=7))
            view = view_of_tensors(*rows, length_bound=bound)
            decode_attention(given["q"], view, backend=backend, **options)
        assert len(checked) == expected
