"""What is kept between calls, and CUDA graphs."""

import pytest
import torch

from fastattn.capture import may_keep


def test_on_a_cpu_everything_may_be_kept() -> None:
    assert may_keep(torch.device("cpu"))


@pytest.mark.parametrize("capturing", [True, False])
def test_nothing_may_be_kept_while_a_graph_is_captured(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert may_keep(torch.device("cuda")) is not capturing
