"""torch's own attention: its flags, what it computes twice, and nothing to attend to."""

from functools import partial
from typing import Any

import pytest
import torch
from held import Held
from scores_in_memory import in_chunks
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import fastattn
from fastattn import reference
from fastattn.functional import call_memo
from fastattn.options import LEARNED
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.testing.inputs import draw, draws
from fastattn.testing.option_examples import option_examples
from fastattn.torch_backend import cpu_kernel, decode
from fastattn.torch_backend import torch_attention as torch_backend


def torch_attention(q, k, v, **arguments):
    return fastattn.attention(q, k, v, backend="torch", **arguments)


def test_no_mask_is_built_where_torch_has_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = torch_backend.scaled_dot_product_attention

    def recorded(*inputs, **options):
        seen.append((options["attn_mask"] is None, options["is_causal"], options["enable_gqa"]))
        return original(*inputs, **options)

    monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", recorded)
    square = make_qkv(1, 4, 2, 6, D=8)
    torch_attention(*square, causal=True)
    torch_attention(*square)
    torch_attention(*make_qkv(1, 2, 2, 1, 6, 8), causal=True)
    torch_attention(*make_qkv(1, 2, 2, 3, 6, 8), causal=True)
    assert seen == [
        (True, True, True),
        (True, False, True),
        (True, False, False),
        (False, False, False),
    ]


def test_torch_gets_what_it_computes_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls with gradients and one query in fp32, without native products all of fp16."""
    seen: list[Any] = []
    for module in (torch_backend, decode):
        original = module.scaled_dot_product_attention

        def recorded(q: Tensor, *inputs: Any, original: Any = original, **options: Any) -> Tensor:
            seen.append((q.dtype, *q.shape[1:3]))
            return original(q, *inputs, **options)

        monkeypatch.setattr(module, "scaled_dot_product_attention", recorded)

    def call(dtype: torch.dtype, H_q: int, T: int, *, learns: bool, **options: Any) -> Tensor:
        q, k, v = (x.detach().to(dtype) for x in make_qkv(1, H_q, 2, T, 150, 8))
        return torch_attention(q.requires_grad_(learns), k, v, **options)

    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for native in (True, False):
        monkeypatch.setattr(cpu_kernel, "_multiplies_fp16", lambda native=native: native)
        call(fp16, 2, 150, learns=False)
    assert seen == [(fp16, 2, 150), (fp32, 2, 150)]
    seen.clear()
    for how in ((2, 8, True), (2, 8, False), (2, 150, True), (2, 1, False), (4, 1, False)):
        call(bf16, *how[:2], learns=how[2], key_lengths=torch.tensor([90]))
    call(bf16, 4, 1, learns=False, attn_bias=torch.zeros(1, 4, 1, 150, dtype=bf16))
    with torch.no_grad():
        call(bf16, 2, 8, learns=True)
    shorts = [(fp32, 2, 8), (bf16, 2, 8), (bf16, 2, 150)]
    assert seen == [*shorts, (fp32, 2, 1), (bf16, 2, 2), (fp32, 4, 1), (bf16, 2, 8)]
    seen.clear()
    cache = fastattn.KVCache(1, 2, max_length=8, head_dim=8, dtype=bf16)
    cache.append(*torch.randn(2, 1, 2, 4, 8, dtype=bf16))
    with torch.no_grad():
        for heads in (2, 4, 4):
            q = torch.randn(1, heads, 1, 8, dtype=bf16)
            assert fastattn.decode_attention(q, cache, backend="torch").dtype == bf16
    assert seen == [(fp32, 2, 1), (bf16, 2, 2), (bf16, 2, 2)]


EXAMPLES = option_examples(4, 2, 12, 12, 8, reach=4)


@pytest.mark.parametrize("at_once", [512, 0])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_output_is_that_beside_an_lse(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever kernel or formula computes it."""
    monkeypatch.setattr(torch_backend, "_KEYS_AT_ONCE", at_once)
    call_memo.forget()
    q, k, v = make_qkv(2, 4, 2, 12, 12, 8)
    learned = {x: y.clone().requires_grad_() for x, y in EXAMPLES[name].items() if x in LEARNED}
    example, leaves = EXAMPLES[name] | learned, (q, k, v, *learned.values())
    for options in (example, {"causal": True, **example}):
        o, lse = torch_attention(q, k, v, return_lse=True, **options)
        with torch.no_grad():
            torch.testing.assert_close(
                torch_attention(q, k, v, return_lse=True, **options), (o.detach(), lse.detach())
            )
        alone = torch_attention(q, k, v, **options)
        torch.testing.assert_close(alone, o)
        of_graph = torch.autograd.grad(alone.sin().sum(), leaves, create_graph=True)
        grads = [torch.autograd.grad(x.sin().sum(), leaves) for x in (alone, o)]
        torch.testing.assert_close(*grads)
        torch.testing.assert_close([x.detach() for x in of_graph], list(grads[1]))


