"""`fastattn.swap` changes no model's meaning: blocks that look like plain attention and are not."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn.compat.swap import block_trial, blocks
from fastattn.testing.modules import Block

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

C, H, T = 32, 4, 7


def distances(scores: Tensor) -> Tensor:
    steps = torch.arange(scores.shape[-1])
    return steps[:, None] - steps


class Windowed(Block):
    """A window of `window` tokens, or of those that `window` says otherwise."""

    def width(self) -> int:
        return self.window

    def scores(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(distances(scores) >= self.width(), float("-inf"))


class WindowedByConfig(Windowed):
    def width(self) -> int:
        return self.config.layer.window


class WindowedByBuffer(Block):
    def scores(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        return scores.masked_fill(~self.mask[:length, :length], float("-inf"))


class WindowedByNumber(Windowed):
    def width(self) -> int:
        return 64


WINDOW = 160


def in_window(steps: Tensor, window: int = 140) -> Tensor:
    return steps < window


class WindowedByDefault(Windowed):
    def scores(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~in_window(distances(scores)), float("-inf"))


class WindowedByGlobal(Windowed):
    def width(self) -> int:
        return WINDOW


class HugelyWindowed(Windowed):
    def width(self) -> int:
        return 4096


class LocalBlocks(Block):
    def scores(self, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1]) // self.block_size
        return scores.masked_fill(places[:, None] != places, float("-inf"))


class Softcapped(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return 30.0 * torch.tanh(scores / 30.0)


class Clipped(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return scores.clamp(-50.0, 50.0)


class Scaled(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return scores * self.temperature


class LongScaled(Block):
    """Qwen's logarithmic scaling, beyond the length of training."""

    def scores(self, scores: Tensor) -> Tensor:
        length = scores.shape[-1]
        return scores * max(1.0, math.log(length) / math.log(self.seq_length))


