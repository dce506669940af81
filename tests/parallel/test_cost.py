"""The model of what methods cost, and its command."""

import pytest

from fastattn.parallel.cost import (
    MODELS,
    Rates,
    Shape,
    cost,
    ideal_seconds,
    main,
    parse_gpus,
    serves,
)

LLAMA = Shape(32768, 32, 8, 128)


def test_one_gpu_is_ideal_but_for_latencies():
    ideal = ideal_seconds(LLAMA, 1, Rates())
    for method in ("gather", "ring", "ulysses", "usp"):
        assert cost(method, LLAMA, 1, Rates()).seconds == pytest.approx(ideal, rel=1e-3)


def test_bytes_are_those_of_the_messages():
    keys = 2 * 8 * 128 * 32768 / 16 * 2  # of one GPU of 16, in bf16
    assert cost("gather", LLAMA, 16, Rates()).sent == keys * 15 * 4  # twice, and fp32 once
    assert cost("ring", LLAMA, 16, Rates()).sent == keys * 15 * 4
    tokens = 128 * 32768 / 4 * 2
    assert cost("ulysses", LLAMA, 4, Rates()).sent == 2 * tokens * (2 * 32 + 2 * 8) * 3 / 4
    held = [cost("ring", Shape(1 << 20, 32, 8, 128), n, Rates()).held for n in (8, 16)]
    assert held[0] == 2 * held[1]


def test_a_ring_that_leaves_the_node_waits_for_its_slowest_link():
    seconds = {n: cost("ring", LLAMA, n, Rates()).seconds for n in (8, 16)}
    assert seconds[16] > seconds[8]
    assert cost("usp", LLAMA, 16, Rates()).seconds < seconds[8]
    faster = Rates()._replace(inter=450e9, inter_latency=5e-6)
    assert cost("ring", LLAMA, 16, faster).seconds < seconds[8]


def test_a_ring_that_ends_early_sends_less():
    keys = 2 * 8 * 128 * 32768 / 16 * 2
    near = cost("ring", LLAMA._replace(hops=2), 16, Rates())
    assert near.sent == keys * 2 * 4
    assert near.seconds < cost("ring", LLAMA, 16, Rates()).seconds
    alone = cost("ring", LLAMA._replace(hops=0), 16, Rates())
    assert alone == (pytest.approx(ideal_seconds(LLAMA, 16, Rates())), 0, 0)


def test_methods_that_cannot_share_out_heads_are_left_out():
    assert serves("ulysses", LLAMA, 32, Rates()) and not serves("ulysses", LLAMA, 64, Rates())
    assert serves("usp", LLAMA, 1024, Rates()) and not serves("usp", LLAMA, 12, Rates())


@pytest.mark.parametrize(("text", "counts"), [("8..64", [8, 16, 32, 64]), ("8,12", [8, 12])])
def test_gpus_are_a_range_or_a_list(text, counts):
    assert parse_gpus(text) == counts


def test_the_command_prints_a_table_and_draws(capsys, tmp_path):
    main(["--gpus", "8..16", "--tokens", "32768", "--plot", str(tmp_path / "cost.png")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("llama-8b, 32768 tokens")
    assert [line.split()[:2] for line in lines[2:]] == [
        [n, method] for n in ("8", "16") for method in ("gather", "ring", "ulysses", "usp")
    ]
    assert (tmp_path / "cost.png").stat().st_size > 1000
    assert set(MODELS) >= {"llama-8b"}
