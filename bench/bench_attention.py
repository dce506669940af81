"""Single calls: forward, backward, padded, masks and decode, each implementation on each case.

`-k decode` takes a family. Of ours the peak memory is held to the least: inputs, outputs and lse.
"""


def test_attention(run_attention, case, implementation):
    run_attention(case, implementation)
