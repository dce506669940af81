"""GPT-2 and nanoGPT checkpoints: the same logits on both sides, in and out."""

import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers as tr
from small_gpt import make_gpt
from torch import nn

from fastattn.cli.main import main
from fastattn.models import gpt2
from fastattn.models.gpt import GPT
from fastattn.testing import worst_naive
from fastattn.testing.budget import assert_within_budget
from fastattn.training.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    load_model,
    save_checkpoint,
)
from fastattn.training.convert import export_hf, import_hf, import_nanogpt
from fastattn.training.tokenizers import (
    CharacterTokenizer,
    Tokenizer,
    TokenizerError,
    train_tokenizer,
)

pytestmark = pytest.mark.usefixtures("on_torch", "one_thread")

TEXT = "the cat sat on the mat, and the dog did not\n" * 20
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer("bpe", TEXT, vocab_size=270)


def hf_model(vocab_size: int, **changes) -> tr.GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    given = {**sizes, "attn_pdrop": 0.2, "bos_token_id": None, "eos_token_id": None, **changes}
    model = tr.GPT2LMHeadModel(tr.GPT2Config(vocab_size=vocab_size, **given))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save_hf(model, tokenizer, folder) -> None:
    """Save a model as transformers does, and a tokenizer.json."""
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")


@torch.no_grad()
def assert_same_logits(theirs, ours: GPT) -> None:
    def logits() -> torch.Tensor:
        return theirs(TOKENS).logits

    theirs.double()
    exact = logits()
    theirs.float()
    naive = worst_naive(exact, logits)
    assert_within_budget("logits", ours(TOKENS)[0], exact, naive)


@pytest.mark.parametrize(
    "changes",
    [{}, {"n_inner": 24, "activation_function": "gelu", "tie_word_embeddings": False}],
    ids=["gpt2", "other"],
)
def test_hugging_face_and_back(changes, bpe, tmp_path):
    theirs = hf_model(bpe.vocab_size, **changes)
    save_hf(theirs, bpe, tmp_path / "hf")
    made = import_hf(tmp_path / "hf", tmp_path / "run")
    ours, tokenizer = load_model(tmp_path / "run")
    assert_same_logits(theirs, ours)
    assert tokenizer.encode(TEXT) == bpe.encode(TEXT)
    assert load_checkpoint(made, training=False).config["imported"] == "Hugging Face folder hf"
    again = tr.AutoModelForCausalLM.from_pretrained(export_hf(made, tmp_path / "back"))
    assert again.config.attn_pdrop == theirs.config.attn_pdrop
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name
    assert tr.AutoTokenizer.from_pretrained(tmp_path / "back").encode("the cat") == (
        bpe.encode("the cat")
    )


def test_shards_and_older_names(bpe, tmp_path):
    """Weights in parts, without the prefix, with old files' masks, GPT-2's two vocabulary files."""
    theirs = hf_model(bpe.vocab_size)
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    bpe.backend.model.save(str(tmp_path))
    ours, tokenizer = load_model(import_hf(tmp_path, tmp_path / "run"))
    assert_same_logits(theirs, ours)
    assert tokenizer.encode(TEXT) == bpe.encode(TEXT)
    old = {name.removeprefix("transformer."): x for name, x in theirs.state_dict().items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    config = gpt2.config_from_hf(theirs.config.to_dict())
    renamed = gpt2.weights_from_hf(old, config)
    assert renamed.keys() == ours.state_dict().keys()


def run_of(model: GPT, tokenizer, folder):
    config = {"kind": "gpt", "model": model.config.to_dict()}
    return save_checkpoint(folder, Checkpoint(7, model.state_dict(), tokenizer, config))


def test_a_model_of_our_own_is_exported(tmp_path, monkeypatch):
    """Without biases, which GPT-2 then has as zeros, and with a tokenizer of characters."""
    tokenizer = CharacterTokenizer("abcdefghij")
    ours = make_gpt(vocab_size=10, bias=False, num_layers=1)
    folder = export_hf(run_of(ours, tokenizer, tmp_path / "run"), tmp_path / "hf")
    assert_same_logits(tr.AutoModelForCausalLM.from_pretrained(folder), ours)
    again, characters = load_model(import_hf(folder, tmp_path / "again"))
    torch.testing.assert_close(again(TOKENS)[0], ours(TOKENS)[0], rtol=0, atol=0)
    assert characters.encode("cafe") == tokenizer.encode("cafe")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"hf holds characters\.json already: choose an empt"):
        export_hf(tmp_path / "run", folder)
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(CheckpointError, match=r"cannot write .*full: No space left"):
        export_hf(tmp_path / "run", tmp_path / "full")


def test_weights_that_do_not_fit_are_named(bpe):
    theirs = hf_model(bpe.vocab_size)
    config, weights = gpt2.config_from_hf(theirs.config.to_dict()), theirs.state_dict()
    for change, message in (
        ({"transformer.h.1.ln_1.bias": None}, r"no h\.1\.ln_1\.bias"),
        ({"transformer.h.7.ln_1.bias": torch.ones(16)}, r"have h\.7\.ln_1\.bias, which this"),
        ({"lm_head.weight": torch.zeros(270, 16)}, r"must equal wte\.weight"),
        ({"transformer.h.0.ln_1.bias": torch.tensor(1.0)}, r"h\.0\.ln_1\.bias must have 1 dims"),
        ({"transformer.wte.weight": torch.ones(4)}, r"wte\.weight must have 2 dims, got .*\(4,\)"),
    ):
        changed = {name: x for name, x in {**weights, **change}.items() if x is not None}
        with pytest.raises(gpt2.UnsupportedModelError, match=message):
            gpt2.weights_from_hf(changed, config)
    fields = {**theirs.config.to_dict(), "tie_word_embeddings": False}
    del weights["lm_head.weight"]
    with pytest.raises(gpt2.UnsupportedModelError, match="it is not tied"):
        gpt2.weights_from_hf(weights, gpt2.config_from_hf(fields))


