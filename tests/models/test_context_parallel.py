"""Models over a sequence that 4 ranks share: one step has the loss and gradients of one process."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as tr
from gloo_ranks import run_ranks
from nightly import gate_cases
from small_gpt import make_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers_models import (
    GQA,
    SIZES,
    build,
    decoder_config,
    padded,
    softmax_in_fp64,
    tokens,
)

from fastattn import (
    CausalGQAttention,
    CrossGQAttention,
    KVCache,
    MultiheadAttention,
    MultiheadLatentAttention,
    NativeSparseAttention,
    patch_sdpa,
)
from fastattn.compat.transformers import hf_attention
from fastattn.compat.transformers.context_parallel import check_model
from fastattn.models.context_parallel import ContextParallel
from fastattn.models.gpt import GPT
from fastattn.parallel import ContextPlan, roll, shard
from fastattn.testing import assert_within_budget, worst_naive
from fastattn.testing.inputs import draw

pytestmark = pytest.mark.usefixtures("on_torch", "one_thread")

B, T, RANKS = 2, 90, 4
# Sequences of other lengths in each row.
PACKED = torch.stack(
    [torch.cat([torch.arange(n) for n in row]) for row in ((40, 33, 17), (13, 76, 1))]
)
DOCUMENTS = PACKED.eq(0).cumsum(1)
PREFIX = torch.ones(T, T).tril().index_fill(1, torch.arange(7), 1.0)


LAYER: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "num_kv_heads": 2, "rotary": "half"}
IDS = dict.fromkeys(("bos_token_id", "eos_token_id"), 1)
LEARNED = {"vocab_size": 61, "n_positions": T, "n_embd": 32, "n_layer": 2, "n_head": 4, **IDS}
LATENT = {"embed_dim": 32, "num_heads": 4, "kv_latent_dim": 8, "nope_dim": 8, "rope_dim": 4}


class Patched(nn.Module):
    """A model that calls torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv = nn.Embedding(61, 32), nn.Linear(32, 64)
        self.out = nn.Linear(32, 61)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.embedding(ids)).split((32, 16, 16), -1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=0.5, enable_gqa=True
        )
        actual: Tensor = self.out(o.transpose(1, 2).flatten(2))
        return actual


