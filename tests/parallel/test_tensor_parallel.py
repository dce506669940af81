"""Layers and models with heads and hidden units shared out over ranks compute what one does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from nightly import gate_cases
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fastattn import CausalGQAttention, CrossGQAttention, GQAttention
from fastattn.functional import call_memo
from fastattn.generation import Sampling, generate_batch
from fastattn.models.encoder import Encoder, EncoderConfig, MaskedLM, Tagger
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.layers import MLP
from fastattn.models.positions import RelativeContent
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.models.tensor_parallel import tp_plan
from fastattn.modules.vocabulary import sharded_cross_entropy
from fastattn.testing import assert_within_budget, worst_naive
from fastattn.torch_backend import torch_attention

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

V, C, H, B, T = 37, 32, 4, 2, 9
SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": H, "embed_dim": C}
LAYER: dict[str, Any] = {"embed_dim": C, "num_heads": H}
LLAMA: dict[str, Any] = {
    "num_kv_heads": 2, "positions": "rotary", "qk_norm": True, "sinks": True, "hidden_dim": 48,
    "activation": "swiglu", "norm": "rmsnorm", "tie_weights": False, "window": 5,
    "attention_dropout": 0.3, "output_gate": "element",
}  # fmt: skip


# Those that write, by the number of ranks, and the one that is sharded by FSDP2 too.
WRITERS = {2: "gpt-llama", 4: "gpt-alibi-one-key-head"}
SHARDED = "gpt-llama"


def gpt(**options: Any) -> GPT:
    return GPT(GPTConfig(V, T, **SIZES, **options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: gpt(bias=True, label_smoothing=0.1, project_residual=True),
    "gpt-llama": lambda: gpt(**LLAMA),
    "gpt-alibi-one-key-head": lambda: gpt(positions="alibi", num_kv_heads=1, softcap=2.0),
    "gpt-transformer-xl": lambda: gpt(positions="transformer_xl", relative_distance=3),
    "gpt-scalar": lambda: gpt(positions="scalar", relative_distance=3, relative_values=True),
    "gpt-content": lambda: gpt(positions="content", relative_distance=3, block="parallel"),
    "encoder": lambda: Encoder(EncoderConfig(V, T, **SIZES, embedding_norm=True, block="post")),
    "tagger": lambda: Tagger(EncoderConfig(V, T, **SIZES), 5),
    "masked": lambda: MaskedLM(EncoderConfig(V, T, **SIZES)),
    "seq2seq": lambda: Seq2Seq(
        Seq2SeqConfig(
            V,
            V,
            T,
            T,
            **SIZES,
            share_embeddings=True,
            positions="sinusoidal",
            bias=True,
            attention_dropout=0.4,
        )
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
        **LAYER, num_kv_heads=2, memory_dim=20, qk_norm=True, sinks=True, output_gate="head"
    ),
    "layer-cross-additive": lambda: CrossGQAttention(
        **LAYER, num_kv_heads=1, scoring="additive", memory_dim=20, qkv_bias=True
    ),
    "layer-mlp": lambda: MLP(C, 24, activation="geglu", bias=True),
}


# By day a module is on two ranks or on four.
EVERY = [(ranks, name) for ranks in WRITERS for name in MODELS]
BY_DAY = [x for n, x in enumerate(EVERY) if n % 2 == 0 or WRITERS[x[0]] == x[1]]
CASES = gate_cases(BY_DAY, [x for x in EVERY if x not in BY_DAY])


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
    torch.manual_seed(7)  # of the seeds of dropout
    out = module(*given, **options)
    outputs = (
        {"out": out} if isinstance(out, Tensor) else dict(zip(("out", "loss"), out, strict=True))
    )
    weights = torch.randn(outputs["out"].shape, generator=torch.Generator().manual_seed(5))
    loss = outputs["loss"] if "loss" in outputs else (outputs["out"] * weights.to(dtype)).sum()
    loss.backward()
    grads = {name: x.grad for name, x in module.named_parameters()}
    grads |= {f"dx{i}": x.grad for i, x in enumerate(given)}
    return {name: x.detach() for name, x in (outputs | grads).items()}


def whole(x: Tensor) -> Any:
    return (x.full_tensor() if isinstance(x, DTensor) else x).numpy()


def tokens_of(model: GPT) -> dict[str, Any]:
    """Generate with a model, by each way of storing keys."""
    model.eval()
    prompts, counts = [[3, 1, 4, 1, 5], [9, 2], [6]], [6, 5, 7]
    sampling = Sampling(temperature=1.3, top_k=20)
    torch.manual_seed(11)
    results = {
        "greedy": generate_batch(model, prompts, counts, sampling=Sampling(top_k=1)),
        "sampled": generate_batch(model, prompts, counts, sampling=sampling, seed=5),
        "drawn": generate_batch(model, prompts, counts, sampling=sampling),
    }
    assert model.new_paged_cache(1).k.shape[2] == model.blocks[0].attention.num_kv_heads
    return results


def errors(mesh: DeviceMesh) -> list[str]:
    """Errors for sizes that cannot be sharded, which leave the model unchanged."""
    said = []
    wrong = ({"num_heads": 6}, {"hidden_dim": 30}, {"num_heads": 12, "num_kv_heads": 3})
    models = [GPT(GPTConfig(V, T, **(SIZES | {"embed_dim": 48} | options))) for options in wrong]
    layer = GQAttention(**LAYER, num_kv_heads=2, relative=RelativeContent(8, 3, num_heads=2))
    for model in (*models, layer):
        layers = [x for x in model.modules() if isinstance(x, GQAttention)]
        heads = [x.num_heads for x in layers]
        with pytest.raises(ValueError) as raised:
            parallelize_module(model, mesh, tp_plan(model))
        said.append(str(raised.value))
        assert not any(isinstance(x, DTensor) for x in model.parameters())
        assert [x.num_heads for x in layers] == heads
    return said


def with_fsdp(mesh: DeviceMesh, folder: str) -> dict[str, Any]:
    """Results where FSDP2 shards what tensor parallelism does; the parameters go to a folder."""
    model = made(SHARDED)
    with pytest.raises(ValueError, match="device_mesh must have one dimension, got 2"):
        parallelize_module(model, mesh, tp_plan(model))
    parallelize_module(model, mesh["tp"], tp_plan(model))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # The same rows on both ranks, so that their mean is what one process finds.
    tensors = {key: whole(x) for key, x in results(model).items()}
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    return tensors


def all_results(folder: str) -> dict[Any, Any]:
    """Collect the result of every module, generated tokens, and errors."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {2: square["tp"], 4: init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))}
    everything: dict[Any, Any] = {"errors": errors(meshes[4]), "fsdp": with_fsdp(square, folder)}
    for ranks, name in CASES:
        module, mesh = made(name), meshes[ranks]
        shapes = {key: x.shape for key, x in module.named_parameters()}
        parallelize_module(module, mesh, tp_plan(module))
        for key, x in module.named_parameters():
            assert isinstance(x, DTensor) and x.shape == shapes[key], key
        everything[ranks, name] = {key: whole(x) for key, x in results(module).items()}
        for key, x in module.named_parameters():
            assert x.grad.placements == x.placements, key
        if WRITERS[ranks] == name:
            everything["tokens", ranks] = tokens_of(module)
    frozen = made("layer-mlp").requires_grad_(False)
    parallelize_module(frozen, meshes[2], tp_plan(frozen))
    assert not any(x.requires_grad for x in frozen.parameters())
    x = DTensor.from_local(torch.ones(1, 5, requires_grad=True), meshes[2], [Shard(1)])
    loss = sharded_cross_entropy(x, torch.tensor([7]))
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cross-entropy .* is differentiable once"):
        grad.to_local().sum().backward()
    with pytest.raises(RuntimeError, match="targets must be in"):
        sharded_cross_entropy(x.detach(), torch.tensor([10]))
    model = gpt()
    parallelize_module(model, meshes[2], tp_plan(model))
    with pytest.raises(RuntimeError, match="tokens must be in"):
        model.token_embedding(torch.tensor([[V]]))
    with pytest.raises(ValueError, match="weight of _Embedding is sharded already"):
        parallelize_module(model, meshes[2], tp_plan(model))
    return everything


