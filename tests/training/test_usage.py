"""Use of a device by training: operations a token, share of the peak rate, memory."""

import io
import resource
from types import SimpleNamespace

import pytest
import torch

from fastattn.models.encoder import EncoderConfig
from fastattn.models.gpt import GPT, GPTConfig
from fastattn.training import metrics, usage
from fastattn.training.metrics import ProgressBar
from fastattn.training.usage import Usage, dense_bf16_tflops, flops_per_token, peak_mib

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_operations_of_a_training_token():
    config = GPTConfig(vocab_size=100, context_length=8, num_layers=3, num_heads=2, embed_dim=16)
    parameters = GPT(config).num_parameters()
    positions = 8 * 16
    # Causal rows of 8 tokens see 4 keys on average by convention: 3 layers, 3 * 4 * 16 each.
    expected = 6 * (parameters - positions) + 3 * (3 * 4 * 16) * 4
    assert flops_per_token(config, parameters) == expected


def test_operations_of_a_training_token_with_a_window_and_an_untied_head():
    config = GPTConfig(
        vocab_size=100,
        context_length=8,
        num_layers=1,
        embed_dim=16,
        num_heads=2,
        positions="rotary",
        window=3,
        tie_weights=False,
    )
    parameters = GPT(config).num_parameters()
    # Rows see 1, 2, 3, 3, 3, 3, 3, 3 keys: 21 / 8 on average. The embedding multiplies nothing.
    expected = 6 * (parameters - 100 * 16) + 3 * 4 * 16 * 21 / 8
    assert flops_per_token(config, parameters) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA A100-SXM4-80GB", 312.0)],
)
def test_dense_rate_of_the_data_sheet(name, rate):
    assert dense_bf16_tflops(name) == rate
    assert dense_bf16_tflops("Imaginary GPU") is None


@pytest.fixture
def on_an_h100(monkeypatch):
    """Pretend that torch runs on a GPU of 989.4 TFLOP/s, with a peak of 3 GiB."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**30)


@pytest.mark.usefixtures("on_an_h100")
def test_figures_on_a_gpu():
    config = GPTConfig(vocab_size=100, context_length=8, num_layers=3, num_heads=2, embed_dim=16)
    operations = flops_per_token(config, 5000)
    speed = 4 * 0.25 * 989.4e12 / operations  # of four ranks at a quarter of their rate
    found = Usage(config, 5000, 4, GPU, torch.bfloat16).figures(speed)
    assert found == {
        "tokens_per_second": round(speed, 1),
        "tokens_per_second_per_rank": round(speed / 4, 1),
        "peak_mib": 3072,
        "mfu": 0.25,
    }
    encoder = EncoderConfig(vocab_size=100, context_length=8)
    for other, dtype in ((config, torch.float32), (encoder, torch.bfloat16)):
        assert "mfu" not in Usage(other, 5000, 4, GPU, dtype).figures(speed)


def test_a_gpu_that_the_table_does_not_have_has_no_mfu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary GPU")
    assert usage.full_rate(GPU, torch.bfloat16) is None
    assert usage.full_rate(CPU, torch.bfloat16) is None


def test_figures_of_one_process_on_a_cpu():
    config = GPTConfig(vocab_size=100, context_length=8, num_layers=3, num_heads=2, embed_dim=16)
    found = Usage(config, 5000, 1, CPU, torch.bfloat16).figures(10.04)
    assert found.pop("peak_mib") > 50  # torch alone takes more
    assert found == {"tokens_per_second": 10.0}


@pytest.mark.parametrize(("platform", "units"), [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_memory_of_a_process_is_in_mib(platform, units, monkeypatch):
    """getrusage(2) counts KiB on Linux and bytes on macOS."""
    monkeypatch.setattr(usage.sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=units))
    assert peak_mib(CPU) == 3072


def test_the_progress_line_has_what_is_known(monkeypatch):
    monkeypatch.setattr(metrics, "_LINE_INTERVAL", 0.0)
    screen = io.StringIO()
    shown = ProgressBar(20, stream=screen)
    many = {"tokens_per_second": 9876.5, "tokens_per_second_per_rank": 2469.1}
    shown.advance(10, loss=1.25, **many, peak_mib=3072, mfu=0.4125)
    shown.advance(11, loss=1.0, tokens_per_second=4321.0)
    first, second = screen.getvalue().splitlines()
    assert first == "step 10/20: loss 1.2500, 9,876 tokens/s (2,469 a rank), 3,072 MiB, MFU 41.2 %"
    assert second.startswith("step 11/20: loss 1.0000, 4,321 tokens/s, 0:0")
    shown.close()
