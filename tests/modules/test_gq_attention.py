"""GQAttention both ways, with strides and scoring functions, and CrossGQAttention."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastattn.modules.cross_attention
from fastattn import CausalGQAttention, CrossGQAttention, GQAttention, swap
from fastattn.modules.cross_attention import ProjectedMemory
from fastattn.modules.weights import cross_attention_weights, self_attention_weights
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread")

C, M, H_q, H_k, D = 32, 24, 4, 2, 8
LENGTHS = torch.tensor([9, 5])


def randomised(layer):
    """The layer with parameters none of which is at 0 or 1."""
    for name, parameter in layer.named_parameters():
        if "proj" not in name:
            torch.nn.init.normal_(parameter)
    return layer


def make_self(**options) -> GQAttention:
    return randomised(GQAttention(C, H_q, H_k, **{"backend": "torch", **options}))


def make_cross(**options) -> CrossGQAttention:
    return randomised(
        CrossGQAttention(C, H_q, H_k, memory_dim=M, **{"backend": "torch", **options})
    )


def weighed(layer, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, seen: Tensor) -> Tensor:
    """softmax(score(q, k) + bias) v over the keys that are seen, [B, H_q, T, D] to [B, T, C]."""
    k, v = (heads.repeat_interleave(H_q // H_k, dim=1) for heads in (k, v))
    if layer.scoring == "additive":
        sums = q[:, :, :, None] + k[:, :, None]
        scores = torch.einsum("hd,bhijd->bhij", layer.score_vector, sums.tanh())
    elif layer.scoring == "multiplicative":
        scores = torch.einsum("bhjd,hde,bhie->bhij", k, layer.score_weight, q)
    else:
        scores = torch.einsum("bhid,bhjd->bhij", q, k)
        if layer.scoring == "scaled_dot":
            scores = scores * (D**-0.5 if layer.scale is None else layer.scale)
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    scores = (scores + bias).masked_fill(~seen, torch.finfo(q.dtype).min)
    if layer.sinks is not None:
        sinks = layer.sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].masked_fill(~seen, 0)
    out = torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2)
    return F.linear(out, layer.out_proj.weight, layer.out_proj.bias)


def heads_of(x: Tensor, linear, *size: int) -> Tensor:
    """Heads [B, H, T, D] of a projection, size = (H, D)."""
    return linear(x).unflatten(-1, size).transpose(1, 2)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def naive_self(layer: GQAttention, x: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """Compute a GQAttention without rotation."""
    T = x.shape[1]
    q, k = heads_of(x, layer.q_proj, H_q, D), heads_of(x, layer.k_proj, H_k, D)
    v = heads_of(x, layer.v_proj, H_k, layer.v_head_dim)
    if layer.qk_norm:
        q, k = normalised(q, layer.q_norm.weight), normalised(k, layer.k_norm.weight)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    near = torch.ones(T, T, dtype=torch.bool)
    if layer.window is not None:
        left, right = layer.window if isinstance(layer.window, tuple) else (layer.window - 1,) * 2
        near = (i - j <= left) & (j - i <= right)
    if layer.stride is not None:
        on_stride = (i - j) % layer.stride == 0
        near = on_stride if layer.window is None else near | on_stride
    if layer.keep_first:
        near = near | (j < layer.keep_first)
    seen = near & (j <= i) if layer.causal else near
    if key_lengths is not None:
        seen = seen & (j < key_lengths[:, None, None, None])
    bias = 0.0
    if layer.alibi_slopes is not None:
        bias = -layer.alibi_slopes[:, None, None].to(x.dtype) * (i - j).abs()
    if layer.relative_bias is not None:
        # All distances are within the buckets that count one by one: 4 of 16 a side, if both ways.
        bucket = (i - j).clamp(min=0) if layer.causal else (i - j).abs() + 8 * (j > i)
        bias = layer.relative_bias[bucket].permute(2, 0, 1)
    return weighed(layer, q, k, v, bias, seen)


def naive_cross(layer: CrossGQAttention, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
    """Compute a CrossGQAttention; seen: bool [B, S]."""
    q, k = heads_of(x, layer.q_proj, H_q, D), heads_of(memory, layer.k_proj, H_k, D)
    v = heads_of(memory, layer.v_proj, H_k, layer.v_head_dim)
    if layer.qk_norm:
        q, k = normalised(q, layer.q_norm.weight), normalised(k, layer.k_norm.weight)
    return weighed(layer, q, k, v, 0.0, seen[:, None, None])


def assert_equals_naive(layer, forward, naive, *inputs: Tensor) -> None:
    """forward(layer, *inputs) and all gradients are within the budget of naive's."""

    def run(function, layer, inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        y = function(layer, *inputs)
        upstream = torch.arange(y.numel()).view_as(y).to(y.dtype).cos()
        return [y.detach(), *torch.autograd.grad(y, [*inputs, *layer.parameters()], upstream)]

    got = run(forward, layer, inputs)
    exact = run(naive, copy.deepcopy(layer).double(), [x.double() for x in inputs])
    plain = worst_naive(exact, lambda: run(naive, layer, inputs))
    names = ["output", *map(str, range(len(inputs))), *dict(layer.named_parameters())]
    for name, *triple in zip(names, got, exact, plain, strict=True):
        assert_within_budget(name, *triple)


SELF = {
    "both-ways": {"causal": False},
    "both-ways-bias-norm": {"causal": False, "qkv_bias": True, "out_bias": True, "qk_norm": True},
    "both-ways-window": {"causal": False, "window": 3},
    "both-ways-pair": {"causal": False, "window": (1, 4), "keep_first": 2},
    "both-ways-stride-alibi": {"causal": False, "stride": 3, "alibi": True},
    "both-ways-cap-sinks": {"causal": False, "softcap": 1.5, "sinks": True, "scale": 0.7},
    "stride": {"stride": 3},
    "stride-window-first": {"stride": 4, "window": 2, "keep_first": 1},
    "dot": {"scoring": "dot"},
    "multiplicative": {"scoring": "multiplicative", "causal": False, "alibi": True},
    "additive": {"scoring": "additive"},
    "narrow-values": {"v_head_dim": 5, "qkv_bias": True},
    "wide-values-additive": {"v_head_dim": 12, "scoring": "additive"},
    "additive-window": {"scoring": "additive", "causal": False, "window": 3, "qk_norm": True},
}


@pytest.mark.parametrize("options", SELF.values(), ids=SELF)
def test_self_attention_and_gradients_equal_the_formula(options):
    layer = make_self(**options)

    def forward(layer, x):
        return layer(x, key_lengths=LENGTHS)

    def naive(layer, x):
        return naive_self(layer, x, LENGTHS)

    assert_equals_naive(layer, forward, naive, torch.randn(2, 9, C))


def test_buckets_both_ways_equal_the_formula():
    layer = make_self(causal=False, relative_bias=16)
    assert_equals_naive(layer, lambda layer, x: layer(x), naive_self, torch.randn(2, 4, C))


@pytest.mark.parametrize("name", ["both-ways-window", "stride-window-first", "multiplicative"])
def test_kernels_equal_the_formula(name, device):
    layer = make_self(backend="triton", **SELF[name]).to(device)
    x = torch.randn(1, 7, C)
    with torch.no_grad():
        got = layer(x.to(device)).cpu()
        layer = layer.cpu()
        exact = naive_self(copy.deepcopy(layer).double(), x.double())
        plain = worst_naive(exact, lambda: naive_self(layer, x))
        assert_within_budget("output", got, exact, plain)


@pytest.mark.parametrize(
    "name",
    ["stride", "stride-window-first", "dot", "multiplicative", "additive", "narrow-values"],
)
@torch.no_grad()
def test_cached_steps_equal_the_formula(name):
    layer = make_self(**{**SELF[name], "causal": True})
    x = torch.randn(2, 9, C)
    cache = layer.new_cache(2, 9)
    steps = [layer(part, cache=cache) for part in x.split([4, 1, 1, 3], dim=1)]
    exact = naive_self(copy.deepcopy(layer).double(), x.double())
    plain = worst_naive(exact, lambda: naive_self(layer, x))
    assert_within_budget("steps", torch.cat(steps, dim=1), exact, plain)


def test_causal_is_gq_attention_by_default():
    options = {"num_kv_heads": H_k, "window": 3, "qk_norm": True, "backend": "torch"}
    torch.manual_seed(1)
    causal = CausalGQAttention(C, H_q, **options)
    torch.manual_seed(1)
    layer = GQAttention(C, H_q, **options)
    assert list(causal.state_dict()) == list(layer.state_dict())
    x = torch.randn(2, 7, C)
    assert torch.equal(causal(x), layer(x))
    assert causal.extra_repr() == layer.extra_repr()
    with pytest.raises(TypeError, match="causal"):
        CausalGQAttention(C, H_q, causal=False)


CROSS = {
    "plain": {},
    "bias-norm": {"qkv_bias": True, "out_bias": True, "qk_norm": True},
    "cap-sinks": {"softcap": 1.5, "sinks": True, "scale": 0.7},
    "multiplicative": {"scoring": "multiplicative"},
    "additive": {"scoring": "additive"},
    "narrow-values": {"v_head_dim": 4, "qkv_bias": True},
    "wide-values-norm": {"v_head_dim": 12, "qk_norm": True},
}


@pytest.mark.parametrize("options", CROSS.values(), ids=CROSS)
def test_cross_attention_and_gradients_equal_the_formula(options):
    layer = make_cross(**options)
    seen = torch.arange(9) < LENGTHS[:, None]

    def forward(layer, x, memory):
        return layer(x, memory, memory_lengths=LENGTHS)

    def naive(layer, x, memory):
        return naive_cross(layer, x, memory, seen)

    assert_equals_naive(layer, forward, naive, torch.randn(2, 4, C), torch.randn(2, 9, M))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["", "lengths"])
