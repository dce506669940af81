"""`fastattn.MultiheadAttention` against `torch.nn.MultiheadAttention`."""

import copy
import pickle
from typing import Any

import pytest
import torch
from nightly import gate_cases
from oracles import assert_by_oracle
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

import fastattn
from fastattn.compat.calls import running
from fastattn.ops import spread
from fastattn.testing import assert_within_budget
from fastattn.testing.calls import Draw

pytestmark = pytest.mark.usefixtures("one_thread")

N, L, S, E, H = 2, 4, 6, 16, 4

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias-batch-first": {"bias": False, "batch_first": True},
    "widths": {"kdim": 12, "vdim": 10},
    "appended": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "appended-widths": {"add_bias_kv": True, "kdim": 12, "vdim": 10},
    "zero": {"add_zero_attn": True, "bias": False},
}


def pair(**kwargs: Any) -> tuple[nn.MultiheadAttention, fastattn.MultiheadAttention]:
    """torch's layer and ours with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, **kwargs)
    ours = fastattn.MultiheadAttention(E, H, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def inputs(layer: nn.MultiheadAttention, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((L, E), (S, layer.kdim), (S, layer.vdim))
    tensors = [torch.randn(N, T, width, generator=generator) for T, width in sizes]
    return tensors if layer.batch_first else [x.transpose(0, 1) for x in tensors]


def masks() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def hidden(*shape: int) -> Tensor:
        # The first key stays visible: torch gives NaN where none is.
        return (torch.rand(shape, generator=generator) > 0.6) & (torch.arange(shape[-1]) > 0)

    def added(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "none": {},
        "padding": {"key_padding_mask": hidden(N, S)},
        "padding-added": {"key_padding_mask": added(N, S)},
        "mask": {"attn_mask": hidden(L, S)},
        "mask-per-head": {"attn_mask": hidden(N * H, L, S)},
        "mask-added": {"attn_mask": added(L, S)},
        "both": {"key_padding_mask": hidden(N, S), "attn_mask": hidden(N * H, L, S)},
        "both-added": {"key_padding_mask": added(N, S), "attn_mask": added(N * H, L, S)},
        "of two kinds": {"key_padding_mask": hidden(N, S), "attn_mask": added(L, S)},
    }


def results(layer: nn.MultiheadAttention, tensors: list[Tensor], kwargs: Any) -> list[Tensor]:
    """Output, weights, and the gradients of inputs and parameters through both."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    given = [x for x in layer(*tensors, **kwargs) if x is not None]
    assert layer.batch_first or given[0].is_contiguous()
    loss = sum(x.square().sum() for x in given)
    return [*given, *torch.autograd.grad(loss, [*tensors, *layer.parameters()])]


