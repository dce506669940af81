"""Every split of four ranks trains as one process does: the matrix, in one start of processes."""

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import CountMessages, run_ranks
from nightly import gate_cases
from torch import nn

from fastattn.generation.translate import greedy_translate
from fastattn.models.encoder import EncoderConfig, MaskedLM
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.testing import assert_within_budget, worst_naive
from fastattn.training.checkpoint import latest_checkpoint
from fastattn.training.data.text import TextDataset
from fastattn.training.distributed import together
from fastattn.training.distributed.degrees import NAMES, Split
from fastattn.training.distributed.ranks import Ranks
from fastattn.training.distributed.together import Together
from fastattn.training.metrics import read_metrics
from fastattn.training.tasks.task import Batch, LanguageTask
from fastattn.training.tokenizers import CharacterTokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 12
TOKENIZER = CharacterTokenizer(TEXT)
CONTEXT = 16
SPLITS = {
    "dp4": Split(dp=4),
    "fsdp4": Split(fsdp=4),
    "dp2 fsdp2": Split(dp=2, fsdp=2),
    "cp4": Split(cp=4),
    "dp2 cp2": Split(dp=2, cp=2),
    "fsdp2 cp2": Split(fsdp=2, cp=2),
    "tp4": Split(tp=4),
    "fsdp2 tp2": Split(fsdp=2, tp=2),
    "cp2 tp2": Split(cp=2, tp=2),
}
# Splits of whole runs; "resumed" goes over from fsdp4 to dp2 cp2. Every split has single steps.
OFTEN = "dp2 fsdp2"
RUN = gate_cases([OFTEN], [name for name in SPLITS if name != OFTEN])
SHAPE = {"num_layers": 2, "num_heads": 4, "embed_dim": 32}
# Models whose gradients are compared, and the splits that they are compared on.
OF_CONTEXT = ("fsdp2 cp2", "dp2 cp2", "cp4")
OF_HEADS = ("cp2 tp2", "tp4", "fsdp2 tp2")
# The fields of a small Llama, whose messages are counted.
LLAMA = {
    **{"positions": "rotary", "num_kv_heads": 2, "hidden_dim": 64, "activation": "swiglu"},
    **{"norm": "rmsnorm", "tie_weights": False},
}
GPTS: dict[str, dict[str, Any]] = {
    "learned, tied, bias": {"bias": True},
    "rotary, window, sinks": {
        **LLAMA,
        "window": 5,
        "keep_first": 1,
        "sinks": True,
        "qk_norm": True,
        "head_bias": True,
    },
    "alibi, softcap, smoothing": {"positions": "alibi", "softcap": 3.0, "label_smoothing": 0.1},
    "transformer_xl": {"positions": "transformer_xl", "relative_distance": 4},
    "packed": {"positions": "rotary", "context_length": 13},
}
GPTS |= gate_cases(
    (),
    {
        "sinusoidal": {"positions": "sinusoidal"},
        "scalar": {"positions": "scalar"},
        "content": {"positions": "content", "relative_distance": 4},
    }.items(),
)
NAMED = {**GPTS, "llama": LLAMA}
OTHERS = ("masked", "seq2seq")
# Of steps whose messages are counted: a split, passes, and bytes of an activation.
SUMMED = gate_cases(["dp2 fsdp2"], ["dp4", "fsdp4"])
COUNTED = [(name, n, 4) for name in SUMMED for n in (1, 3)]
COUNTED += [("fsdp2 tp2", 1, stored) for stored in (2, 4)]
SCORED = ("dp2 fsdp2", "fsdp2 tp2")
COMPILED = gate_cases(["dp2 fsdp2"], ["dp4", "fsdp4"])
TRAINED = {"dropout": 0.1, "attention_dropout": 0.1, "bias": True}
STEPS, STOP = 8, 4


class Packed(LanguageTask):
    """Windows whose sentences do not see each other; of one row hardly anything is a target."""

    def _batch(self, windows: Batch, generator: Any) -> Batch:
        (inputs,), targets = windows.inputs, windows.targets.clone()
        ids = (inputs == inputs[0, 0]).cumsum(1)
        targets[0, 2:] = -100
        return Batch((inputs,), targets, {}, ids)