def test_unusable_folders_are_refused(bpe, tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: No such file"):
        import_hf(tmp_path, tmp_path / "run")
    save_hf(hf_model(bpe.vocab_size), bpe, tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        import_hf(tmp_path, tmp_path / "run")
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="as they can hold code"):
        import_hf(tmp_path, tmp_path / "run")
    weights.write_bytes(content)
    import_hf(tmp_path, tmp_path / "run")
    with pytest.raises(CheckpointError, match="holds a run already"):
        import_hf(tmp_path, tmp_path / "run")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        import_hf(tmp_path, tmp_path / "other")
    large = tmp_path / "large.json"
    more = train_tokenizer("bpe", TEXT, vocab_size=275)
    more.save(large)
    with pytest.raises(
        CheckpointError, match=f"of {more.vocab_size} ids, its model's vocab_size is"
    ):
        import_hf(tmp_path, tmp_path / "other", tokenizer=large)


def nano_checkpoint(bias: bool, prefix: str = "") -> tuple[tr.GPT2LMHeadModel, dict]:
    """A GPT-2, and nanoGPT's checkpoint of it: linear layers in place of transposed ones."""
    V = len(set(TEXT))
    model = hf_model(V, activation_function="gelu")
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {name: x.mT if name.endswith(turned) else x for name, x in model.state_dict().items()}
    if not bias:
        for name in [name for name in weights if name.endswith("bias")]:
            weights.pop(name).zero_()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": bias}
    return model, {
        "model": {prefix + name: x.clone() for name, x in weights.items()},
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "model_args": {**sizes, "vocab_size": V, "dropout": 0.2},
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "cats"},
    }


@pytest.mark.parametrize(("bias", "prefix"), [(False, "_orig_mod."), (True, "")])
def test_nanogpt(bias, prefix, tmp_path):
    theirs, stored = nano_checkpoint(bias, prefix)
    torch.save(stored, tmp_path / "ckpt.pt")
    (tmp_path / "input.txt").write_text(TEXT)
    made = import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "run", text=tmp_path / "input.txt")
    ours, tokenizer = load_model(made)
    assert ours.config.dropout == 0.2
    assert_same_logits(theirs, ours)
    ids = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    assert tokenizer.encode("the cat") == [ids[character] for character in "the cat"]


class Payload:
    """Leaves a trace if it is unpickled."""

    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


def test_nanogpt_runs_no_code(tmp_path):
    _, stored = nano_checkpoint(False)
    torch.save({**stored, "config": Payload()}, tmp_path / "ckpt.pt")
    assert pickle.loads(pickle.dumps(Payload())) is None and Payload.ran
    Payload.ran = False
    with pytest.raises(CheckpointError, match="cannot be read without running code"):
        import_nanogpt(tmp_path / "ckpt.pt", tmp_path / "run", text=__file__)
    assert not Payload.ran


def test_unusable_nanogpt_files_are_refused(tmp_path):
    file, run, text = tmp_path / "ckpt.pt", tmp_path / "run", tmp_path / "input.txt"
    text.write_text(TEXT)
    with pytest.raises(ValueError, match="one of tokenizer and text must be given"):
        import_nanogpt(file, run)
    with pytest.raises(CheckpointError, match="cannot read"):
        import_nanogpt(file, run, text=text)
    _, stored = nano_checkpoint(False)
    wrong = {**stored["model_args"], "n_embd": 32}
    for actual, message in (
        ({"model": {}}, "it has no 'model_args'"),
        ({**stored, "model_args": {"vocab_size": 3}}, "there is no field 'bias'"),
        ({**stored, "model_args": wrong}, "has a different configuration"),
    ):
        torch.save(actual, file)
        with pytest.raises(CheckpointError, match=message):
            import_nanogpt(file, run, text=text)
    torch.save(stored, file)
    text.write_text("abc")
    with pytest.raises(ValueError, match=f"the model's {len(set(TEXT))} characters, got 3"):
        import_nanogpt(file, run, text=text)


def test_commands(bpe, tmp_path, capsys):
    hf_model(bpe.vocab_size).save_pretrained(tmp_path / "hf")
    bpe.save(tmp_path / "bpe.json")
    run, given = str(tmp_path / "run"), ["--tokenizer", str(tmp_path / "bpe.json")]
    assert main(["import-hf", str(tmp_path / "hf"), "--out", run, *given]) == 0
    assert "checkpoint " in capsys.readouterr().out
    words = ["--prompt", "the cat", "--tokens", "4", "--device", "cpu"]
    assert main(["generate", "--checkpoint", run, *words]) == 0
    assert "the cat" in capsys.readouterr().out
    assert main(["export-hf", "--checkpoint", run, str(tmp_path / "back")]) == 0
    assert main(["train", "--out", run, "--resume"]) == 1
    assert "was imported from Hugging Face folder hf: it has no run" in capsys.readouterr().err
    _, stored = nano_checkpoint(False)
    torch.save(stored, tmp_path / "ckpt.pt")
    (tmp_path / "input.txt").write_text(TEXT)
    files = [str(tmp_path / "ckpt.pt"), "--text", str(tmp_path / "input.txt")]
    assert main(["import-nanogpt", *files, "--out", str(tmp_path / "nano")]) == 0
    assert load_model(tmp_path / "nano")[0].config.num_layers == 2