def cast(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    floats = {n for n, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return {name: x.to(dtype) if name in floats else x for name, x in kwargs.items()}


def assert_equals_torch(theirs, ours, tensors, kwargs, results=results) -> None:
    def by_torch(dtype: torch.dtype) -> list[Tensor]:
        layer = copy.deepcopy(theirs).to(dtype)
        return results(layer, [x.to(dtype) for x in tensors], cast(kwargs, dtype))

    assert_by_oracle(results(ours, tensors, kwargs), by_torch)


def drawn_call(draw: Draw) -> tuple[dict[str, Any], list[int], dict[str, Any]]:
    """Arguments of a layer, sizes [E, H, N, L, S] of a call, and its own arguments; N 0: no batch.

    The first key stays visible: torch gives NaN where none is.
    """
    H, N, L, S = (draw.choice(1, 2, 4), draw.choice(0, 1, 2, 3), *(draw.integer(1, 5),) * 2)
    S = L if draw.chance(0.3) else draw.integer(1, 6)
    flags = ("bias", "batch_first", "add_bias_kv", "add_zero_attn")
    layer: dict[str, Any] = {name: draw.chance(0.5) for name in flags}
    layer |= {name: draw.choice(6, 10) for name in ("kdim", "vdim") if draw.chance(0.3)}
    call: dict[str, Any] = {"need_weights": draw.chance(0.6)}
    call["average_attn_weights"] = draw.chance(0.5)

    def mask(*shape: int) -> Tensor:
        hidden = draw.bools(0.5, *shape) & (torch.arange(shape[-1]) > 0)
        return hidden if draw.chance(0.6) else draw.normal(*shape).double()

    if draw.chance(0.5):
        call["key_padding_mask"] = mask(*([N] if N else []), S)
    if draw.chance(0.6):
        call["attn_mask"] = mask(*([max(1, N) * H] if draw.chance(0.5) else []), L, S)
    elif draw.chance(0.5):
        causal = torch.ones(L, S, dtype=torch.bool).triu(1)
        call |= {"attn_mask": causal, "is_causal": True}
    return layer, [H * draw.choice(2, 4), H, N, L, S], call


@pytest.mark.filterwarnings("ignore:.*mismatched key_padding_mask and attn_mask:UserWarning")
def test_generated_calls_equal_torch(on_torch):
    """In fp64, where an error is no rounding."""
    for seed in range(200):
        draw = Draw(f"{seed}/multihead")
        options, (E, H, N, L, S), call = drawn_call(draw)
        theirs = nn.MultiheadAttention(E, H, **options).double()
        for x in theirs.parameters():
            nn.init.normal_(x, std=0.5)
        ours = fastattn.MultiheadAttention(E, H, **options).double()
        ours.load_state_dict(theirs.state_dict())
        tensors = []
        for T, width in ((L, E), (S, theirs.kdim), (S, theirs.vdim)):
            x = draw.normal(*([N] if N else []), T, width).double()
            tensors.append(x if not N or theirs.batch_first else x.transpose(0, 1))
        expected = results(theirs, tensors, call)
        for i, (x, y) in enumerate(zip(results(ours, tensors, call), expected, strict=True)):
            assert_within_budget(f"seed {seed}, {options}, {call}: result {i}", x, y, y)


@pytest.mark.parametrize(("name", "need_weights"), [("padding", True), ("both-added", False)])
def test_kernels_equal_torch(device, name, need_weights):
    theirs, ours = (x.to(device) for x in pair(batch_first=True))
    ours.backend = "triton"
    kwargs = {n: x.to(device) for n, x in masks()[name].items()} | {"need_weights": need_weights}
    tensors = [x.to(device) for x in inputs(theirs)]
    assert_equals_torch(theirs, ours, tensors, kwargs)

    @torch.no_grad()
    def results(layer, tensors, kwargs):
        return [x for x in layer(*tensors, **kwargs) if x is not None]

    assert_equals_torch(theirs, ours, tensors, kwargs, results)


def test_a_row_of_lowest_numbers_is_the_mean_of_its_values(device):
    theirs, ours = (x.to(device) for x in pair(batch_first=True))
    ours.backend = "triton"
    mask = torch.zeros(L, S, device=device)
    mask[2] = torch.finfo(torch.float32).min
    tensors = [x.to(device) for x in inputs(theirs)]
    expected, actual = (x(*tensors, need_weights=False, attn_mask=mask)[0] for x in (theirs, ours))
    torch.testing.assert_close(actual, expected)


def test_weights_without_gradients_in_fp64(on_torch, monkeypatch):
    """The weights are as exact as with gradients: no step on the way to them is fp32."""
    _, ours = (x.double() for x in pair())
    monkeypatch.setattr(nn, "MultiheadAttention", fastattn.MultiheadAttention)
    tensors = [x.double() for x in inputs(ours)]
    _, trained = ours(*tensors)
    with torch.no_grad():
        _, weights = ours(*tensors)
    assert (weights - trained).abs().max() < 64 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("training", [False, True])
def test_empty_inputs_have_empty_weights(on_torch, training):
    _, ours = pair(batch_first=True)
    ours.train(training)
    for queries, keys in (([2, 0], [2, 0]), ([0, 3], [0, 3]), ([2, 3], [2, 0]), ([0], [0])):
        query, key = torch.randn(*queries, E), torch.randn(*keys, E)
        with torch.no_grad():
            o, weights = ours(query, query if queries == keys else key, key)
            assert o.shape == query.shape and weights.shape == (*queries, keys[-1])
            assert torch.equal(o, ours.out_proj.bias.expand_as(o))
            o, weights = ours(query, query, query)
        assert o.shape == query.shape and weights.shape == (*queries, queries[-1])


def test_weights_cost_one_pass_of_scores(on_torch):
    for kwargs in ({}, masks()["both"], masks()["mask-added"]):
        counted = []
        for layer in pair():
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                layer(*inputs(layer), **kwargs)
            counted.append(counter.get_total_flops())
        assert counted[0] == counted[1] > 0


def test_weights_of_a_spread_sequence_are_refused(on_torch):
    _, ours = pair()
    for kwargs in ({}, masks()["padding"]):
        with spread.attending(lambda *_, **__: None), pytest.raises(TypeError, match="one rank"):
            ours(*inputs(ours), **kwargs)


def test_hooks_of_the_output_projection_do_not_run(on_torch):
    theirs, ours = pair()
    for layer in (theirs, ours):
        layer.out_proj.register_forward_hook(lambda *_: torch.zeros(1))
        layer.out_proj.register_forward_pre_hook(lambda *_: (torch.zeros(1),))
    assert_equals_torch(theirs, ours, inputs(theirs), {"need_weights": False})


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_all_padded_rows_have_zero_attention(on_torch, need_weights, training):
    _, ours = pair(batch_first=True)
    ours.train(training)
    nn.init.ones_(ours.out_proj.bias)
    query, key, value = inputs(ours)
    padding = torch.tensor([[False], [True]]).expand(N, S)
    key[1] = value[1] = torch.nan
    query.requires_grad_()
    o, weights = ours(query, key, value, key_padding_mask=padding, need_weights=need_weights)
    assert torch.equal(o[1], torch.ones(L, E))
    assert weights is None or not weights[1].any()
    (grad,) = torch.autograd.grad(o.sum(), query)
    assert not grad[1].any() and grad[0].isfinite().all()


def test_weights_show_what_dropout_dropped(on_torch):
    _, ours = pair(dropout=0.5, batch_first=True)
    o, weights = ours(*inputs(ours), average_attn_weights=False)
    assert (weights == 0).float().mean() > 0.2
    v = torch.nn.functional.linear(inputs(ours)[2], ours.in_proj_weight[2 * E :])
    again = ours.out_proj(
        (weights @ v.unflatten(-1, (H, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
    )
    torch.testing.assert_close(o, again)
    ours.eval()
    _, weights = ours(*inputs(ours))
    torch.testing.assert_close(weights.sum(-1), torch.ones(N, L))


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_of_every_weight_and_of_some(on_torch, need_weights):
    theirs, ours = pair(dropout=1.0)
    expected, weights = theirs(*inputs(theirs), need_weights=need_weights)
    actual = ours(*inputs(ours), need_weights=need_weights)
    assert torch.equal(actual[0], expected)
    assert actual[1] is weights is None or torch.equal(actual[1], weights)
    ours.dropout = 0.5
    for training in (True, False):
        ours.train(training)
        once, again = (ours(*inputs(ours), need_weights=need_weights)[0] for _ in range(2))
        assert torch.equal(once, again) != training


REFUSED = {
    "dims": lambda q, k, v: ((q[None], k, v), {}),
    "width": lambda q, k, v: ((q[..., :8], k, v), {}),
    "keys-and-values": lambda q, k, v: ((q, k, v[:-1]), {}),
    "mask-shape": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(L, S + 1)}),
    "mask-kind": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(L, S, dtype=torch.int32)}),
    "padding-shape": lambda q, k, v: ((q, k, v), {"key_padding_mask": torch.zeros(N, S - 1)}),
    "causal-without-mask": lambda q, k, v: ((q, k, v), {"is_causal": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_torchs(name):
    errors = []
    for layer in pair():
        args, kwargs = REFUSED[name](*inputs(layer))
        with pytest.raises((AssertionError, RuntimeError)) as raised:
            layer(*args, **kwargs)
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors(on_torch):
    _, ours = pair(batch_first=True)
    ours.eval()
    parts = [torch.randn(3, E), torch.randn(5, E)]
    x = torch.nested.nested_tensor(parts)
    with torch.no_grad():
        o, weights = ours(x, x, x, need_weights=False)
        assert weights is None
        for got, part in zip(o.unbind(), parts, strict=True):
            torch.testing.assert_close(got, ours(part, part, part, need_weights=False)[0])
    ours.train()
    with pytest.raises(AssertionError, match="does not support NestedTensor"):
        ours(x, x, x)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("training", "padded", "causal"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, False)],
)
def test_inside_torchs_encoder(on_torch, monkeypatch, training, padded, causal):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).train(training)
    ours, counted, forward = copy.deepcopy(theirs), [], fastattn.MultiheadAttention.forward
    for layer in ours.layers:
        mine = fastattn.MultiheadAttention(E, H, batch_first=True)
        mine.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = mine.train(training)
    ours = copy.deepcopy(ours)
    monkeypatch.setattr(
        fastattn.MultiheadAttention,
        "forward",
        lambda self, *args, **kwargs: counted.append(1) or forward(self, *args, **kwargs),
    )
    padding = torch.arange(L) >= torch.tensor([[4], [2]])
    kwargs: dict[str, Any] = {"src_key_padding_mask": padding} if padded else {}
    if causal:
        kwargs["mask"] = torch.ones(L, L, dtype=torch.bool).triu(1)
    # Rows of padding are nobody's, and torch's fast path leaves other numbers there.
    kept = ~padding if padded else torch.ones(N, L, dtype=torch.bool)

    def results(layer, tensors, kwargs):
        with torch.set_grad_enabled(training):
            return [layer(*tensors, **kwargs)[kept]]

    assert_equals_torch(theirs, ours, [torch.randn(N, L, E)], kwargs, results)
    assert len(counted) == 2


def test_copies_and_pickles(on_torch):
    _, ours = pair(batch_first=True)
    expected, _ = ours(*inputs(ours))
    swapped = nn.MultiheadAttention(E, H, batch_first=True)
    swapped.load_state_dict(ours.state_dict())
    fastattn.swap(swapped)
    for twin in (*map(copy.deepcopy, (ours, swapped)), pickle.loads(pickle.dumps(swapped))):
        assert type(twin) is fastattn.MultiheadAttention
        assert torch.equal(twin(*inputs(twin))[0], expected)


@pytest.mark.parametrize("need_weights", gate_cases([True], [False]))
def test_compiled_once_for_all_lengths(on_torch, need_weights):
    torch._dynamo.reset()
    _, ours = pair(batch_first=True)
    counter = CompileCounter()

    def attend(x: Tensor, padding: Tensor) -> Tensor:
        return ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]

    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for length in (4, 5, 9, 17):
        x, padding = (
            torch.randn(2, length, E),
            torch.arange(length) >= torch.tensor([[length], [2]]),
        )
        torch.testing.assert_close(compiled(x, padding), attend(x, padding))
    assert counter.frame_count == 1