# Of prefixes, a window to the right is seen.
NEAR = {"window": (1, 1)}
NARROW = {"all": {}, "window": NEAR, "first": {**NEAR, "keep_first": 2}}


@pytest.mark.parametrize("near", NARROW)
@pytest.mark.parametrize("name", EXAMPLES)
def test_chunks_of_queries(name: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are those of the whole, and no tensor holds all scores."""
    q, k, v = make_qkv(2, 4, 2, 12, D=8)
    learned = {x: y.clone().requires_grad_() for x, y in EXAMPLES[name].items() if x in LEARNED}
    options = {"causal": True, **NARROW[near], **EXAMPLES[name], **learned}

    def results() -> list[Tensor]:
        o, lse = torch_attention(q, k, v, return_lse=True, **options)
        alone = torch_attention(q, k, v, **options)
        loss = o.sin().sum() + lse.sigmoid().sum() + alone.cos().sum()
        recomputed.append("Recomputed" in alone.grad_fn.name())
        return [o, lse, alone, *torch.autograd.grad(loss, (q, k, v, *learned.values()))]

    recomputed: list[bool] = []
    expected = results()
    made = in_chunks(monkeypatch, 100)
    torch.testing.assert_close(results(), expected)
    assert recomputed == [False, True]
    given = [x.numel() for x in EXAMPLES[name].values() if isinstance(x, Tensor)]
    assert max(made, default=0) <= max(100, *given, 0)  # of 2 * 4 * 12 * 12 scores


def scored(x: Tensor, gain: Tensor, ids: Tensor, backend: str = "torch") -> Tensor:
    mod = {"score_mod": lambda s, b, h, i, j: s * gain[h]}
    return fastattn.attention(x, x, x, documents=ids, backend=backend, **mod)


LISTS = torch.tensor([0, 1, 2]).expand(1, 1, 3, 3)
AGAIN = {
    "chunks": scored,
    "kernels": lambda *given: scored(*given, "triton"),
    "additive": lambda x, u, ids: fastattn.additive_attention(x, x, x, u, documents=ids),
    "blocks": lambda x, sinks, ids: fastattn.selected_attention(
        x, x, x, LISTS.to(x.device), block=(2, 2), sinks=sinks, documents=ids, backend="torch"
    ),
}


@pytest.mark.parametrize("name", AGAIN)
def test_gradients_that_are_computed_again(name: str, device: str, monkeypatch: Any) -> None:
    """Inside a checkpoint too, which lets saved tensors be read once; not after a mask changed."""
    x, gain = (draws(device=device)(*shape).requires_grad_() for shape in ((1, 2, 6, 2), (2,)))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]], device=device)

    def gradients(call: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(x, gain, ids).sin().sum(), (x, gain))

    expected = gradients(AGAIN[name])
    in_chunks(monkeypatch, 10)
    again = partial(checkpoint, AGAIN[name], use_reentrant=False)
    torch.testing.assert_close(gradients(again), expected)
    o = AGAIN[name](x, gain, ids)
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(("first", "at_once"), [(0, 2**22), (2, 2**22), (2, 20)])
def test_narrow_windows_skip_keys(
    first: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have chunks of as many queries, however many keys are outside."""
    made, (q, k, v) = in_chunks(monkeypatch, at_once), make_qkv(2, 4, 2, 12, D=8)
    torch_attention(q, k, v, causal=True, window=2, keep_first=first)
    assert max(made) == 2 * (3 + first)  # two queries see three keys beside the first


def test_learned_biases_have_chunks_of_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bias for all rows and heads, of which torch's formula makes a copy for each."""
    in_chunks(monkeypatch, 300)
    q, k, v = make_qkv(2, 4, 2, 12, D=8)
    o = torch_attention(q, k, v, attn_bias=torch.zeros(1, 1, 12, 12, requires_grad=True))
    assert "Recomputed" in o.grad_fn.name()


@pytest.mark.parametrize("option", [{"softcap": 9.0}, {"key_lengths": torch.tensor([16])}])
def test_sums_of_chunks_are_rounded_once(option: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two gradients almost cancels the first."""
    in_chunks(monkeypatch, 1)
    q, k, v = (torch.full((1, 2, 16, 8), x, dtype=torch.bfloat16) for x in (0, 0, 1))
    leaves = [v.requires_grad_(), torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)]
    o = torch_attention(q, k, v, sinks=leaves[1], **option)
    do = torch.tensor([1, -1 - 2**-7]).repeat(8)[:, None].expand(o.shape)
    dv, dsinks = (x.float() for x in torch.autograd.grad(o, leaves, do.to(o.dtype)))
    weight, total = 1 / 17, -8 * 2**-7  # of each key and sink; the sum of do
    torch.testing.assert_close(dv, torch.full_like(dv, weight * total), rtol=4e-3, atol=0)
    expected = torch.full_like(dsinks, -weight * 16 * weight * 8 * total)
    torch.testing.assert_close(dsinks, expected, rtol=4e-3, atol=0)


def test_chunks_drop_the_same_weights_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """o is linear in v. Torch draws each chunk, without a seed."""
    in_chunks(monkeypatch, 256)
    q, k, v = make_qkv(2, 4, 2, 12, D=8, dtype=torch.float64)
    o = torch_attention(q, k, v, causal=True, dropout=0.5)
    torch.rand(1)
    state = torch.get_rng_state()
    (dv,) = torch.autograd.grad(o.sin().sum(), v)
    assert torch.equal(torch.get_rng_state(), state)
    assert o.grad_fn is not None and "Recomputed" in o.grad_fn.name()
    torch.testing.assert_close((o * o.cos()).sum(), (v * dv).sum())


@pytest.mark.parametrize("sink", [torch.inf, -torch.inf])
@pytest.mark.parametrize("length", [0, 5])
def test_infinite_sinks_are_those_of_the_reference(sink: float, length: int) -> None:
    q, k, v = make_qkv(1, 2, 2, 5, D=8)
    options = {"sinks": torch.tensor([0, sink]), "key_lengths": torch.tensor([length])}
    actual = torch_attention(q, k, v, return_lse=True, **options)
    exact = reference.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(actual, exact, equal_nan=True)


def test_one_column_of_heads_side_by_side() -> None:
    """torch reads the strides of such tensors in two ways."""
    q, k, v = (draw(2, 7, heads, 1).transpose(1, 2) for heads in (3, 1, 1))
    assert_matches_reference(torch_attention, q, k, v, sinks=draw(3))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_no_sequences_have_gradients(backend: str, return_lse: bool, device: str) -> None:
    """Train on nothing; a step whose batch is empty on one rank must go on."""
    q, k, v = (torch.zeros(0, 2, D, device=device, requires_grad=True) for D in (8, 8, 12))
    sinks = torch.zeros(2, device=device, requires_grad=True)
    actual = fastattn.attention_varlen(
        q, k, v, torch.zeros(1, dtype=torch.int32, device=device), sinks=sinks,
        return_lse=return_lse, backend=backend,
    )  # fmt: skip
    o, *rest = actual if return_lse else (actual,)
    assert o.shape == (0, 2, 12) and [x.shape for x in rest] == [(2, 0)] * return_lse
    leaves = (q, k, v, sinks)
    for grad, x in zip(
        torch.autograd.grad(sum(x.sum() for x in (o, *rest)), leaves), leaves, strict=True
    ):
        assert grad.shape == x.shape and (grad == 0).all()


def test_gradients_of_packed_sequences_are_joined_once() -> None:
    """No sequence makes one as large as that of all."""
    made = []
    for count in (10, 20):
        leaves = [torch.zeros(3 * count, 2, 8, requires_grad=True) for _ in range(4)]
        offsets = torch.arange(0, 3 * count + 1, 3, dtype=torch.int32)
        o = fastattn.attention_varlen(
            *leaves[:3], offsets, relative_query=leaves[3], relative_keys=torch.zeros(2, 3, 8),
            backend="torch",
        )  # fmt: skip
        with Held() as held:
            torch.autograd.grad(o.sum(), leaves)
        made.append(held.total)
    assert made[1] <= 2 * made[0]


def test_first_derivatives_stay_those_of_the_fused_kernel() -> None:
    q, k, v = (torch.randn(2, 4, 9, 8, requires_grad=True) for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = fastattn.attention(q, k, v, causal=True, backend="torch")
    for x, y in zip(
        torch.autograd.grad(ours.sum(), (q, k, v)),
        torch.autograd.grad(plain.sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.equal(x, y)


def test_a_mask_that_inference_made_serves_training() -> None:
    """The mask of a window is kept with the call."""
    q, k, v = make_qkv(1, 2, 2, 7, D=8)
    with torch.inference_mode():
        expected = torch_attention(*(x.detach() for x in (q, k, v)), causal=True, window=3)
    o = torch_attention(q, k, v, causal=True, window=3)
    assert torch.equal(o, expected)
    assert all(x.any() for x in torch.autograd.grad(o.sin().sum(), (q, k, v)))


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=["any", "invariant"])
def test_a_call_that_sees_no_key_has_gradients(options: dict) -> None:
    q, k, v = make_qkv(1, 2, 2, 7, D=8)
    o = torch_attention(q, k, v, key_lengths=torch.tensor([0]), **options)
    assert not any(x.any() for x in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize(("name", "value"), [("k", -torch.inf), ("v", 3e38)])
def test_numbers_of_padding_that_reach_no_output_reach_no_gradient(name: str, value: float) -> None:
    q, k, v = make_qkv(1, 2, 2, 7, D=8, requires_grad=False)
    inputs = {"q": q.abs(), "k": k, "v": v}  # a key of -inf has scores of -inf

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        o = torch_attention(*leaves, key_lengths=torch.tensor([5]))
        return torch.autograd.grad((3 * o).sum(), leaves)

    expected = gradients()
    inputs[name][:, :, 5:] = value
    torch.testing.assert_close(gradients(), expected)


@pytest.mark.parametrize("name", ["return_max", "selected"])
def test_one_graph_serves_every_length(name: str) -> None:
    def call(q: Tensor, lists: Tensor) -> Any:
        if name == "selected":
            return fastattn.selected_attention(q, q, q, lists, block=(1, 4), backend="torch")
        return fastattn.attention(q, q, q, return_max=True, backend="torch")

    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for T in (9, 16, 20):
        compiled(torch.randn(2, 4, T, 8), torch.zeros(2, 1, T, 3, dtype=torch.int32))
    assert counter.frame_count == 1


@pytest.mark.parametrize("records", [False, True])
def test_autocast_rounds_nothing_inside(records: bool) -> None:
    """In 16 bits torch's function runs in fp32, and its gradients are those of that."""
    q, k, v = (x.detach().requires_grad_(records) for x in make_qkv(1, 2, 1, 5, D=8))
    expected = torch_attention(*(x.half() for x in (q, k, v)))
    with torch.autocast("cpu", torch.float16):
        o = torch_attention(q, k, v)
    assert o.dtype == torch.float16 and torch.equal(o, expected)
    if records:
        (dq,) = torch.autograd.grad(o.float().sin().sum(), q, create_graph=True)
        assert torch.autograd.grad(dq.sum(), k)[0].isfinite().all()
