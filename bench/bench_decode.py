"""Decoding one token against a key/value cache: GB/s of the cache."""

FAMILY = "decode"


def test_decode(run_attention, case, implementation):
    run_attention(case, implementation)
