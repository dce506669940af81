"""One token against a cache of keys and values: GB/s of the cache that is read."""

FAMILY = "decode"


def test_decode(run_attention, case, implementation):
    run_attention(case, implementation)
