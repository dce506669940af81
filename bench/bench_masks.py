"""Every kind of mask, at the same sizes."""

FAMILY = "masks"


def test_masks(run_attention, case, implementation):
    run_attention(case, implementation)