@torch.no_grad()
def test_a_memory_projected_once_serves_every_step(lengths, backend, device, monkeypatch):
    decoded = []
    original = fastattn.modules.cross_attention.decode_attention

    def counted(q, *arguments, **options):
        decoded.append(q.shape[2])
        return original(q, *arguments, **options)

    monkeypatch.setattr(fastattn.modules.cross_attention, "decode_attention", counted)
    layer = make_cross(backend=backend, sinks=True).to(device)
    x, memory = torch.randn(2, 4, C), torch.randn(2, 9, M)
    on_device = None if lengths is None else lengths.to(device)
    projected = layer.project_memory(memory.to(device), on_device)
    steps = [layer(part.to(device), projected) for part in x.split([2, 1, 1], dim=1)]
    assert decoded == [1, 1]
    seen = torch.arange(9) < (torch.tensor([9, 9]) if lengths is None else lengths)[:, None]
    layer = layer.cpu()
    exact = naive_cross(copy.deepcopy(layer).double(), x.double(), memory.double(), seen)
    plain = worst_naive(exact, lambda: naive_cross(layer, x, memory, seen))
    assert_within_budget("steps", torch.cat(steps, dim=1).cpu(), exact, plain)


def test_a_memory_of_one_token_projected_for_training_serves_steps():
    layer, x, memory = make_cross(), torch.randn(1, 1, C), torch.randn(1, 1, M)
    projected = layer.project_memory(memory)
    expected = layer(x, projected)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, projected), expected)


