"""Backward passes, alone and with their forward."""

FAMILY = "backward"


def test_backward(run_attention, case, implementation):
    run_attention(case, implementation)
