"""Single calls of each implementation: forward, backward, padded, masks and decode.

`-k decode` selects a family. Checks that our peak memory is close to inputs, outputs and lse.
"""


def test_attention(run_attention, case, implementation):
    run_attention(case, implementation)