@torch.no_grad()
def test_padding_of_a_memory_reaches_nothing():
    layer, x, memory = make_cross(), torch.randn(2, 1, C), torch.randn(2, 9, M)
    mask = torch.rand(2, 9) < 0.6
    poisoned = memory.masked_fill(~mask[..., None], torch.nan)
    exact = naive_cross(copy.deepcopy(layer).double(), x.double(), memory.double(), mask)
    got = layer(x, poisoned, memory_padding_mask=mask)
    plain = worst_naive(exact, lambda: naive_cross(layer, x, memory, mask))
    assert_within_budget("output", got, exact, plain)
    nothing = layer(x, memory, memory_lengths=torch.tensor([0, 9]))
    assert not nothing[0].any()
    assert nothing[1].any()


def test_rows_of_a_memory_are_repeated_side_by_side():
    memory = ProjectedMemory(torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4), torch.tensor([3, 1]))
    twice = memory.repeat_rows(2)
    assert twice.lengths.tolist() == [3, 3, 1, 1]
    assert torch.equal(twice.k[1], memory.k[0])
    assert torch.equal(twice.v[2], memory.v[1])
    assert twice.padding_mask is None


def test_dropout_of_weights_and_outputs_acts_in_training_alone():
    for options in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        layer, x, memory = make_cross(**options), torch.randn(2, 4, C), torch.randn(2, 9, M)
        assert not torch.equal(layer(x, memory), layer(x, memory))
        layer.eval()
        assert torch.equal(layer(x, memory), layer(x, memory))


def test_a_swap_leaves_them_alone():
    model = torch.nn.ModuleList([make_self(), make_cross()])
    assert set(swap(model).left.values()) == {"it is fastattn's already"}


def test_repr_names_what_was_chosen():
    layer = GQAttention(C, 4, causal=False, stride=2, window=(1, 2), scoring="dot")
    assert layer.extra_repr() == (
        "embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, causal=False, window=(1, 2), "
        "stride=2, scoring='dot'"
    )
    layer = CrossGQAttention(C, 4, memory_dim=M, sinks=True, backend="torch")
    assert layer.extra_repr() == (
        "embed_dim=32, num_heads=4, num_kv_heads=4, head_dim=8, memory_dim=24, sinks=True, "
        "backend='torch'"
    )