class Alibi(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return scores - 1e-2 * distances(scores).abs()


class Sink(Block):
    def weights(self, weights: Tensor) -> Tensor:
        return weights * 0.99


class Gated(Block):
    def output(self, out: Tensor) -> Tensor:
        return out * self.gate


class HiddenDropout(Block):
    def weights(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.p, self.training)


class ListedDropout(Block):
    def weights(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.settings["dropout"], self.training)


class ValueDropout(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return self.drop(scores)


class TwiceDropped(Block):
    def weights(self, weights: Tensor) -> Tensor:
        return self.late(self.early(weights))


class AlwaysDropped(Block):
    def weights(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.dropout)


class Noisy(Block):
    def scores(self, scores: Tensor) -> Tensor:
        return scores + torch.randn_like(scores) if self.training else scores


class Trained(Block):
    """Another scale while it trains."""

    def scores(self, scores: Tensor) -> Tensor:
        return 2 * scores if self.training else scores


class Detached(Block):
    def weights(self, weights: Tensor) -> Tensor:
        return weights.detach()


class Keeping(Block):
    def weights(self, weights: Tensor) -> Tensor:
        self.last_weights = weights
        return weights


class Writing(Block):
    def weights(self, weights: Tensor) -> Tensor:
        self.seen.add_(1)
        return weights


class HalfCausal(Block):
    """Another mask where a kernel for half precision would be called."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["causal"] = x.dtype == torch.bfloat16
        return super().forward(x)


class OtherOrder(Block):
    """Its queries are where others have their values."""

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.qkv.weight.unflatten(0, (3, C)).flip(0), self.qkv.bias.view(3, C).flip(0)
        q, k, v = (
            F.linear(x, *y).unflatten(-1, (H, -1)).transpose(1, 2) for y in zip(w, b, strict=True)
        )
        o = F.scaled_dot_product_attention(q, k, v)
        return self.proj(o.transpose(1, 2).flatten(2))


def windowed_buffer(window: int, size: int) -> Block:
    block = WindowedByBuffer()
    steps = torch.arange(size)
    block.register_buffer("mask", (steps[:, None] - steps).abs() < window)
    return block


def frozen_config(window: int) -> Any:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Layer:
        window: int
        vocab_size: int = 50_000

    return SimpleNamespace(layer=Layer(window), vocab_size=50_000)


OTHERS = {
    "window": (Windowed(window=6), "it computes something else"),
    "wide-window": (Windowed(causal=True, window=200), "of 202 tokens it computes something else"),
    "window-config": (WindowedByConfig(config=frozen_config(20)), "config.layer.window = 20"),
    "window-buffer": (windowed_buffer(20, 40), "of 40 tokens it computes something else"),
    "huge-buffer": (windowed_buffer(550, 600), "mask = 600: a window of so many tokens"),
    "window-default": (WindowedByDefault(), "of 142 tokens it computes something else"),
    "window-global": (WindowedByGlobal(), "of 162 tokens it computes something else"),
    "window-huge-number": (HugelyWindowed(), "its forward reads 4096 in its code: a window of"),
    "window-numpy": (Windowed(window=numpy.int64(200)), "of 202 tokens it computes something else"),
    "window-tensor": (Windowed(window=torch.tensor(200)), "of 202 tokens it computes something"),
    "window-number": (WindowedByNumber(causal=True), "of 132 tokens it computes something else"),
    "huge-window": (Windowed(window=100_000), "window = 100000: a window of so many tokens"),
    "window-of-width": (Windowed(window=C), "of 132 tokens it computes something else"),
    "local": (LocalBlocks(block_size=8), "something else"),
    "softcap": (Softcapped(), "it computes something else"),
    "clip": (Clipped(), "it computes something else"),
    "temperature": (Scaled(temperature=1.01), "it computes something else"),
    "log-scaled": (LongScaled(causal=True, seq_length=300), "of 302 tokens it computes"),
    "alibi": (Alibi(), "it computes something else"),
    "sink": (Sink(), "it computes something else"),
    "gate": (Gated(gate=0.0), "it computes something else"),
    "dropout-name": (HiddenDropout(p=0.1), "it drops with a probability of 0.1, found under no"),
    "dropout-dict": (ListedDropout(settings={"dropout": 0.1}), "a probability of 0.1, found under"),
    "dropout-scores": (ValueDropout(drop=nn.Dropout(0.1)), "it drops by drop something else"),
    "dropout-twice": (
        TwiceDropped(early=nn.Dropout(0.1), late=nn.Dropout(0.1)),
        "drops weights more than once",
    ),
    "dropout-always": (AlwaysDropped(dropout=0.1), "it drops in eval mode too"),
    "noise": (Noisy(), "it draws random numbers for something else than dropout"),
    "training": (Trained(), "in training mode it computes something else than in eval mode"),
    "detached": (Detached(), "its gradients are not those"),
    "keeps": (Keeping(), "its forward sets last_weights"),
    "writes": (Writing(seen=torch.zeros(1)), "its forward sets seen"),
    "half": (HalfCausal(), "it computes something else"),
    "order": (OtherOrder(), "it computes something else"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_plain_attention_is_left(name, monkeypatch):
    monkeypatch.setattr(block_trial, "_MOST_SCORES", H * 512**2)
    block, why = OTHERS[name]
    # As they are initialised, no score is near a softcap.
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(0))
    done = fastattn.swap(block)
    assert done.replaced == {}
    assert why in done.left[""]


@pytest.mark.parametrize("zeroed", ["proj", "qkv"])
@pytest.mark.parametrize("causal", [True, False])
def test_zero_weights_do_not_hide_the_mask(causal, zeroed):
    block = Block(causal)
    for parameter in getattr(block, zeroed).parameters():
        nn.init.zeros_(parameter)
    block.requires_grad_(False)
    done = fastattn.swap(block)
    kind = "causal" if causal else "bidirectional"
    assert done.replaced == {"": f"{kind} attention, 4 query and 4 key/value heads"}
    assert all(not p.requires_grad for p in block.parameters())


class Written(Block):
    """Numbers that say nothing of a window: sizes, what is not read, a length that is checked."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] <= self.config.block_size
        return super().forward(x.view(-1, x.shape[1], self.width))


def test_numbers_that_are_no_windows(monkeypatch):
    monkeypatch.setattr(block_trial, "_MOST_SCORES", H * 20**2)
    config = SimpleNamespace(block_size=16, vocab_size=50_000)
    block = Written(causal=True, width=C, config=config, depth=2**40)
    assert list(fastattn.swap(block).replaced) == [""]
    config.block_size = 100
    assert "config.block_size = 100" in fastattn.swap(Written(width=C, config=config)).left[""]
    assert config == SimpleNamespace(block_size=100, vocab_size=50_000)


class SharedDropout(Block):
    def weights(self, weights: Tensor) -> Tensor:
        p = self.config.attn_pdrop if self.training else 0.0
        return F.dropout(weights, p) if p else weights

    def output(self, out: Tensor) -> Tensor:
        return F.dropout(self.noise(out), self.resid_drop, self.training)


def test_dropouts_by_where_they_are_applied():
    settings = SimpleNamespace(attn_pdrop=0.0, embd_pdrop=0.5)
    block = SharedDropout(config=settings, noise=nn.Dropout(0.0), resid_drop=0.0)
    done = fastattn.swap(block)
    assert list(done.replaced) == [""]
    plan = block.forward.plan
    assert (plan.weight_dropout, plan.output_dropouts) == (
        "config.attn_pdrop",
        ("noise", "resid_drop"),
    )
    x = torch.randn(2, T, C)
    exact = copy.deepcopy(block).eval()(x)
    for holder, name in ((settings, "attn_pdrop"), (block.noise, "p"), (block, "resid_drop")):
        assert torch.equal(block(x), exact)
        setattr(holder, name, 0.5)
        torch.manual_seed(0)
        assert not torch.equal(block(x), exact)
        assert torch.equal(block.eval()(x), exact)
        block.train()
        setattr(holder, name, 0.0)


def test_a_trial_moves_no_generator_and_no_weight():
    block = Noisy(bias=torch.ones(3))
    before = {name: x.clone() for name, x in block.state_dict().items()}
    state, attributes = torch.get_rng_state(), dict(vars(block))
    with fastattn.patch_sdpa():
        fastattn.swap(block)
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(vars(block)) == attributes
    assert type(block) is Noisy
    assert all(torch.equal(x, before[name]) for name, x in block.state_dict().items())


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "device"],
)
def test_where_swap_is_called_changes_nothing(around):
    block = Block(causal=True)
    with around():
        done = fastattn.swap(block)
    assert list(done.replaced) == [""]


