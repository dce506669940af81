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
from fastattn.testing import assert_within_budget

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
    """As vision transformers have it: all tokens see all, and a mask may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.q_norm = nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(C, C)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, length, _ = x.shape
        qkv = self.qkv(x).reshape(B, length, 3, H, C // H).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask)
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
    from fastattn.compat import blocks

    def counting(*args, **kwargs):
        calls.append(1)
        return fastattn.attention(*args, **kwargs)

    monkeypatch.setattr(blocks, "attention", counting)
    return calls


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(counted, name):
    block, rest, described = BLOCKS[name]
    model = Model(block)
    x = torch.randn(2, T, C, generator=torch.Generator().manual_seed(0))
    exact = copy.deepcopy(model).double()
    ref = exact(x.double(), *(y.to(torch.complex128 if y.is_complex() else y.dtype) for y in rest))
    naive = model(x, *rest)
    done = fastattn.swap(model)
    assert list(done.replaced) == ["layers.0.attn", "layers.1.attn"]
    assert all(described in what for what in done.replaced.values())
    assert done.left == {}
    counted.clear()
    assert_within_budget("o", model(x, *rest), ref, naive)
    assert len(counted) == 2
    done.undo()
    assert torch.equal(model(x, *rest), naive)
    assert len(counted) == 2


def test_multihead_layers_are_the_same_objects():
    model = nn.ModuleDict({"a": nn.MultiheadAttention(C, H, dropout=0.3), "b": nn.Linear(C, C)})
    model["c"] = model["a"]
    layer = model["a"].eval().to(torch.bfloat16)
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    parameters = dict(layer.named_parameters())
    done = fastattn.swap(model)
    assert done.replaced == {"a": "fastattn.MultiheadAttention"}
    assert model["a"] is model["c"] is layer
    assert isinstance(layer, fastattn.MultiheadAttention)
    assert all(x is parameters[name] for name, x in layer.named_parameters())
    assert not layer.training
    x = torch.randn(T, 2, C, dtype=torch.bfloat16)
    padding = torch.ones(2, T, dtype=torch.bool)
    o, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    assert torch.equal(o, layer.out_proj.bias.expand_as(o))
    assert seen == [1]
    done.undo()
    assert type(layer) is nn.MultiheadAttention
    assert len(layer._forward_pre_hooks) == 0
    done.undo()
    assert type(layer) is nn.MultiheadAttention


def test_a_model_that_is_itself_attention():
    layer = nn.MultiheadAttention(C, H)
    assert list(fastattn.swap(layer).replaced) == [""]
    again = fastattn.swap(layer)
    assert again.replaced == {}
    assert again.left == {"": "it is fastattn's already"}
    assert str(again) == "left the model: it is fastattn's already"


def test_swapped_encoder_equals_torchs():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, H, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, T, C)
    ref, naive = copy.deepcopy(model).double()(x.double()), model(x)
    done = fastattn.swap(model)
    assert list(done.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():
        assert_within_budget("o", model(x), ref, naive)


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
    assert (type(block), vars(block).get("forward")) == before
    assert why in str(done)


def test_a_call_with_more_is_the_blocks_own(counted):
    block = VisionAttention()
    x, mask = torch.randn(2, T, C), torch.ones(T, T, dtype=torch.bool).tril()
    expected = block(x, mask)
    fastattn.swap(block)
    counted.clear()
    assert torch.equal(block(x, mask), expected)
    assert torch.equal(block(x, attn_mask=mask), expected)
    assert counted == []
    block(x=x, attn_mask=None)
    assert counted == [1]


def test_tables_of_another_shape_are_the_blocks_own(counted):
    block = Halves()
    fastattn.swap(block)
    counted.clear()
    block(torch.randn(2, T, C), COS.expand(2, T, -1), SIN.expand(2, T, -1))
    assert counted == []


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


def test_compiled_code_follows_swap_and_undo():
    torch._dynamo.reset()
    layer = nn.MultiheadAttention(C, H, batch_first=True).train()
    x = torch.randn(2, T, C)
    padding = torch.ones(2, T, dtype=torch.bool)

    @torch.compile(backend="eager")
    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, key_padding_mask=padding)[0]

    assert attend(x).isnan().any()
    done = fastattn.swap(layer)
    assert attend(x).isfinite().all()
    done.undo()
    assert attend(x).isnan().any()


class FakeTransformersModel(nn.Module):
    """What `swap` needs of a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = CausalSelfAttention()
        self.config = type("Config", (), {"_attn_implementation": "eager"})()

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name


def test_models_of_transformers_by_name(monkeypatch):
    import sys
    import types

    registered = []
    door = types.ModuleType("fastattn.compat.transformers")
    door.register = lambda: registered.append(1)
    monkeypatch.setitem(sys.modules, door.__name__, door)
    model = nn.Sequential(FakeTransformersModel())
    done = fastattn.swap(model)
    assert done.replaced == {"0": 'attn_implementation="fastattn"'}
    assert registered == [1]
    assert model[0].config._attn_implementation == "fastattn"
    done.undo()
    assert model[0].config._attn_implementation == "eager"


def test_without_transformers_its_models_are_left(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fastattn.compat.transformers", None)
    done = fastattn.swap(FakeTransformersModel())
    assert done.replaced == {}
    assert "cannot be registered with transformers" in done.left[""]


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        fastattn.swap({})


def test_swapped_multihead_pickles():
    layer = nn.MultiheadAttention(C, H)
    fastattn.swap(layer)
    assert type(pickle.loads(pickle.dumps(layer))) is fastattn.MultiheadAttention