@pytest.mark.parametrize("scoring", ["scaled_dot", "multiplicative", "additive"])
@pytest.mark.parametrize(("B", "T", "S"), [(0, 3, 4), (2, 0, 4), (2, 1, 0), (2, 3, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_no_rows_tokens_or_memory(B, T, S, scoring, training):
    """A query that sees nothing gives the bias of the output."""
    options = {"scoring": scoring, "qk_norm": True, "out_bias": True}
    layer, cross = make_self(**options), make_cross(**options)
    x, memory = torch.randn(B, T, C), torch.randn(B, S, M)
    with torch.set_grad_enabled(training):
        y, z = layer(x), cross(x, memory)
    assert y.shape == z.shape == x.shape
    assert S or torch.equal(z, cross.out_proj.bias.expand(B, T, C))
    assert self_attention_weights(layer, x).shape == (B, H_q, T, T)
    assert cross_attention_weights(cross, x, memory).shape == (B, H_q, T, S)
    if training:
        (y.sum() + z.sum()).backward()
        assert all(p.grad.isfinite().all() for p in cross.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"stride": 0}, ValueError, "stride must be at least 1, got 0"),
        ({"stride": 1.5}, TypeError, "stride must be an int, got float"),
        ({"causal": 1}, TypeError, "causal must be a bool, got int"),
        ({"sinks": torch.zeros(4)}, TypeError, "sinks must be a bool, got a tensor"),
        ({"alibi": 0.5}, TypeError, "alibi must be a bool, got float"),
        ({"qkv_bias": "no"}, TypeError, "qkv_bias must be a bool, got str"),
        ({"head_dim": 8.0}, TypeError, "head_dim must be an int, got float"),
        ({"dropout": "0.1"}, TypeError, "dropout must be a float, got str"),
        ({"attention_dropout": "no"}, TypeError, "attention_dropout must be a float, got str"),
        ({"rotary": "half", "rotary_dim": 4.0}, TypeError, "rotary_dim must be an int, got float"),
        ({"rotary": "half", "rotary_base": "1e4"}, TypeError, "rotary_base must be a float, got"),
        ({"keep_first": 1}, ValueError, "keep_first=1 keeps keys that a window or stride hides"),
        ({"relative_bias": 5, "causal": False}, ValueError, "relative_bias must be even unless"),
        (
            {"relative_bias": 8, "relative_max_distance": 2, "causal": False},
            ValueError,
            "relative_max_distance must be at least 3, got 2",
        ),
        ({"scoring": "cosine"}, ValueError, "scoring must be one of scaled_dot, .* got 'cosine'"),
        ({"scoring": "dot", "scale": 0.5}, ValueError, "scale belongs to scoring='scaled_dot'"),
        ({"scoring": "additive", "softcap": 1.0}, ValueError, "softcap cannot go with scoring="),
        ({"scoring": "additive", "sinks": True}, ValueError, "sinks cannot go with scoring="),
        ({"scoring": "additive", "alibi": True}, ValueError, "alibi cannot go with scoring="),
        (
            {"scoring": "additive", "attention_dropout": 0.1},
            ValueError,
            "attention_dropout cannot go with scoring='additive', got 0.1",
        ),
        (
            {"scoring": "additive", "relative_bias": 4},
            ValueError,
            "relative_bias cannot go with scoring='additive', got 4",
        ),
    ],
)
def test_wrong_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        GQAttention(C, 4, **options)


def test_wrong_arguments_of_cross_attention_are_named():
    layer, x, memory = make_cross(), torch.randn(2, 4, C), torch.randn(2, 9, M)
    with pytest.raises(ValueError, match="memory_dim must be at least 1, got 0"):
        CrossGQAttention(C, 4, memory_dim=0)
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, 32\], got \(2, 4, 31\)"):
        layer(x[..., 1:], memory)
    with pytest.raises(ValueError, match=r"memory must have shape \[B, S, 24\], got \(2, 9, 23\)"):
        layer(x, memory[..., 1:])
    with pytest.raises(ValueError, match=r"memory must have shape \[B, S, 24\], got \(9, 24\)"):
        layer.project_memory(memory[0])
    with pytest.raises(ValueError, match="memory must have 1 rows to match x, got 2"):
        layer(x[:1], memory)
    with pytest.raises(ValueError, match="belong to a memory that is not projected yet"):
        layer(x, layer.project_memory(memory), memory_lengths=LENGTHS)
    with pytest.raises(TypeError, match="key_lengths must be an int32 or int64 tensor"):
        layer(x, memory, memory_lengths=LENGTHS.float())
    with torch.no_grad(), pytest.raises(TypeError, match=r"key_lengths must be an .* got list"):
        layer(x[:, :1], memory, memory_lengths=LENGTHS.tolist())
    with pytest.raises(TypeError, match="x must be a float tensor, got list"):
        layer(x.tolist(), memory)
    with pytest.raises(TypeError, match="memory must be a float tensor, got list"):
        layer(x, memory.tolist())
