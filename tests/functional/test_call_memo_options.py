"""Known calls with options: no option is left out of the key, tensors are those of each call."""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import triton

from fastattn import attention, attention_varlen, decode_attention
from fastattn.cache.views import view_of_tensors
from fastattn.functional import call_memo
from fastattn.kernels.launch import launches
from fastattn.options import LEARNED, OPTIONS

pytestmark = pytest.mark.usefixtures("nothing_known", "backend")

B, H_Q, H_K, T, D = 2, 2, 1, 8, 16
CALLS = ("attention", "attention_varlen", "decode_attention")
# Users' functions read globals, and Triton looks at those again at each launch.
FUNCTIONS = {"mask_mod", "mod_tensors", "score_mod", "score_mod_grad"}
NOT_KNOWN = {
    "attention": FUNCTIONS | {"positions"},  # a pair of tensors
    "attention_varlen": FUNCTIONS,
    "decode_attention": FUNCTIONS | {"heads"},  # which counts in functions alone
}
# For kernels they get their batch dim at each call.
LAID_ANEW = {"relative_query", "query2", "key2"}
EACH = [(call, name) for call in CALLS for name, row in OPTIONS.items() if call in row.calls]


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend of all calls."""
    monkeypatch.setenv("FASTATTN_BACKEND", request.param)
    return request.param


def is_known(call: str, name: str, backend: str) -> bool:
    """Whether a second call with this option is found in the memo."""
    laid = call == "attention_varlen" and backend == "triton" and name in LAID_ANEW
    return name not in NOT_KNOWN[call] and not laid


@triton.jit
def doubled(x, b, h, q_pos, k_pos, factor_ptr):
    return x * triton.language.load(factor_ptr)


@triton.jit
def doubled_grad(dx, x, b, h, q_pos, k_pos, factor_ptr):
    return dx * triton.language.load(factor_ptr)


@triton.jit
def halved(x, b, h, q_pos, k_pos):
    return x * 0.5


@triton.jit
def by_head(b, h, q_pos, k_pos):
    return (k_pos + h) % 2 == 0


@triton.jit
def even(b, h, q_pos, k_pos):
    return k_pos % 2 == 0


@triton.jit
def odd(b, h, q_pos, k_pos):
    return k_pos % 2 == 1


def values(call: str, device: str, seed: int) -> dict[str, Any]:
    """A value of every option, another one for another seed; each changes the result."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(device)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (B,), generator=make).to(device)

    T_q = 1 if call == "decode_attention" else T
    return {
        "causal": call == "decode_attention",
        "window": (2 + seed, 0),
        "keep_first": 1 + seed,
        "stride": 2 + seed,
        "mod_tensors": (normal(1),),
        "mask_mod": (even, odd)[seed],
        "heads": (1 + seed, 5),
        "prefix_lengths": torch.tensor([3 + seed, 5], device=device),
        "key_lengths": torch.tensor([3 + seed, 5], device=device),
        "query_offset": integers(0, 3) - seed,
        "attn_mask": normal(B, 1, T_q, T) + 3 * torch.eye(T_q, T, device=device) > 0,
        "key_padding_mask": torch.arange(T, device=device).expand(B, T) > seed,
        "documents": torch.arange(T, device=device).expand(B, T).contiguous() // (2 + seed),
        "positions": tuple(torch.arange(T, device=device)[None].int() + n for n in (2 + seed, 0)),
        "scale": 0.5 + seed,
        "softcap": 1.0 + seed,
        "sinks": normal(H_Q),
        "attn_bias": normal(T_q, T),
        "relative_keys": normal(H_Q, 5, D),
        "relative_query": normal(*shape_of_q(call)),
        "query2": normal(*shape_of_q(call)),
        "key2": normal(*inputs(call, "cpu")[1].shape),
        "score_mod_grad": doubled_grad,
        "dropout": 0.25 + seed / 4,
        "dropout_seed": torch.tensor([seed, 1], device=device),
        "deterministic": False,
        "batch_invariant": True,
        "alibi_slopes": normal(H_Q).abs(),
        "relative_bias": normal(H_Q, 5),
        "score_mod": halved,
    }


def base(name: str, call: str, device: str) -> dict[str, Any]:
    """Other options that an option needs."""
    seeds = {"dropout_seed": torch.tensor([7, 7], device=device)}
    factor = (torch.full((1,), 2.0, device=device),)
    results: dict[str, dict[str, Any]] = {
        "keep_first": {"window": 2},
        "prefix_lengths": {"causal": True},
        "positions": {"causal": True},
        "query_offset": {"causal": True},
        "relative_query": {"relative_keys": torch.ones(H_Q, 5, D, device=device)},
        "query2": {"key2": inputs(call, device)[1]},
        "key2": {"query2": inputs(call, device)[0]},
        "dropout": seeds,
        "dropout_seed": {"dropout": 0.5},
        "heads": {"mask_mod": by_head} if call == "decode_attention" else {"dropout": 0.5, **seeds},
        "score_mod_grad": {"mod_tensors": factor, "score_mod": doubled},
        "mod_tensors": {"score_mod": doubled},
    }
    return results.get(name, {})