@cache
def expected(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(exact, naive) results of one process, which draws seeds of dropout as ranks do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "draws", lambda *call: False)
        call_memo.forget()
        exact = results(made(name).double())
        values = tuple(exact.values())
        naive = worst_naive(values, lambda: tuple(results(made(name)).values()))
    return exact, dict(zip(exact, naive, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parameters")


@pytest.fixture(scope="module")
def by_rank(folder) -> list[dict[Any, Any]]:
    """Run four processes: the ranks of one mesh, and of two meshes of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        return run_ranks(f"{__file__}:all_results", 4, folder=str(folder))


def check(name: str, actual: dict[str, Any]) -> None:
    exact, naive = expected(name)
    assert actual.keys() == exact.keys()
    for what, x in actual.items():
        assert_within_budget(what, torch.from_numpy(x), exact[what], naive[what])


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_ranks_compute_what_one_process_computes(ranks, name, by_rank):
    check(name, by_rank[0][ranks, name])


@pytest.mark.parametrize("ranks", WRITERS)
def test_ranks_write_what_one_process_writes(ranks, by_rank):
    alone = tokens_of(made(WRITERS[ranks]))
    assert len({str(tokens) for tokens in alone["greedy"]}) == 3
    for results in by_rank:
        assert results["tokens", ranks] == alone


def test_fsdp_shards_it_further(by_rank):
    check(SHARDED, by_rank[0]["fsdp"])


def test_one_process_reads_what_ranks_have_stored(by_rank, folder):
    model = MODELS[SHARDED]()
    state = model.state_dict()
    with pytest.warns(UserWarning, match="load in a single process"):
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    for name, x in made(SHARDED).state_dict().items():
        assert torch.equal(state[name], x), name


def test_sizes_that_cannot_be_shared_out(by_rank):
    ranks = "the 4 ranks of tensor parallelism"
    for results in by_rank:
        assert results["errors"] == [
            f"num_heads must be divisible by {ranks}, got 6",
            f"hidden_dim must be divisible by {ranks}, got 30",
            f"num_kv_heads must divide {ranks}, or be divisible by them, got 3",
            f"num_heads of relative vectors must be divisible by {ranks}, got 2",
        ]


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match=r"module must be .* of fastattn, got Linear"):
        tp_plan(nn.Linear(2, 2))