def gpt(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return make_gpt(61, 128, 0.2, num_heads=4, num_kv_heads=2, embed_dim=32, **changes)


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def decoder(name: str) -> Any:
    return build(tr.AutoModelForCausalLM, decoder_config(name), "cpu")


class Unpatched(Patched):
    """One whose calls ContextParallel sees to by itself."""


class Layered(nn.Module):
    """A model of one layer of fastattn's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(61, 32), CausalGQAttention(**LAYER, **options)
        self.out = nn.Linear(32, 61)

    def forward(self, ids: Tensor) -> Tensor:
        actual: Tensor = self.out(self.layer(self.embedding(ids)))
        return actual


class Recomputed(Layered):
    """One whose backward computes the layer again."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        actual: Tensor = self.out(checkpoint(self.layer, x, use_reentrant=self.reentrant))
        return actual


class Later(Recomputed):
    """One whose backward comes after the context."""

    reentrant = True


def compiled(model: Any) -> Any:
    graphs: list[Any] = []
    call = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    return lambda *args, **given: (call(*args, **given), graphs[0])[0]  # there are some


class Case(NamedTuple):
    """A model, what it is given beside tokens with the dim of the tokens, and a method.

    style: the model's layer is parallelized by itself. called: as what, on the ranks.
    """

    model: Callable[[], Any]
    method: str
    given: Mapping[str, tuple[Tensor, int]] = MappingProxyType({})
    plan: Mapping[str, Any] = MappingProxyType({})
    style: bool = False
    called: Callable[[Any], Any] = lambda model: model


CASES = {
    "gpt": Case(
        lambda: gpt(window=30, sinks=True, positions="rotary"), "ring",
        {"documents": (DOCUMENTS, 1)}, {"window": 30, "documents": DOCUMENTS},
    ),
    "gpt, learned positions": Case(lambda: gpt(positions="learned"), "ring"),
    "layer": Case(
        lambda: seeded(lambda: Layered(window=30, sinks=True, softcap=5.0)), "ring"
    ),
    "style": Case(
        lambda: seeded(lambda: Layered(keep_first=2, window=9, qk_norm=True, output_gate="head")),
        "ring", style=True,
    ),
    "torch": Case(lambda: seeded(Unpatched), "ring"),
    "recomputed": Case(lambda: seeded(Recomputed), "gather"),
    "recomputed later": Case(lambda: seeded(Later), "ring"),
    "compiled": Case(lambda: seeded(Layered), "ring", called=compiled),
    "compiled llama-gqa": Case(lambda: decoder("llama-gqa"), "ring", called=compiled),
    "patched torch": Case(lambda: seeded(Patched), "ulysses"),
    "patched torch, mask": Case(
        lambda: seeded(Patched), "gather", {"mask": (PREFIX.bool()[None, None], 2)}
    ),
    "mistral-window": Case(lambda: decoder("mistral-window"), "gather", plan={"window": 5}),
    "mistral-window packed": Case(
        lambda: decoder("mistral-window"), "usp", {"position_ids": (PACKED, 1)},
        {"documents": DOCUMENTS},
    ),
    "llama-gqa packed, ones": Case(
        lambda: decoder("llama-gqa"), "gather",
        {"position_ids": (PACKED, 1), "attention_mask": (torch.ones(B, T).long(), 1)},
    ),
    "gemma2-softcap padded": Case(
        lambda: decoder("gemma2-softcap"), "ring",
        {"attention_mask": (padded([(0, 90), (0, 51)], T, "cpu"), 1)},
    ),
    "gpt-oss-sinks, as wrappers call": Case(
        lambda: decoder("gpt-oss-sinks"), "ulysses", called=lambda model: model.forward
    ),
    "starcoder prefix": Case(  # whose table of positions ends with the text, before padding
        lambda: build(tr.AutoModelForCausalLM, tr.GPTBigCodeConfig(**LEARNED), "cpu"), "ring",
        {"attention_mask": ((1 - PREFIX[None, None]) * -1e9, 2)},
    ),
}  # fmt: skip


# Of each model one way; the others by night.
_OTHERS = ["patched torch", "mistral-window", "compiled llama-gqa"]
BY_DAY = gate_cases([name for name in CASES if name not in _OTHERS], _OTHERS)


def is_of_transformers(model: Any) -> bool:
    return hasattr(model, "set_attn_implementation")


def labels_of(case: Case) -> Tensor:
    mask = case.given.get("attention_mask", (torch.ones(B, T), 1))[0]
    ids = tokens(B, T, "cpu")
    return ids.where(mask.bool(), -100) if mask.dim() == 2 else ids


def scores(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out  # a GPT's logits and loss


def with_gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    return {"loss": loss.detach(), **grads}


def one_process(case: Case, model: Any) -> dict[str, Tensor]:
    """The mean loss of the next tokens, and the gradients, of the whole sequence."""
    given = {name: x for name, (x, _) in case.given.items()}
    ids, labels = tokens(B, T, "cpu"), labels_of(case)
    if is_of_transformers(model):
        if "position_ids" in given:
            given.pop("attention_mask", None)  # beside which "eager" finds no sequences
        return with_gradients(model, model(ids, labels=labels, use_cache=False, **given).loss)
    logits = scores(model(ids, **given))[:, :-1].flatten(0, 1)
    return with_gradients(model, F.cross_entropy(logits, labels[:, 1:].flatten()))


def step(case: Case, mesh: Any) -> dict[str, Any]:
    """This rank's share of the loss and of the gradients."""
    plan = ContextPlan.make(T, RANKS, causal=True, block=8, **case.plan)
    model = case.model()
    own = {name: shard(x, dim, plan, mesh) for name, (x, dim) in case.given.items()}
    ids, labels = (shard(x, 1, plan, mesh) for x in (tokens(B, T, "cpu"), labels_of(case)))
    patch = patch_sdpa() if type(model) is Patched else nullcontext()
    parallel: Any = ContextParallel(mesh, plan, case.method)
    if case.style:
        parallelize_module(model.layer, mesh, parallel)
        parallel = nullcontext()
    with patch, parallel:
        if is_of_transformers(model):
            loss = case.called(swapped(model))(ids, labels=labels, **own).loss
        elif isinstance(model, GPT):
            loss = model(ids, roll(labels, 1, plan, mesh), **own)[1]
        else:
            targets = roll(labels, 1, plan, mesh).flatten()
            logits = case.called(model)(ids, **own).flatten(0, 1)
            loss = F.cross_entropy(logits, targets, reduction="sum") / (B * (T - 1))
        actual = {} if type(model) is Later else with_gradients(model, loss)
    actual = actual or with_gradients(model, loss)
    return {name: x.numpy() for name, x in actual.items()}


def world() -> dict[str, Any]:
    """Everything that this file asserts of a rank, in one start of four processes."""
    one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    results: dict[str, Any] = {
        name: step(CASES[name], two if CASES[name].method == "usp" else one) for name in BY_DAY
    }
    results["refused"] = {name: refusal(call, one) for name, (call, _) in REFUSED.items()}
    results["one rank's tokens"] = refusal(tokens_of_one_rank, one)
    return results


def plan_of() -> ContextPlan:
    return ContextPlan.make(T, RANKS, causal=True, block=8)


def refusal(call: Callable[[Any], Any], mesh: Any) -> str:
    """The type and message of what a call under ContextParallel raises."""
    try:
        with ContextParallel(mesh, plan_of()):
            call(mesh)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def swapped(model: Any) -> Any:
    model.set_attn_implementation("fastattn")
    return model


def called(mesh: Any, config: Any, kind: Any = tr.AutoModelForCausalLM, **given: Any) -> Any:
    ids = shard(tokens(1, T, "cpu"), 1, plan_of(), mesh)
    return swapped(build(kind, config, "cpu"))(**{"input_ids": ids, **given})


def mistral(mesh: Any, **given: Any) -> Any:
    return called(mesh, decoder_config("mistral-window"), **given)


def bart(mesh: Any, **given: Any) -> Any:
    sizes = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    return called(mesh, tr.BartConfig(vocab_size=61, d_model=8, **sizes), **given)


def multihead(kind: Any) -> Any:
    return kind(8, 2)(*[draw(24, 1, 8)] * 3)


def layer(mesh: Any, kind: Any = CausalGQAttention, options: Any = LAYER, **given: Any) -> Any:
    return kind(**options)(shard(draw(1, T, 32), 1, plan_of(), mesh), **given)


def tables_in_a_style(mesh: Any) -> Any:
    of_style = ContextParallel(mesh, plan_of())
    actual = parallelize_module(CausalGQAttention(**LAYER), mesh, of_style)
    return actual(draw(1, 24, 32), rotary_tables=(draw(24, 4), draw(24, 4)))


def masked_torch(mesh: Any) -> Any:
    ids = shard(tokens(1, T, "cpu"), 1, plan_of(), mesh)
    return Unpatched()(ids, torch.ones(24, 24).bool())


def tokens_of_one_rank(mesh: Any) -> Any:
    return mistral(mesh, **({"input_ids": tokens(1, T, "cpu")} if dist.get_rank() == 1 else {}))


def other_module(mesh: Any) -> Any:
    return parallelize_module(nn.Linear(2, 2), mesh, ContextParallel(mesh, plan_of()))


class WrittenOut(Patched):
    def forward(self, ids: Tensor) -> Tensor:
        q, k, _ = self.qkv(self.embedding(ids))[..., :48].split(16, -1)
        return (q @ k.mT).softmax(-1)


def on_own_tokens(mesh: Any, call: Callable[[Tensor], Any]) -> Any:
    return call(shard(tokens(1, T, "cpu"), 1, plan_of(), mesh))


def two_contexts(mesh: Any) -> None:
    with ContextParallel(mesh, plan_of()):
        pass


LABELS, ROUTED = torch.zeros(1, 24).long(), tr.MixtralConfig(**GQA, output_router_logits=True)
WHOLE = "must have 24 tokens in dim 1"
UNDER = "is not supported under ContextParallel"
# By name a call and what its error says.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cache of a layer": (
        lambda mesh: layer(mesh, cache=KVCache(1, 2, 8, 8)),
        "ValueError: cache is not supported under ContextParallel",
    ),
    "additive": (
        lambda mesh: layer(mesh, options={**LAYER, "scoring": "additive"}),
        'ValueError: scoring="additive" is not supported under ContextParallel',
    ),
    "written out": (
        lambda mesh: on_own_tokens(mesh, WrittenOut()),
        "TypeError: softmax of scores [1, 24, 24] is not supported under ContextParallel",
    ),
    "two contexts": (two_contexts, "RuntimeError: a ContextParallel is active already"),
    "forward of a base": (
        lambda mesh: on_own_tokens(
            mesh, swapped(build(tr.AutoModel, decoder_config("llama-gqa"), "cpu")).forward
        ),
        "ValueError: under ContextParallel call a model, not its forward",
    ),
    "latents": (
        lambda mesh: layer(mesh, MultiheadLatentAttention, LATENT),
        "TypeError: MultiheadLatentAttention does not support context parallelism",
    ),
    "mask of torch": (
        masked_torch,
        "ValueError: attn_mask must have 2 to 4 dimensions that broadcast to [B, H_q, T_q, T_k] = "
        "[1, 4, 24, 90], got [24, 24]",
    ),
    "tables of a style": (
        tables_in_a_style, "ValueError: rotary_tables may have other positions"
    ),
    "other modules": (
        other_module, "TypeError: ContextParallel is a style of GQAttention and CausalGQAttention"
    ),
    "whole tokens": (
        lambda mesh: mistral(mesh, input_ids=tokens(1, T, "cpu")),
        f"ValueError: input_ids {WHOLE}, as a rank has by the plan, got [1, 90]: shard(x, 1, plan, "
        "mesh) does it",
    ),
    "whole padding": (
        lambda mesh: mistral(mesh, attention_mask=torch.ones(1, T)),
        f"ValueError: attention_mask {WHOLE}",
    ),
    "whole positions": (
        lambda mesh: mistral(mesh, position_ids=torch.arange(T)[None]),
        f"ValueError: position_ids {WHOLE}",
    ),
    "a rank's mask": (
        lambda mesh: mistral(mesh, attention_mask=torch.ones(1, 1, 24, 24).bool()),
        "ValueError: attention_mask was made of this rank's tokens alone, by a function that is "
        "not transformers' own: give the model [B, 1, 24, 90]",
    ),
    "cache": (
        lambda mesh: mistral(mesh, past_key_values=tr.DynamicCache()),
        f"ValueError: past_key_values {UNDER}: a sequence sharded",
    ),
    "cache by its new name": (
        lambda mesh: mistral(mesh, cache=tr.DynamicCache()),
        f"ValueError: cache {UNDER}: a sequence sharded",
    ),
    "use_cache": (lambda mesh: mistral(mesh, use_cache=True), f"ValueError: use_cache {UNDER}"),
    "offsets": (
        lambda mesh: mistral(mesh, cu_seq_lens_q=torch.tensor([0, 90])),
        f"ValueError: cu_seq_lens_q {UNDER}: position_ids that",
    ),
    "weights": (
        lambda mesh: mistral(mesh, output_attentions=True), f"ValueError: output_attentions {UNDER}"
    ),
    "another loss": (
        lambda mesh: mistral(mesh, kind=tr.AutoModelForTokenClassification, labels=LABELS),
        "ValueError: labels are not supported under ContextParallel for MistralForToken",
    ),
    "loss in a forward": (
        lambda mesh: bart(mesh, labels=LABELS),
        "ValueError: labels are not supported under ContextParallel for BartForCausalLM",
    ),
    "loss of routers": (
        lambda mesh: called(mesh, ROUTED, labels=LABELS),
        f"ValueError: output_router_logits of MixtralForCausalLM {UNDER}: its loss is no sum",
    ),
    "own positions": (
        lambda mesh: called(mesh, tr.BertConfig(**SIZES), tr.AutoModel),
        "ValueError: position_ids must be given to BertModel under ContextParallel",
    ),
    "positions in a forward": (bart, f"ValueError: BartDecoder {UNDER}: it takes no position_ids"),
    "pooled keys": (
        lambda mesh: layer(mesh, NativeSparseAttention, {"embed_dim": 32, "num_heads": 4}),
        f"TypeError: pooled_attention {UNDER}",
    ),
    "torch's operator": (
        lambda mesh: torch.ops.aten.scaled_dot_product_attention(*[draw(1, 2, 24, 8)] * 3),
        f"TypeError: scaled_dot_product_attention {UNDER}, where it would see the tokens of one",
    ),
    "flex_attention": (
        lambda mesh: flex_attention(*[draw(1, 2, 24, 8)] * 3), f'TypeError("flex_attention {UNDER}'
    ),
    "cross-attention": (
        lambda mesh: CrossGQAttention(8, 2)(draw(1, 24, 8), draw(1, 24, 8)),
        f"ValueError: CrossGQAttention {UNDER}",
    ),
    "multihead": (
        lambda mesh: multihead(nn.MultiheadAttention), f"ValueError: MultiheadAttention {UNDER}"
    ),
    "our multihead": (
        lambda mesh: multihead(MultiheadAttention), f"ValueError: MultiheadAttention {UNDER}"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        return run_ranks(f"{__file__}:world", RANKS)


@pytest.mark.parametrize("name", BY_DAY)
def test_a_step_is_that_of_one_process(ranks, name):
    case = CASES[name]
    model = case.model().double()
    with softmax_in_fp64():
        exact = one_process(case, model)
    naive = worst_naive(exact, lambda: one_process(case, case.model()))
    for key, ref in exact.items():
        actual = sum(torch.from_numpy(rank[name][key]).double() for rank in ranks)
        assert_within_budget(key, actual.float(), ref, naive[key])
    assert exact["loss"] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_on_every_rank(ranks, name):
    for rank in ranks:
        assert REFUSED[name][1] in rank["refused"][name]


def test_a_rank_hears_that_another_has_other_tokens(ranks):
    reason = "input_ids must have 24 tokens in dim 1, as a rank has by the plan, got [1, 90]"
    for n, rank in enumerate(ranks):
        start = "ValueError: " if n == 1 else "ValueError: rank 1 refused the call: "
        assert rank["one rank's tokens"].startswith(start + reason)


def test_nothing_stays_in_force_after_a_refusal():
    layer = CausalGQAttention(**LAYER)
    before = layer(draw(1, 6, 32))
    with pytest.raises(TypeError, match="mesh must be"), ContextParallel("cpu", plan_of()):
        layer(draw(1, 6, 32))
    assert torch.equal(layer(draw(1, 6, 32)), before)


def llama_rotary(kind: str, **fields: Any) -> Any:
    return tr.LlamaConfig(**GQA, rope_parameters={"rope_theta": 1e4, "rope_type": kind, **fields})


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
UNSERVED: dict[str, tuple[Callable[[], Any], str]] = {
    "chunks": (lambda: decoder_config("llama4-chunks"), "it has chunked_attention, which sees"),
    "dynamic rotary": (
        lambda: llama_rotary("dynamic", factor=2.0),
        "past 64 its rotary frequencies depend on the last position",
    ),
    "longrope": (lambda: llama_rotary("longrope", **LONG), "past 32 its rotary frequencies depend"),
    "own code": (lambda: tr.BloomConfig(**SIZES), "BloomAttention computes attention by itself"),
    "state": (lambda: tr.MambaConfig(**SIZES), "it has linear_attention, which sees the"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_models_that_mix_tokens_otherwise_are_refused(name):
    config, message = UNSERVED[name]
    model = build(tr.AutoModelForCausalLM, config(), "cpu")
    model.config._attn_implementation_internal = hf_attention.NAME
    with pytest.raises(ValueError, match=message):
        check_model(model, T)


def test_models_with_other_attention_are_refused():
    model = decoder("llama-gqa")
    with pytest.raises(ValueError, match=r'need attn_implementation="fastattn", got \'eager\''):
        check_model(model, T)
    model.config._attn_implementation_internal = hf_attention.NAME
    model.model.mixer = nn.Conv1d(2, 2, 3)
    with pytest.raises(ValueError, match="it has Conv1d, which sees the tokens of one rank"):
        check_model(model, T)
    t5 = build(tr.AutoModelForSeq2SeqLM, tr.T5Config(**SIZES, d_model=32, num_heads=4), "cpu")
    t5.config._attn_implementation_internal = hf_attention.NAME
    with pytest.raises(ValueError, match="it has two sequences"):
        check_model(t5, T)
