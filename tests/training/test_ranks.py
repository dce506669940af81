"""Four ranks train as one process does, by DDP and by FSDP2, and go on with each other's runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from nightly import gate_cases

from fastattn.models.gpt import GPT, GPTConfig
from fastattn.models.seq2seq import Seq2Seq, Seq2SeqConfig
from fastattn.training.checkpoint import load_checkpoint
from fastattn.training.data.text import TextDataset
from fastattn.training.data.text_pairs import Pair
from fastattn.training.metrics import read_metrics
from fastattn.training.ranks import Ranks
from fastattn.training.tasks.task import Batch, LanguageTask
from fastattn.training.tasks.translation import TranslationTask, encode_pairs
from fastattn.training.tokenizers import CharacterTokenizer, train_tokenizer
from fastattn.training.train_config import TrainConfig
from fastattn.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

CHECKOUT = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 12
CHARACTERS = CharacterTokenizer(TEXT)
SMALL = {"num_layers": 2, "num_heads": 2, "embed_dim": 16}
# Each run by four ranks, and the options that it is gone on with from step 4.
RUNS: dict[str, dict[str, Any]] = {
    "packed ddp": {"accumulation": 2},
    "packed fsdp": {"fsdp": True, "accumulation": 2, "activation_checkpointing": True},
    "translated fsdp": {"fsdp": True},
    **dict(gate_cases((), (("translated ddp", {}), ("packed fsdp bfloat16", {"fsdp": True})))),
}
STEPS, STOP = 8, 4


class Packed(LanguageTask):
    """Windows whose sentences do not see each other; hardly anything in one row is a target."""

    def _batch(self, windows: Batch, generator: torch.Generator) -> Batch:
        (inputs,), targets = windows.inputs, windows.targets.clone()
        targets[0, 2:] = -100
        return Batch((inputs,), targets, documents=(inputs == inputs[0, 0]).cumsum(1))


def make(name: str, out: Path, **options: Any) -> Trainer:
    """A trainer of a run of RUNS; its batches of 6 rows leave two of four ranks one row less."""
    config = TrainConfig(
        **{
            **{"steps": STEPS, "batch_size": 6, "log_interval": 1, "eval_interval": STOP},
            **{"eval_batches": 2, "device": "cpu", "grad_clip": 0.5},
            **({"dtype": "bfloat16"} if "bfloat16" in name else {}),
            **{key: x for key, x in options.items() if key not in ("ranks", "resume_from")},
        }
    )
    torch.manual_seed(0)
    task: Any
    model: torch.nn.Module
    if name.startswith("packed"):
        tokenizer: Any = CHARACTERS
        fields = {"vocab_size": tokenizer.vocab_size, "context_length": 16, **SMALL}
        model = GPT(GPTConfig(**fields, positions="rotary"))
        task = Packed(TextDataset.from_text(TEXT, tokenizer, 16), 16)
    else:
        tokenizer = train_tokenizer("word", "one two three eins zwei", vocab_size=20, special=True)
        pairs = [Pair("one two", "eins", "f:1"), Pair("two", "zwei eins", "f:2")] * 5
        rows = encode_pairs(pairs, tokenizer, source_length=4, target_length=4)
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size)
        model = Seq2Seq(Seq2SeqConfig(**sizes, source_length=4, target_length=4, **SMALL))
        targets = [pair.target for pair in pairs]
        task = TranslationTask(rows, rows, targets, tokenizer=tokenizer, fingerprint="pairs")
    kind = "gpt" if name.startswith("packed") else "seq2seq"
    own = {key: options[key] for key in ("ranks", "resume_from") if key in options}
    return Trainer(model, task, tokenizer, config, out, kind=kind, **own)


def all_runs(folder: str) -> None:
    """Train every run on this rank, the second half from the first half's checkpoint."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    for name, options in RUNS.items():
        out = Path(folder) / name
        first = make(name, out, ranks=ranks, **options)
        stop = first.run(lambda first=first: first.step == STOP).checkpoint
        make(name, out, ranks=ranks, resume_from=stop, **options).run()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_thread) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTATTN_BACKEND", "torch")
        run_ranks(f"{__file__}:all_runs", world_size=4, folder=str(folder))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_four_ranks_train_as_one_process(name, trained, tmp_path):
    options = {key: x for key, x in RUNS[name].items() if key == "accumulation"}
    make(name, tmp_path, **options).run()
    one, four = (
        [(r["step"], r[key]) for r in read_metrics(path) for key in r if key.endswith("loss")]
        for path in (tmp_path, trained / name)
    )
    assert [step for step, _ in one] == [step for step, _ in four]
    tolerance = 0.02 if "bfloat16" in name else 1e-4
    torch.testing.assert_close(torch.tensor(four), torch.tensor(one), rtol=0, atol=tolerance)
    whole, parts = load_checkpoint(tmp_path), load_checkpoint(trained / name)
    assert {n: x.shape for n, x in whole.model.items()} == {
        n: x.shape for n, x in parts.model.items()
    }
    if "bfloat16" not in name:
        torch.testing.assert_close(dict(parts.model), dict(whole.model), rtol=0, atol=2e-3)
    assert whole.config["results"]["scores"] == parts.config["results"]["scores"]


def test_one_process_goes_on_with_a_run_of_four(trained, tmp_path):
    """And trains it longer, with the moments that the ranks held in parts."""
    latest = {}
    for name in ("packed ddp", "packed fsdp"):
        run = make(name, tmp_path / name, accumulation=2, steps=12, resume_from=trained / name)
        assert run.step == STEPS
        latest[name] = load_checkpoint(run.run().checkpoint).model
    torch.testing.assert_close(*map(dict, latest.values()), rtol=0, atol=2e-3)


def test_float16_is_refused_with_fsdp(tmp_path):
    config = TrainConfig(fsdp=True)
    with pytest.raises(ValueError, match="dtype must be 'float32' or 'bfloat16' with fsdp, got"):
        Ranks(0, 2).prepare(GPT(GPTConfig(9, **SMALL)), config, torch.float16)


def test_the_documented_command_trains_on_two_ranks(tmp_path):
    """One rank speaks and writes."""
    page = (CHECKOUT / "docs" / "training.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^torchrun .* -m fastattn train .*$", page, re.MULTILINE)
    (tmp_path / "text").write_text(TEXT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    small = "--batch 4 --layers 1 --heads 2 --embed-dim 16 --context 16 --device cpu --log-every 1"
    words = [*launch, *shlex.split(command)[1:], "--text", "text", *small.split(), "--steps", "2"]
    environment = {**os.environ, "FASTATTN_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on cpu and 1 more ranks" in done.stderr
    assert len(re.findall("^training a GPT in", done.stderr, re.MULTILINE)) == 1
    assert done.stdout.count("validation loss") == 1
    records = read_metrics(tmp_path / "runs" / "two")
    assert [r["step"] for r in records if "loss" in r] == [1, 2]
