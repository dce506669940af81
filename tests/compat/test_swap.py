"""`fastattn.swap`: which modules of a model it takes, what it leaves, and that it can be undone."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.rotary import apply_rotary, rotary_tables
from fastattn.testing import assert_within_budget, worst_naive

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

C, H, T = 32, 4, 7


class CausalSelfAttention(nn.Module):
    """As nanoGPT has it: one projection, a mask in a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(C, 3 * C)
        self.c_proj = nn.Linear(C, C)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = H
        self.dropout = dropout
        self.register_buffer("bias", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, length, _ = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, length, H, -1).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = self.attn_dropout(scores.softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, length, C)))


class VisionAttention(nn.Module):
    """As timm's vision transformers have it: all tokens see all, and a mask may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.q_norm = nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(C, C)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        B, length, _ = x.shape
        qkv = self.qkv(x).reshape(B, length, 3, H, C // H).permute(2, 0, 3, 1, 4)
        p = self.attn_drop.p if self.training else 0.0
        o = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask, p, is_causal)
        return self.proj(o.transpose(1, 2).reshape(B, length, C))


class LlamaAttention(nn.Module):
    """Three projections, grouped heads, rotary positions; `pair` and `form` as models differ."""

    def __init__(self, style: str = "half") -> None:
        super().__init__()
        self.num_heads, self.style = H, style
        self.q_proj = nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, C // 2, bias=False)
        self.v_proj = nn.Linear(C, C // 2, bias=False)
        self.o_proj = nn.Linear(C, C, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, C // H)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (apply_rotary(y, cos, sin, style=self.style) for y in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class Halves(LlamaAttention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, cos, sin)


class Doubled(LlamaAttention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1] // 2
        return self.attend(x, cos[:, :half], sin[:, half:])


class Complex(LlamaAttention):
    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        return self.attend(x, freqs_cis.real, freqs_cis.imag)


class Pairs(LlamaAttention):
    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        return self.attend(x, freqs[..., 0], freqs[..., 1])


COS, SIN = rotary_tables(T, C // H)

BLOCKS: dict[str, tuple[nn.Module, tuple[Tensor, ...], str]] = {
    "nanogpt": (CausalSelfAttention(), (), "causal attention, 4 query and 4 key/value heads"),
    "vision": (VisionAttention(), (), "bidirectional attention, 4 query and 4 key/value heads"),
    "halves": (Halves(), (COS, SIN), "4 query and 2 key/value heads, rotary positions (half)"),
    "interleaved": (Halves("interleaved"), (COS, SIN), "rotary positions (interleaved)"),
    "doubled": (Doubled(), (torch.cat((COS, COS), -1), torch.cat((SIN, SIN), -1)), "(half)"),
    "complex": (Complex("interleaved"), (torch.complex(COS, SIN),), "(interleaved)"),
    "pairs": (Pairs("interleaved"), (torch.stack((COS, SIN), -1),), "(interleaved)"),
}


class Model(nn.Module):
    """Two layers, each a block under the name `attn`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": copy.deepcopy(block)}) for _ in range(2))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer["attn"](x, *rest)
        return x


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often blocks called `attention`."""
    calls: list[int] = []
    from fastattn.compat import fused_block

    def counting(*args, **kwargs):
        calls.append(1)
        return fastattn.attention(*args, **kwargs)

    monkeypatch.setattr(fused_block, "attention", counting)
    return calls


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(counted, name):
    block, rest, described = BLOCKS[name]
    model = Model(block)
    x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))
    exact = copy.deepcopy(model).double()
    ref = exact(x.double(), *(y.to(torch.complex128 if y.is_complex() else y.dtype) for y in rest))
    naive = worst_naive(ref, lambda: model(x, *rest))
    before = model(x, *rest)
    done = fastattn.swap(model)
    assert list(done.replaced) == ["layers.0.attn", "layers.1.attn"]
    assert all(described in what for what in done.replaced.values())
    assert done.left == {}
    counted.clear()
    assert_within_budget("o", model(x, *rest), ref, naive)
    assert len(counted) == 2
    done.undo()
    assert torch.equal(model(x, *rest), before)
    assert len(counted) == 2


class Normalised(CausalSelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=-1))


class Raising(CausalSelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such device")


class Subclass(nn.MultiheadAttention):
    pass


class OwnAttention(nn.Module):
    pass


def left_blocks() -> dict[str, tuple[nn.Module, str]]:
    unknown_part, parameter, overridden, no_heads = (CausalSelfAttention() for _ in range(4))
    unknown_part.q_norm = nn.LayerNorm(C)
    parameter.sink = nn.Parameter(torch.zeros(H))
    overridden.forward = overridden.forward
    del no_heads.n_head
    odd_heads, no_output = CausalSelfAttention(), LlamaAttention()
    odd_heads.n_head = 5
    del no_output.o_proj
    sizes = CausalSelfAttention()
    sizes.c_attn = nn.Linear(C, 3 * C + 1)
    other = CausalSelfAttention()
    other.c_attn = nn.Conv1d(C, 3 * C, 1)
    many = Halves()
    many.__class__ = type("Many", (LlamaAttention,), {"forward": lambda self, x, a, b, c: x})
    return {
        "computes-more": (Normalised(), "it computes something else"),
        "raises": (Raising(), "trying it out failed: no such device"),
        "unknown-part": (unknown_part, "it has a part that is not known: q_norm"),
        "parameter": (parameter, "it has parameters of its own: sink"),
        "overridden": (overridden, "its forward was replaced on the object"),
        "meta": (CausalSelfAttention().to("meta"), "on the meta device"),
        "no-heads": (no_heads, "its number of heads is not found under n_head"),
        "heads": (odd_heads, "c_proj takes 32 channels, which 5 heads do not divide"),
        "no-output": (no_output, "it has q_proj, k_proj, v_proj, but no o_proj"),
        "sizes": (sizes, "the sizes of its projections fit no number of heads"),
        "no-linear": (other, "its projections are not all nn.Linear"),
        "arguments": (many, "forward takes x, a, b, c"),
        "subclass": (Subclass(C, H), "Subclass is a subclass of nn.MultiheadAttention"),
        "unknown": (OwnAttention(), "its parts have no names that are known"),
    }


@pytest.mark.parametrize("name", left_blocks())
def test_what_is_left_and_why(name):
    block, why = left_blocks()[name]
    before = type(block), vars(block).get("forward")
    done = fastattn.swap(nn.Sequential(block))
    assert done.replaced == {}
    assert list(done.left) == ["0"]
    assert why in done.left["0"]
    assert f"test_swap.{type(block).__qualname__}: " in done.left["0"]
    assert "fastattn.patch_sdpa" in done.left["0"]
    assert (type(block), vars(block).get("forward")) == before
    assert why in str(done)


def test_a_call_with_more_is_the_blocks_own(counted):
    block = VisionAttention()
    x, mask = torch.randn(2, T, C), torch.ones(T, T, dtype=torch.bool).tril()
    expected = block(x, mask), block(x, is_causal=True)
    done = fastattn.swap(block)
    counted.clear()
    assert torch.equal(block(x, mask), expected[0])
    assert torch.equal(block(x, attn_mask=mask), expected[0])
    assert torch.equal(block(x, None, True), expected[1])
    assert counted == []
    assert (done.calls[""].served, done.calls[""].passed) == (0, 3)
    assert str(done).endswith("(0 calls served, 3 not)")
    # As timm's blocks call it: what is given is what is the default anyway.
    block(x, attn_mask=None, is_causal=False)
    block(x=x)
    assert counted == [1, 1]
    assert (done.calls[""].served, done.calls[""].passed) == (2, 3)
    with pytest.raises(TypeError, match="multiple values"):
        block(x, x=x)
    with pytest.raises(TypeError, match="unexpected keyword"):
        block(x, window=3)


class Tempered(CausalSelfAttention):
    def forward(self, x: Tensor, temperature: float = 1.5, *, mode: str = "plain") -> Tensor:
        return super().forward(x * temperature / 1.5)


def test_arguments_equal_to_the_defaults_are_absent(counted):
    block = Tempered()
    done = fastattn.swap(block)
    counted.clear()
    x = torch.randn(2, T, C)
    block(x, float("1.5"), mode="".join(("pl", "ain")))
    block(x, temperature=torch.tensor(1.5))
    block(x, 3.0)
    assert counted == [1]
    assert (done.calls[""].served, done.calls[""].passed) == (1, 2)


def test_calls_are_counted_where_they_are_traced():
    torch._dynamo.reset()
    model = nn.Sequential(VisionAttention(), nn.TransformerEncoderLayer(C, H, batch_first=True))
    done = fastattn.swap(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(2, T, C))
    assert {name: calls.served for name, calls in done.calls.items()} == {"0": 1, "1.self_attn": 1}
    model.eval()(torch.randn(2, T, C))
    assert {name: calls.served for name, calls in done.calls.items()} == {"0": 2, "1.self_attn": 2}
    twin = pickle.loads(pickle.dumps(model))
    twin(torch.randn(2, T, C))
    assert done.calls["0"].served == 2


def test_tables_of_another_shape_are_the_blocks_own(counted):
    block = Halves()
    done = fastattn.swap(block)
    counted.clear()
    with pytest.raises(ValueError, match="cos and sin must have shape"):
        block(torch.randn(2, T, C), COS.expand(1, 1, T, -1), SIN.expand(1, 1, T, -1))
    assert counted == []
    assert (done.calls[""].served, done.calls[""].passed) == (0, 1)


def test_tables_of_a_batch(counted):
    block = Halves()
    x = torch.randn(2, T, C)
    rows = rotary_tables(torch.arange(T) + torch.tensor([[0], [9]]), C // H)
    ref = copy.deepcopy(block).double()(x.double(), *rows)
    naive = worst_naive(ref, lambda: block(x, *rows))
    fastattn.swap(block)
    counted.clear()
    assert_within_budget("o", block(x, *rows), ref, naive)
    assert counted == [1]


def test_dropout_in_training_alone():
    block = CausalSelfAttention(dropout=0.5)
    fastattn.swap(block)
    x = torch.randn(2, T, C)
    torch.manual_seed(0)
    assert not torch.equal(block(x), block(x))
    block.resid_dropout.p = 0.0
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


def test_trial_disturbs_nothing():
    block = CausalSelfAttention(dropout=0.5)
    seen = []
    block.c_attn.register_forward_hook(lambda *_: seen.append(1))
    block.register_forward_pre_hook(lambda *_: seen.append(1))
    before = {name: x.clone() for name, x in block.state_dict().items()}
    state = torch.get_rng_state()
    fastattn.swap(block)
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert block.training
    assert all(torch.equal(x, before[name]) for name, x in block.state_dict().items())
    block(torch.randn(1, T, C))
    assert seen == [1, 1]


def test_swapped_blocks_copy_pickle_and_compile():
    block = CausalSelfAttention()
    x = torch.randn(2, T, C)
    fastattn.swap(block)
    expected = block(x)
    twin = copy.deepcopy(block)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        twin.c_proj.weight.zero_()
    assert not torch.equal(twin(x), expected)
    assert torch.equal(block(x), expected)
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


def tiny_llama() -> nn.Module:
    import transformers

    from fastattn.testing.transformers_models import GQA, build

    return build(transformers.AutoModel, transformers.LlamaConfig(**GQA), "cpu")


def test_models_of_transformers_by_name():
    model = nn.Sequential(tiny_llama())
    done = fastattn.swap(model)
    assert done.replaced == {"0": 'attn_implementation="fastattn"'} and done.left == {}
    assert model[0].config._attn_implementation == "fastattn"
    done.undo()
    assert model[0].config._attn_implementation == "eager"


def test_without_transformers_its_models_are_left(monkeypatch):
    import sys

    model = tiny_llama()
    monkeypatch.setitem(sys.modules, "fastattn.compat.transformers.attend", None)
    done = fastattn.swap(model)
    assert done.replaced == {}
    assert "cannot be registered with transformers" in done.left[""]


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        fastattn.swap({})
