"""Layers and models whose heads and hidden units are shared out over ranks compute what one does.

Each world of processes is started once, and makes all of its calls.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fastattn import CausalGQAttention, CrossGQAttention, GQAttention
from fastattn.models.encoder import Encoder, EncoderConfig, MaskedLM, Tagger
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.layers import MLP
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.models.tensor_parallel import tp_plan
from fastattn.testing import assert_within_budget, worst_naive
from fastattn.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

V, C, H, B, T = 37, 32, 4, 2, 9
SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": H, "embed_dim": C}
LAYER: dict[str, Any] = {"embed_dim": C, "num_heads": H}
LLAMA: dict[str, Any] = {
    "num_kv_heads": 2, "positions": "rotary", "qk_norm": True, "sinks": True, "hidden_dim": 48,
    "activation": "swiglu", "norm": "rmsnorm", "tie_weights": False, "window": 5,
}  # fmt: skip


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(V, T, **SIZES, **options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(bias=True, label_smoothing=0.1),
    "gpt-llama": lambda: gpt(**LLAMA),
    "gpt-alibi-one-key-head": lambda: gpt(positions="alibi", num_kv_heads=1, softcap=2.0),
    "gpt-transformer-xl": lambda: gpt(positions="transformer_xl", relative_distance=3),
    "gpt-scalar": lambda: gpt(positions="scalar", relative_distance=3, relative_values=True),
    "gpt-content": lambda: gpt(positions="content", relative_distance=3, block="parallel"),
    "encoder": lambda: Encoder(EncoderConfig(V, T, **SIZES, embedding_norm=True, block="post")),
    "tagger": lambda: Tagger(EncoderConfig(V, T, **SIZES), 5),
    "masked": lambda: MaskedLM(EncoderConfig(V, T, **SIZES)),
    "seq2seq": lambda: Seq2Seq(
        Seq2SeqConfig(V, V, T, T, **SIZES, share_embeddings=True, positions="sinusoidal", bias=True)
    ),
    "layer-t5": lambda: GQAttention(
        **LAYER, num_kv_heads=2, causal=False, relative_bias=8, qkv_bias=True, out_bias=True
    ),
    "layer-wide-values": lambda: CausalGQAttention(
        **LAYER, head_dim=6, v_head_dim=10, alibi=True, num_kv_heads=1
    ),
    "layer-additive": lambda: GQAttention(**LAYER, scoring="additive"),
    "layer-multiplicative": lambda: GQAttention(**LAYER, scoring="multiplicative", softcap=1.5),
    "layer-cross": lambda: CrossGQAttention(
        **LAYER, num_kv_heads=2, memory_dim=20, qk_norm=True, sinks=True
    ),
    "layer-cross-additive": lambda: CrossGQAttention(
        **LAYER, num_kv_heads=1, scoring="additive", memory_dim=20, qkv_bias=True
    ),
    "layer-mlp": lambda: MLP(C, 24, activation="geglu", bias=True),
}


def made(name: str) -> nn.Module:
    """The module, with parameters that are no zeros or ones."""
    torch.manual_seed(3)
    module = MODELS[name]()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module


def inputs_of(module: nn.Module) -> tuple[list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    tokens, targets = (torch.randint(V, (B, T), generator=generator) for _ in range(2))
    targets[0, 2] = -100
    if isinstance(module, Seq2Seq):
        return [], {"source": tokens[:, :7], "inputs": tokens, "targets": targets}
    if isinstance(module, Encoder):
        return [], {"tokens": tokens, "key_lengths": torch.tensor([T, 5])}
    if isinstance(module, (GPT, Tagger, MaskedLM)):
        return [], {
            "tokens": tokens,
            "targets": targets % 5 if isinstance(module, Tagger) else targets,
        }
    widths = [C, 20] if isinstance(module, CrossGQAttention) else [C]
    return [torch.randn(B, T, width, generator=generator) for width in widths], {}


def results(module: nn.Module) -> dict[str, Tensor]:
    """Outputs and all gradients, by name."""
    given, options = inputs_of(module)
    dtype = next(module.parameters()).dtype
    given = [x.to(dtype).requires_grad_() for x in given]
    out = module(*given, **options)
    found = (
        {"out": out} if isinstance(out, Tensor) else dict(zip(("out", "loss"), out, strict=True))
    )
    weights = torch.randn(found["out"].shape, generator=torch.Generator().manual_seed(5))
    loss = found["loss"] if "loss" in found else (found["out"] * weights.to(dtype)).sum()
    loss.backward()
    grads = {name: x.grad for name, x in module.named_parameters()}
    grads |= {f"dx{i}": x.grad for i, x in enumerate(given)}
    return {name: x.detach() for name, x in (found | grads).items()}


def whole(x: Tensor) -> Any:
    return (x.full_tensor() if isinstance(x, DTensor) else x).numpy()


def all_results() -> dict[str, dict[str, Any]] | None:
    """Of rank 0, what every module gives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for name in MODELS:
        module = made(name)
        shapes = {key: x.shape for key, x in module.named_parameters()}
        parallelize_module(module, mesh, tp_plan(module))
        for key, x in module.named_parameters():
            assert isinstance(x, DTensor) and x.shape == shapes[key], key
        found[name] = {key: whole(x) for key, x in results(module).items()}
        for key, x in module.named_parameters():
            assert x.grad.placements == x.placements, key
    return found if dist.get_rank() == 0 else None


@cache
def expected(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(exact, naive) results of one process."""
    exact = results(made(name).double())
    values = tuple(exact.values())
    naive = worst_naive(values, lambda: tuple(results(made(name)).values()))
    return exact, dict(zip(exact, naive, strict=True))


def started(ranks: int) -> Iterator[dict[str, dict[str, Any]]]:
    yield run_ranks(f"{__file__}:all_results", ranks)[0]


@pytest.fixture(scope="module")
def two() -> Iterator[dict[str, dict[str, Any]]]:
    yield from started(2)


@pytest.fixture(scope="module")
def four() -> Iterator[dict[str, dict[str, Any]]]:
    yield from started(4)


def check(name: str, found: dict[str, Any]) -> None:
    exact, naive = expected(name)
    assert found.keys() == exact.keys()
    for what, x in found.items():
        assert_within_budget(what, torch.from_numpy(x), exact[what], naive[what])


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name, two):
    check(name, two[name])


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks(name, four):
    check(name, four[name])
