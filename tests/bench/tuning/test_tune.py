"""Around a tuning run: its effort, the end of one that hangs, a machine without a GPU."""

import pytest
import torch

from fastattn.bench.tuning import tune


def test_effort_grows_with_the_time():
    assert tune.effort_for(60).target_ms < tune.effort_for(3600).target_ms


def test_a_step_that_hangs_ends_the_process():
    """Here a stand-in for its end; a kernel that waits for ever would not return."""
    ended, kept = [], []
    done = tune.threading.Event()

    def end(why):
        ended.append(why)
        done.set()

    shown = []
    with tune.Watchdog(shown.append, kept.append, stall_seconds=0.01, end=end) as watched:
        done.wait()
    said = "nothing happened for 0 s, a kernel may hang"
    assert ended == [f": {said}"] and not kept
    watched(tune.Progress(1, 2, 3.0, "a step", "text", False))
    assert shown[0].step == "a step"
    done.clear()
    another = tune.Watchdog(shown.append, kept.append, stall_seconds=0.01, end=end)
    another.trying("a choice", "a tile")
    with another:
        assert done.wait(60)
    assert ended[1] == f": a tile: {said}; the next run passes over it"
    assert kept == [{"choice": "a choice", "candidate": "a tile", "reason": said}]


def test_without_a_gpu_nothing_is_tuned():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="no GPU: torch sees no CUDA device"):
        tune.tune(seconds=1)
