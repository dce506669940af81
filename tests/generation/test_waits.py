"""How often the host waits for the device while a text is generated: once a step.

Where a row starts a new window beside fuller ones, the caches ask for their lengths besides.
"""

import pytest
from small_gpt import make_gpt
from torch.overrides import TorchFunctionMode

from fastattn.generation import Sampling
from fastattn.generation.generate import Batch
from fastattn.generation.request import make_request

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

SETTINGS = [Sampling(greedy=True), Sampling(top_k=5), Sampling(repetition_penalty=1.3)]
WAITS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy"}


class Reads(TorchFunctionMode):
    """Names of the calls that bring a tensor's values to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in WAITS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Values on a CPU are looked at, which costs no wait."""
    monkeypatch.setattr("fastattn.tracing.host_knows", lambda x: False)


def test_a_batch_reads_from_the_device_once_a_step():
    model, prompts = make_gpt(), ([1, 2, 3], [4], [5, 6])
    requests = [
        make_request(model, prompt, count, sampling=setting, seed=1)
        for prompt, count, setting in zip(prompts, (9, 2, 10), SETTINGS, strict=True)
    ]
    batch, steps = Batch(model, requests), 0
    with Reads() as reads:
        while batch.running:
            batch.step()
            steps += 1
            assert reads.names == ["tolist"] * steps
    assert steps == 10
