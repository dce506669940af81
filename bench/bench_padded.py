"""Padded batches, half full or with the lengths of real documents, beside a dense batch."""

FAMILY = "padded"


def test_padded(run_attention, case, implementation):
    run_attention(case, implementation)