class Padded:
    """Rows of several lengths, for a model of this kind."""

    fingerprint, extent = "padded", "no data"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def draw(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        size = (batch_size, 9)
        source, inputs, targets = (
            torch.randint(len(TOKENIZER.to_json()) % 7 + 9, size, generator=generator)
            for _ in range(3)
        )
        lengths = torch.randint(1, 10, (batch_size,), generator=generator)
        targets[torch.arange(9) >= lengths[:, None]] = -100
        if self.kind == "masked":
            return Batch((inputs,), targets, {"key_lengths": lengths})
        both = {"source_lengths": lengths.flip(0), "target_lengths": lengths}
        return Batch((source, inputs), targets, both)

    def scores(self, model: nn.Module, batch_size: int) -> dict[str, Any]:
        """Translate by a seq2seq, which its methods `encode` and `decode` compute."""
        assert isinstance(model, Seq2Seq)
        source = torch.arange(20).view(4, 5)
        return {"greedy": greedy_translate(model, source, begin=1, end=2, max_length=6)}


def make(name: str, out: Path, ranks: Ranks | None = None, **changes: Any) -> Trainer:
    """A trainer of a small model: of one of GPTS or OTHERS, or of TRAINED."""
    config = TrainConfig(
        **{
            **{"steps": STEPS, "batch_size": 8, "log_interval": 1, "grad_clip": 0.5},
            **{"eval_interval": STOP, "eval_batches": 2, "device": "cpu"},
            **changes,
        }
    )
    shape = SHAPE if name in ("trained", "llama") else {**SHAPE, "num_layers": 1}
    fields = {"vocab_size": 40, "context_length": CONTEXT, **shape, **NAMED.get(name, TRAINED)}
    torch.manual_seed(0)
    model: nn.Module
    task: Any
    if name == "masked":
        model, task = MaskedLM(EncoderConfig(**fields)), Padded(name)
    elif name == "seq2seq":
        sizes = {"source_vocab_size": 40, "target_vocab_size": 40, "share_embeddings": True}
        model, task = Seq2Seq(Seq2SeqConfig(**shape, **sizes)), Padded(name)
    else:
        model = GPT(GPTConfig(**fields))
        data = TextDataset.from_text(TEXT, TOKENIZER, CONTEXT)
        of_kind = Packed if name == "packed" else LanguageTask
        task = of_kind(data, model.config.context_length)
    if name != "trained":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    actual = latest_checkpoint(out)
    return Trainer(model, task, TOKENIZER, config, out, ranks=ranks, resume_from=actual)


def gradients(
    name: str,
    out: Path,
    ranks: Ranks | None = None,
    dtype: torch.dtype = torch.float32,
    dtype_name: str = "float32",
) -> dict[str, torch.Tensor]:
    """Gradients that the optimizer gets in a first step of two passes, clipped."""
    trainer = make(name, out, ranks, accumulation=2, dtype=dtype_name)
    trainer.model.to(dtype)
    results: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        for parameter_name, x in trainer.model.named_parameters():
            assert x.grad is not None, parameter_name
            grad: Any = getattr(x.grad, "full_tensor", lambda x=x: x.grad)()
            results[parameter_name] = grad.detach().clone()

    trainer.optimizer.register_step_pre_hook(keep)
    trainer._train_step()
    return results


def scored(out: Path, ranks: Ranks | None = None) -> tuple[Any, float]:
    """A seq2seq's scores after a step, and the loss of the next."""
    trainer = make("seq2seq", out, ranks)
    trainer._train_step()
    actual = trainer.scores()
    trainer._loss_sum.zero_()
    trainer._train_step()
    return actual, float(trainer.ranks.total(trainer._loss_sum))


def compiled(out: Path, ranks: Ranks) -> tuple[list[float], int]:
    """Losses of two steps and an estimate after each, and how many graphs were made."""
    graphs = []

    def traced(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        # That layers can be traced is ours; the code that is made of it is torch's, and slow.
        patch.setattr(torch, "compile", partial(torch.compile, backend=traced))
        return stepped(out, ranks, compile=True), len(graphs)


def stepped(out: Path, ranks: Ranks | None = None, **changes: Any) -> list[float]:
    trainer = make("trained", out, ranks, **changes)
    losses = []
    for _ in range(2):
        trainer._train_step()
        losses += [float(trainer.ranks.total(trainer._loss_sum)), trainer.estimate_loss()]
        trainer._loss_sum.zero_()
    return losses


def splits_of(name: str) -> list[str]:
    if name in OTHERS:
        return ["dp2 fsdp2", "fsdp2 tp2"]
    if name == "packed":
        return ["cp4", "dp2 fsdp2"]
    number = list(GPTS).index(name)
    return [(OF_CONTEXT, OF_HEADS)[number % 2][number // 2 % 3]]


def sent(split: Split, passes: int, stored: int, out: Path) -> dict[str, tuple[int, float]]:
    """Messages and bytes of a step of a small Llama, by dim of the mesh."""
    dtype = {2: "bfloat16", 4: "float32"}[stored]
    ranks = Together(split)
    trainer = make("llama", out, ranks, accumulation=passes, dtype=dtype, grad_clip=0.0)
    with CountMessages() as counted:
        trainer._train_step()
    groups = {name: dist.get_process_group_ranks(ranks.mesh.get_group(name)) for name in NAMES}
    members = {name: tuple(group) for name, group in groups.items() if len(group) > 1}
    assert counted.calls.keys() == set(members.values())
    return {name: (counted.calls[group], counted.sent[group]) for name, group in members.items()}


def in_bf16(out: Path, ranks: Ranks | None = None) -> dict[str, torch.Tensor]:
    """Gradients of a step in bf16, rounded to it: what is computed is no better."""
    actual = gradients("learned, tied, bias", out, ranks, dtype_name="bfloat16")
    assert {x.dtype for x in actual.values()} == {torch.float32}
    return {name: x.bfloat16() for name, x in actual.items()}


def world(folder: str) -> dict[str, Any]:
    """Everything that this file asserts of the ranks."""
    os.environ["FASTATTN_BACKEND"] = "torch"
    # Groups of a split serve all of its trainers.
    together.init_device_mesh = cache(together.init_device_mesh)
    base = Path(folder)
    results: dict[str, Any] = {"gradients": {}, "states": {}}
    for name in RUN:
        make("trained", base / name, Together(SPLITS[name])).run()
        # The same generators everywhere: nobody has drawn for its own rows alone.
        results["states"][name] = torch.get_rng_state().numpy()
    settings = {"save_in_background": True}
    stopped = make("trained", base / "resumed", Together(Split(fsdp=4)), **settings)
    stopped.run(lambda: stopped.step == STOP and dist.get_rank() == 2)
    dist.barrier()
    make("trained", base / "resumed", Together(Split(dp=2, cp=2))).run()
    for name in (*GPTS, *OTHERS):
        for split in splits_of(name):
            grads = gradients(name, base / "none", Together(SPLITS[split]))
            results["gradients"][name, split] = {key: x.numpy() for key, x in grads.items()}
    results["scores"] = {x: scored(base / "none", Together(SPLITS[x])) for x in SCORED}
    results["sent"] = {
        (name, *how): sent(SPLITS[name], *how, base / "none") for name, *how in COUNTED
    }
    results["compiled"] = {x: compiled(base / "none", Together(SPLITS[x])) for x in COMPILED}
    grads = in_bf16(base / "none", Together(SPLITS["fsdp2 cp2"]))
    results["bf16"] = {name: x.float().numpy() for name, x in grads.items()}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(f"{__file__}:world", 4, folder=str(folder))


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        make("trained", folder / "one").run()
    return read_metrics(folder / "one")


@pytest.mark.parametrize("name", [*RUN, "resumed"])
def test_losses_are_those_of_one_process(
    name: str, folder: Path, by_rank: list, alone: list[dict[str, Any]]
) -> None:
    """With dropout, clipping, weight decay and estimates of the validation loss between."""
    got = read_metrics(folder / name)
    assert [record["step"] for record in got] == [record["step"] for record in alone]
    assert len(got) == STEPS + 2
    for mine, expected in zip(got, alone, strict=True):
        if "loss" in mine:
            speeds = mine["tokens_per_second"], 4 * mine.pop("tokens_per_second_per_rank")
            assert speeds[0] == pytest.approx(speeds[1], abs=0.5)
        assert mine.keys() == expected.keys()
        for key in {"loss", "validation_loss"} & mine.keys():
            assert mine[key] == pytest.approx(expected[key], abs=1e-4)
    assert alone[0]["loss"] - alone[-2]["loss"] > 0.3


@pytest.mark.parametrize("name", RUN)
def test_all_ranks_draw_alike(name: str, by_rank: list) -> None:
    states = [results["states"][name] for results in by_rank]
    assert all(np.array_equal(states[0], state) for state in states)


@pytest.mark.parametrize("name", [*GPTS, *OTHERS])
def test_gradients_are_within_the_budget(name: str, tmp_path: Path, by_rank: list) -> None:
    exact = gradients(name, tmp_path, dtype=torch.float64)
    naive = worst_naive(exact, lambda: gradients(name, tmp_path))
    assert all(x.abs().max() > 0 for x in exact.values())
    for split in splits_of(name):
        for results in by_rank:
            got = results["gradients"][name, split]
            assert got.keys() == exact.keys()
            for key, x in got.items():
                assert_within_budget(f"{split} {key}", torch.from_numpy(x), exact[key], naive[key])


def test_half_precision_gradients_are_within_the_budget(tmp_path: Path, by_rank: list) -> None:
    """Parameters are gathered in bf16, and gradients summed in fp32."""
    exact = gradients("learned, tied, bias", tmp_path, dtype=torch.float64)
    naive = worst_naive(exact, lambda: in_bf16(tmp_path))
    for key, x in by_rank[0]["bf16"].items():
        assert_within_budget(key, torch.from_numpy(x).bfloat16(), exact[key], naive[key])


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_those_of_one_process(name: str, tmp_path: Path, by_rank: list) -> None:
    """Greedy translations, between two steps, of rows that differ."""
    scores, loss = scored(tmp_path)
    assert len({str(tokens) for tokens in scores["greedy"]}) > 1
    for results in by_rank:
        assert results["scores"][name][0] == scores
        assert results["scores"][name][1] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_train_as_others(name: str, tmp_path: Path, by_rank: list) -> None:
    alone = stepped(tmp_path)
    for losses, graphs in (rank["compiled"][name] for rank in by_rank):
        assert losses == pytest.approx(alone, abs=1e-4)
        assert graphs > 0


@pytest.mark.parametrize("name", SUMMED)
def test_accumulated_passes_sum_gradients_over_replicas_once_a_step(
    name: str, by_rank: list
) -> None:
    """Sharded gradients are scattered in each pass."""
    for results in by_rank:
        one, three = (results["sent"][name, passes, 4] for passes in (1, 3))
        assert one.keys() == three.keys() == set(name.replace("2", "").replace("4", "").split())
        for dim, (calls, sent) in one.items():
            times = 1 if dim == "dp" else 3
            assert three[dim] == (times * calls, times * sent)


def test_messages_of_half_precision_are_half_as_long(by_rank: list) -> None:
    """Messages of tensor parallelism except the loss are half; so are parameters, not gradients."""
    for results in by_rank:
        wide, narrow = (results["sent"]["fsdp2 tp2", 1, stored] for stored in (4, 2))
        for dim, least, most in (("tp", 0.5, 0.55), ("fsdp", 0.6, 0.75)):
            assert wide[dim][0] == narrow[dim][0]
            assert least * wide[dim][1] <= narrow[dim][1] < most * wide[dim][1]
