"""Use of a device by training: operations a token, share of the peak rate, memory."""

import resource
from types import SimpleNamespace

import pytest
import torch

from fastattn.models.encoder import EncoderConfig, MaskedLM
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training import usage
from fastattn.training.usage import Usage, flops_per_token, peak_mib

CPU, GPU = torch.device("cpu"), torch.device("cuda")


SIZES = {"vocab_size": 100, "context_length": 8, "num_heads": 2, "embed_dim": 16}
CONFIG = GPTConfig(**SIZES, num_layers=3)
OPTIONS = {"positions": "rotary", "window": 3, "tie_weights": False}


@pytest.mark.parametrize(
    ("config", "unused", "keys"),
    [
        # Causal rows of 8 tokens see 4 keys on average by convention; positions multiply nothing.
        (CONFIG, 8 * 16, 4),
        # Rows see 1, 2, 3, 3, 3, 3, 3, 3 keys. The embedding multiplies nothing.
        (GPTConfig(**SIZES, num_layers=1, **OPTIONS), 100 * 16, 21 / 8),
    ],
    ids=["tied", "window"],
)
def test_operations_of_a_training_token(config, unused, keys):
    parameters = GPT(config).num_parameters()
    expected = 6 * (parameters - unused) + config.num_layers * (3 * 4 * 16) * keys
    assert flops_per_token(config, parameters) == pytest.approx(expected)


@pytest.fixture
def on_an_h100(monkeypatch):
    """Pretend that torch runs on a GPU of 989.4 TFLOP/s, with a peak of 3 GiB."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)


@pytest.mark.usefixtures("on_an_h100")
def test_figures_on_a_gpu():
    model = GPT(CONFIG)
    operations = flops_per_token(CONFIG, model.num_parameters())
    speed = 4 * 0.25 * 989.4e12 / operations  # of four ranks at a quarter of their rate
    actual = Usage(model, GPU, torch.bfloat16, 4).figures(speed)
    assert actual == {
        "tokens_per_second": round(speed, 1),
        "peak_mib": 3072,
        "mfu": 0.25,
    }
    encoder = MaskedLM(EncoderConfig(vocab_size=100, context_length=8))
    for other, dtype in ((model, torch.float32), (encoder, torch.bfloat16)):
        assert "mfu" not in Usage(other, GPU, dtype, 4).figures(speed)


def test_figures_of_one_process_on_a_cpu(monkeypatch):
    """getrusage(2) counts KiB on Linux and bytes on macOS."""
    assert peak_mib(CPU) > 50  # torch alone takes more
    for platform, units in (("linux", 3 * 2**20), ("darwin", 3 * 2**30)):
        monkeypatch.setattr(usage.sys, "platform", platform)
        monkeypatch.setattr(resource, "getrusage", lambda _, x=units: SimpleNamespace(ru_maxrss=x))
        actual = Usage(GPT(CONFIG), CPU, torch.bfloat16, 1).figures(10.04)
        assert actual == {"tokens_per_second": 10.0, "peak_mib": 3072}