def shape_of_q(call: str) -> tuple[int, ...]:
    if call == "attention_varlen":
        return B * T, H_Q, D
    return B, H_Q, 1 if call == "decode_attention" else T, D


def inputs(call: str, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, and offsets or lengths."""
    make = torch.Generator().manual_seed(50 + seed)
    rows = (B * T, H_K, D) if call == "attention_varlen" else (B, H_K, T, D)
    shapes = (shape_of_q(call), rows, rows)
    q, k, v = (torch.randn(shape, generator=make).to(device) for shape in shapes)
    if call == "attention_varlen":
        return q, k, v, torch.tensor([0, T + seed, 2 * T], device=device)
    if call == "decode_attention":
        return q, k, v, torch.tensor([T - 1, T - seed], dtype=torch.int32, device=device)
    return q, k, v


def run(call: str, tensors: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    if call == "attention":
        return attention(*tensors, **options)
    if call == "attention_varlen":
        return attention_varlen(*tensors, **options)
    q, *cache = tensors
    return decode_attention(q, view_of_tensors(*cache), **options)


def test_every_option_is_tried(device: str) -> None:
    assert set(values("attention", device, 0)) == set(OPTIONS)


@pytest.mark.parametrize(("call", "name"), EACH)
def test_no_option_is_forgotten(
    call: str, name: str, device: str, checked: list[str], backend: str
) -> None:
    """Repeat calls with and without an option."""
    tensors, options = inputs(call, device), base(name, call, device)
    one, other = (values(call, device, seed)[name] for seed in (0, 1))
    if name == "mod_tensors":  # the function that reads them needs some
        options["mod_tensors"] = (torch.zeros(1, device=device),)
    elif name not in ("query2", "key2"):  # of which neither goes alone
        run(call, tensors, **options)
    if name == "score_mod_grad":
        run(call, tensors, **options, score_mod_grad=one)
        assert len(checked) == 2, "the option is no part of the key"
        return
    del checked[:]
    run(call, tensors, **{**options, name: one})
    assert len(checked) == 1, "the option is no part of the key"
    actual = run(call, tensors, **{**options, name: other})
    known = is_known(call, name, backend)
    known = known and (isinstance(other, torch.Tensor) or other == one)
    assert len(checked) == (1 if known else 2)
    call_memo.forget()
    launches.forget()
    assert torch.equal(actual, run(call, tensors, **{**options, name: other}))


@pytest.mark.parametrize("call", CALLS)
def test_the_tensors_are_those_of_the_call(call: str, device: str, checked: list[str]) -> None:
    first, second = inputs(call, device), inputs(call, device, 1)
    before = run(call, first)
    actual = run(call, second)
    assert len(checked) == 1
    call_memo.forget()
    assert torch.equal(actual, run(call, second)) and not torch.equal(actual, before)


def with_gradients(call: str, tensors: tuple[torch.Tensor, ...], **options: Any) -> Any:
    """o and the gradients of q, k, v and of the options that learn."""
    rows = [x.clone().requires_grad_() for x in tensors[:3]]
    learned = {n: x.clone().requires_grad_() for n, x in options.items() if n in LEARNED}
    o = run(call, (*rows, *tensors[3:]), **{**options, **learned})
    return o.detach(), *torch.autograd.grad(o, [*rows, *learned.values()], torch.ones_like(o))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (call, name)
        for call, name in EACH
        if isinstance(values(call, "cpu", 0)[name], torch.Tensor) and "decode" not in call
    ],
)
def test_known_calls_and_launches_take_the_tensors_of_the_call(
    call: str, name: str, device: str, checked: list[str], backend: str
) -> None:
    """Forward and backward: of a known call, and of one that is checked anew."""
    tensors, options = inputs(call, device), base(name, call, device)
    one, other = ({**options, name: values(call, device, seed)[name]} for seed in (0, 1))
    before = with_gradients(call, tensors, **one)
    actual = with_gradients(call, tensors, **other)
    assert len(checked) == (1 if is_known(call, name, backend) else 2)
    call_memo.forget()
    with mock.patch.object(launches.Launch, "bind") as bind:
        launched = with_gradients(call, tensors, **other)
    assert not bind.called
    call_memo.forget()
    launches.forget()
    fresh = with_gradients(call, tensors, **other)
    assert all(map(torch.equal, actual, fresh)) and all(map(torch.equal, launched, fresh))
    assert not torch.equal(before[0], actual[0]) and all(x.abs().sum() > 0 for x in actual)


def test_copies_for_one_call_beside_tables_of_another(device: str) -> None:
    """A relative query that starts between 16 bytes is copied, its launch is for one call."""
    tensors, given = inputs("attention", device), values("attention", device, 0)
    query = given["relative_query"]
    shifted = torch.empty(query.numel() + 1, device=device)[1:].view_as(query).copy_(query)
    for name in ("key_padding_mask", "attn_mask"):
        options = {**base("relative_query", "attention", device), name: given[name]}
        expected = with_gradients("attention", tensors, **options, relative_query=query)
        for _ in range(2):
            actual = with_gradients("attention", tensors, **options, relative_query=shifted)
            assert all(map(torch.equal, actual, expected))


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda x: x.int(),
    "strides": lambda x: torch.stack([x, x], 1)[:, 0],
    "alignment": lambda x: torch.cat([x[:1], x])[1:],
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_another_call(
    change: str, device: str, checked: list[str], backend: str
) -> None:
    tensors = inputs("attention", device)
    lengths = torch.tensor([3, 6], device=device)
    expected = run("attention", tensors, key_lengths=lengths)
    for _ in range(2):
        changed = CHANGES[change](lengths)
        assert torch.equal(run("attention", tensors, key_lengths=changed), expected)
    # For kernels a copy in order is made at each call.
    assert len(checked) == (3 if change == "strides" and backend == "triton" else 2)


@pytest.mark.parametrize("call", ["attention", "attention_varlen"])
def test_one_tensor_for_two_options(call: str, device: str) -> None:
    """The next call has two, which lie as it did."""
    tensors = inputs(call, device)
    names = ("cu_seqlens_q", "cu_seqlens_k") if call == "attention_varlen" else (
        "key_lengths", "query_offset"
    )  # fmt: skip
    one, other = (torch.tensor(x, device=device) for x in ([0, 9, 16], [0, 6, 16]))
    if call == "attention":
        one, other = one[:2] + 4, other[:2] + 1
    for x, y in ((one, one), (one, other), (other, one)):
        given = {names[0]: x, names[1]: y, "causal": True}
        actual = run(call, tensors[:3], **given)
        if x is not y:
            call_memo.forget()
            launches.forget()
        fresh = run(call, tensors[:3], **given)
        assert torch.equal(actual, fresh)


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("key_lengths", torch.tensor([3, 4]), torch.tensor([3])),
        ("key_lengths", torch.tensor([3, 4]), torch.tensor([3.0, 4.0])),
        ("alibi_slopes", torch.ones(H_Q), torch.ones(H_Q, requires_grad=True)),
        ("sinks", torch.ones(H_Q), [1.0, 1.0]),
        ("query_offset", torch.tensor([0, 1]), torch.tensor([0, 1, 2])),
    ],
    ids=str,
)
def test_a_wrong_tensor_is_refused(name: str, value: Any, wrong: Any, device: str) -> None:
    tensors = inputs("attention", device)
    run("attention", tensors, **{name: value.to(device)})
    wrong = wrong.detach().to(device).requires_grad_(wrong.requires_grad) if isinstance(
        wrong, torch.Tensor
    ) else wrong  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=name):
        run("attention", tensors, **{name: wrong})


@pytest.mark.skipif(torch.cuda.is_available(), reason="values are read on the CPU alone")
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_are_read_at_each_call(name: str) -> None:
    q, k, v, offsets = inputs("attention_varlen", "cpu")
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone()}
    for _ in range(2):
        attention_varlen(q, k, v, **given)
    with pytest.raises(ValueError, match=f"{name} must not fall, got 99 then 16"):
        attention_varlen(q, k, v, **{**given, name: torch.tensor([0, 99, 16])})


@pytest.mark.parametrize("learned", ["q", "sinks"])
def test_grad_mode_is_seen_by_decode(learned: str, device: str) -> None:
    q, *cache = inputs("decode_attention", device)
    sinks = torch.zeros(H_Q, device=device)
    (q if learned == "q" else sinks).requires_grad_()
    with torch.no_grad():
        run("decode_attention", (q, *cache), sinks=sinks)
    with pytest.raises(RuntimeError, match="decode_attention has no gradients"):
        run("decode_attention", (q, *cache), sinks=sinks)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_that_a_call_brought_is_kept(call: str, device: str) -> None:
    names = (
        {name for name, row in OPTIONS.items() if call in row.calls} - NOT_KNOWN[call] - LAID_ANEW
    )
    given = {name: x for name, x in values(call, device, 0).items() if name in names}
    given = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    given.pop("dropout_seed", None)
    given["causal"] = True
    tensors = inputs(call, device)
    for _ in range(2):
        o = run(call, tensors, **given)
    held = [x for x in (*tensors, *given.values(), o) if isinstance(x, torch.Tensor)]
    tracked = [weakref.ref(x) for x in held] + [weakref.ref(x.untyped_storage()) for x in held]
    assert call_memo._slot.cache_info().currsize == 1
    del tensors, given, held, o
    gc.collect()
    assert [x() for x in tracked] == [None] * len(tracked)


def test_decoding_as_rows_grow_is_one_call(device: str, checked: list[str]) -> None:
    """The bound on the lengths is not in the key, unless a mask must reach as far."""
    q, k, v, lengths = inputs("decode_attention", device)
    bias = torch.zeros(1, T, device=device)
    for bound in (5, 6):
        view = view_of_tensors(k, v, lengths, length_bound=bound)
        decode_attention(q, view)
    assert len(checked) == 1
    for bound in (5, 6):
        view = view_of_tensors(k, v, lengths, length_bound=bound)
        decode_attention(q, view, attn_bias=bias)
    assert len(checked) == 3
