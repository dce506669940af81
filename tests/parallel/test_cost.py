"""The model of what methods cost."""

import pytest

from fastattn.parallel.cost import Messages, Rates, Shape, choice, cost, messages, serves

LLAMA = Shape(32768, 32, 8, 128)


def test_bytes_are_those_of_the_messages():
    keys = 2 * 8 * 128 * 32768 / 16 * 2  # of one GPU of 16, in bf16
    assert cost("gather", LLAMA, 16, Rates()).sent == keys * 15 * 4  # twice, and fp32 once
    assert cost("ring", LLAMA, 16, Rates()).sent == keys * (15 * 2 + 15 * 2)
    numbers = 32768 / 4
    exchanged = 2 * numbers * 128 * (2 * 32 + 2 * 8) * 2 + numbers * 32 * 4  # the last: lse
    assert cost("ulysses", LLAMA, 4, Rates()).sent == exchanged * 3 / 4
    usp = messages("usp", LLAMA, 16, 8)
    assert usp["heads"].calls == 9 and usp["sequence"] == Messages(2 * 3, keys * (2 + 2))
    held = [cost("ring", Shape(1 << 20, 32, 8, 128), n, Rates()).held for n in (8, 16)]
    assert held[0] == 2 * held[1]


def test_a_ring_that_leaves_the_node_waits_for_its_slowest_link():
    seconds = {n: cost("ring", LLAMA, n, Rates()).seconds for n in (8, 16)}
    assert seconds[16] > seconds[8]
    assert cost("usp", LLAMA, 16, Rates()).seconds < seconds[8]
    assert choice(LLAMA, 16, Rates(), ("ring", "usp")) == "usp"
    faster = Rates()._replace(inter=450e9, inter_latency=5e-6)
    assert cost("ring", LLAMA, 16, faster).seconds < seconds[8]


def test_the_busiest_rank_is_waited_for():
    for method in ("gather", "ring"):
        even, uneven = (
            cost(method, LLAMA._replace(imbalance=x), 4, Rates()).seconds for x in (1, 2)
        )
        assert uneven == pytest.approx(2 * even, rel=0.05)


def test_methods_that_cannot_share_out_heads_are_left_out():
    assert serves("ulysses", LLAMA, 32, Rates()) and not serves("ulysses", LLAMA, 64, Rates())
    assert serves("usp", LLAMA, 1024, Rates()) and not serves("usp", LLAMA, 12, Rates())
