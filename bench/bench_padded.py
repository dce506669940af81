"""Padded batches: half full, and with the lengths of real documents, beside a dense one."""

FAMILY = "padded"


def test_padded(run_attention, case, implementation):
    run_attention(case, implementation)
