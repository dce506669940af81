"""Forward passes: FlashAttention-3's sweep and grouped-query heads."""

FAMILY = "forward"


def test_forward(run_attention, case, implementation):
    run_attention(case, implementation)