def test_blocks_made_for_inference():
    with torch.inference_mode():
        block = Block(causal=True)
        block.register_buffer("mask", torch.ones(3))
    assert list(fastattn.swap(block).replaced) == [""]


def test_one_trial_for_blocks_that_are_alike(monkeypatch):
    trials = []

    def counting(module, plans):
        trials.append(module)
        return block_trial.tried(module, plans)

    monkeypatch.setattr(blocks, "tried", counting)
    mask = torch.ones(40, 40, dtype=torch.bool)
    narrow = mask.clone()
    narrow[39, 0] = False
    made = [
        Block(causal=True),
        Block(causal=True),
        Block(causal=False),
        Block(causal=1),
        Block(causal=True).double(),
        Gated(gate=1.0),
        Gated(gate=0.5),
        Gated(gate=1.0),
        Block(drop=nn.Dropout(0.1)),
        Block(drop=nn.Dropout(0.2)),
        *(WindowedByBuffer() for _ in range(3)),
    ]
    for block, buffer in zip(made[-3:], (mask, narrow, mask.clone()), strict=True):
        block.register_buffer("mask", buffer)
    done = fastattn.swap(nn.ModuleList(made))
    assert [made.index(block) for block in trials] == [0, 2, 3, 4, 5, 6, 8, 9, 10, 11]
    assert set(done.left) == {"6", "11"}
    assert done.replaced["1"] == done.replaced["0"]
    assert made[1].forward.module is made[1]