@pytest.mark.parametrize("need_weights", [False, True])
def test_autocast(on_torch, need_weights):
    theirs, ours = pair(batch_first=True)

    def results(layer: nn.MultiheadAttention, tensors: list[Tensor], kwargs: Any) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=tensors[0].dtype != torch.float64):
            return [x for x in layer(*tensors, **kwargs) if x is not None]

    kwargs = {"need_weights": need_weights}
    assert_equals_torch(theirs, ours, inputs(theirs), kwargs, results)
    dtypes = ([x.dtype for x in results(y, inputs(y), kwargs)] for y in (theirs, ours))
    assert len({*map(tuple, dtypes)}) == 1


def test_swapped_layers_are_the_same_objects(on_torch):
    model = nn.ModuleDict({"a": nn.MultiheadAttention(E, H, dropout=0.3), "b": nn.Linear(E, E)})
    model["c"] = model["a"]
    layer = model["a"].eval().to(torch.bfloat16)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    parameters = dict(layer.named_parameters())
    done = fastattn.swap(model)
    assert done.unseen == {"a": "fastattn.MultiheadAttention"} and not done.replaced
    assert model["a"] is model["c"] is layer
    assert isinstance(layer, fastattn.MultiheadAttention)
    assert all(x is parameters[name] for name, x in layer.named_parameters())
    assert not layer.training
    x = torch.randn(L, 2, E, dtype=torch.bfloat16)
    padding = torch.ones(2, L, dtype=torch.bool)
    o, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    assert torch.equal(o, layer.out_proj.bias.expand_as(o))
    assert seen == [1]
    done.undo()
    assert type(layer) is nn.MultiheadAttention
    assert len(layer._forward_pre_hooks) == len(layer.out_proj._forward_pre_hooks) == 0
    done.undo()
    assert type(layer) is nn.MultiheadAttention


@pytest.mark.parametrize("adapters", [{}, {nn.MultiheadAttention: lambda *_, **__: NotImplemented}])
def test_a_call_survives_the_end_of_its_swap(on_torch, adapters):
    layer = pair()[0].eval()
    x = inputs(layer)
    expected, done = layer(*x), fastattn.swap(layer, adapters=adapters)
    layer.register_forward_pre_hook(lambda *_: done.undo())  # behind forward's look-up
    torch.testing.assert_close(layer(*x), expected)
    assert running.innermost() is None


def test_compiled_code_follows_swap_and_undo(on_torch):
    torch._dynamo.reset()
    layer = nn.MultiheadAttention(E, H, batch_first=True).train()
    x = torch.randn(2, L, E)
    padding = torch.ones(2, L, dtype=torch.bool)

    @torch.compile(backend="eager")
    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, key_padding_mask=padding)[0]

    assert attend(x).isnan().any()
    done = fastattn.swap(layer)
    assert attend(x).isfinite().all()
    done.undo()
    assert attend(x).isnan().any()
