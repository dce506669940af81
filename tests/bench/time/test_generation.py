"""The benchmark of generation: what it times, and the growth it computes."""

import pytest
import torch

from fastattn.bench.time.generation import METHODS, growth, seconds_by_length
from fastattn.testing.gpt import make_gpt

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")


def test_both_ways_generate_the_same_and_read_what_they_say():
    torch.manual_seed(0)
    model = make_gpt(context=40)
    read, texts = {}, {}
    for method, generate in METHODS.items():
        lengths = []
        hook = model.register_forward_pre_hook(
            lambda _, args, lengths=lengths: lengths.append(args[0].shape[1])
        )
        texts[method] = list(generate(model, [1, 2, 3], 30))
        hook.remove()
        read[method] = lengths
    assert texts["cache"] == texts["no-cache"]
    assert read == {"cache": [3] + [1] * 29, "no-cache": list(range(3, 33))}


@pytest.mark.parametrize("method", METHODS)
def test_the_fastest_run_to_each_length_counts(method):
    # Each run reads the clock at its begin and at the lengths.
    ticks = iter([0.0, 4.0, 9.0, 20.0, 100.0, 103.0, 110.0, 119.0])
    model = make_gpt(context=40)
    seconds = seconds_by_length(
        method, model, [1], (4, 9, 20), repeats=2, clock=lambda: next(ticks)
    )
    assert seconds == {4: 3.0, 9: 9.0, 20: 19.0}


def test_growth_is_a_power():
    assert growth({10: 1.0, 20: 2.2, 40: 4.0}) == pytest.approx(1.0)
    assert growth({10: 1.0, 40: 16.0}) == pytest.approx(2.0)
