"""The model of what methods cost, and its command."""

import re
from pathlib import Path

import pytest

from fastattn.parallel.cost import (
    DENSE,
    MODELS,
    Messages,
    Rates,
    Shape,
    choice,
    cost,
    ideal_seconds,
    messages,
    serves,
    step,
    step_messages,
)
from fastattn.parallel.cost.__main__ import main, parse_gpus
from fastattn.parallel.cost.measure import Link, Measured, fit

LLAMA = Shape(32768, 32, 8, 128)


def test_one_gpu_is_ideal_but_for_latencies():
    ideal = ideal_seconds(LLAMA, 1, Rates())
    for method in ("gather", "ring", "ulysses", "usp"):
        assert cost(method, LLAMA, 1, Rates()).seconds == pytest.approx(ideal, rel=1e-3)


def test_bytes_are_those_of_the_messages():
    keys = 2 * 8 * 128 * 32768 / 16 * 2  # of one GPU of 16, in bf16
    assert cost("gather", LLAMA, 16, Rates()).sent == keys * 15 * 4  # twice, and fp32 once
    # Gradients take one step more, to the GPU whose keys they are of.
    assert cost("ring", LLAMA, 16, Rates()).sent == keys * (15 * 2 + 16 * 2)
    numbers = 32768 / 4
    exchanged = 2 * numbers * 128 * (2 * 32 + 2 * 8) * 2 + numbers * 32 * 4  # the last: lse
    assert cost("ulysses", LLAMA, 4, Rates()).sent == exchanged * 3 / 4
    usp = messages("usp", LLAMA, 16, 8)
    assert usp["heads"].calls == 9 and usp["sequence"] == Messages(2 * 4, keys * (2 + 2 * 2))
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
    assert near.sent == keys * (2 * 2 + 3 * 2)
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


def test_parameters_are_those_of_llama():
    """As published: 8.03 and 70.6 billions. Of a step of one rank of 2, half of each is sent."""
    for name, count in (("llama-8b", 8030261248), ("llama-70b", 70553706496)):
        model = DENSE[name]
        assert step(model, (1, 1, 1, 1), 1, 8192, Rates()).states == 16 * count
        assert step_messages(model, (2, 1, 1, 1), 1, 8192)["dp"].sent == 4 * count


def test_gradients_are_summed_over_replicas_once_a_step():
    one, three = (step_messages(DENSE["llama-8b"], (2, 2, 1, 2), 1, 8192, passes=n) for n in (1, 3))
    assert one["dp"] == three["dp"]
    for name in ("fsdp", "tp"):
        assert three[name] == Messages(3 * one[name].calls, 3 * one[name].sent)


def test_ranks_of_context_share_parameters():
    model = DENSE["llama-8b"]
    both = step_messages(model, (1, 2, 4, 1), 1, 32768)
    assert both["fsdp"] == step_messages(model, (1, 8, 1, 1), 1, 32768)["fsdp"]
    of_layer = messages(choice(LLAMA, 4, Rates()), LLAMA, 4)
    assert both["cp"].sent == 32 * sum(x.sent for x in of_layer.values()) > 0
    assert (
        step_messages(model, (2, 1, 4, 1), 1, 32768)["dp"]
        == (step_messages(model, (8, 1, 1, 1), 1, 32768)["dp"])
    )


def test_a_step_alone_is_compute_and_more_ranks_wait_for_messages():
    model = DENSE["llama-8b"]
    alone = step(model, (1, 1, 1, 1), 2, 8192, Rates())
    # The embedding is looked up, not multiplied by.
    products = 6 * (8030261248 - 128256 * 4096 - 65 * 4096) * 2 * 8192 / 500e12
    attended = 32 * ideal_seconds(LLAMA._replace(T=8192, B=2), 1, Rates())
    assert alone.seconds == alone.ideal == pytest.approx(products + attended)
    for split in ((8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (2, 2, 2, 2)):
        rows = 2 * split[2] * split[3]
        found = step(model, split, rows, 8192, Rates())
        assert found.ideal == pytest.approx(alone.ideal)
        assert found.seconds > alone.seconds
    # A dimension that leaves the node waits for its links.
    faster = Rates()._replace(inter=450e9, inter_latency=5e-6)
    for split, leaves in (((2, 1, 1, 8), True), ((2, 1, 1, 4), False)):
        near, far = (step(model, split, 2 * split[3], 8192, r).seconds for r in (faster, Rates()))
        assert (far > near) is leaves


def test_the_choice_is_the_fastest_that_can_be_had():
    assert choice(LLAMA, 64, Rates()) == min(
        ("gather", "ring", "usp"), key=lambda name: cost(name, LLAMA, 64, Rates()).seconds
    )


def test_a_line_through_messages_is_their_latency_and_bandwidth():
    samples = [(n, 3e-5 + n / 2e9) for n in (1 << 10, 1 << 16, 1 << 22)]
    latency, bandwidth = fit(samples)
    assert latency == pytest.approx(3e-5) and bandwidth == pytest.approx(2e9)
    assert fit([(1 << 10, 1e-3), (1 << 20, 1e-4)]).latency > 0  # noise: larger is faster


def test_what_was_not_measured_is_said_to_be_assumed():
    measured = Measured((1, 4), {"intra": Link(3e-5, 2e9)}, Rates(flops=5e9))
    assert list(measured.lines()) == [
        "ranks: 1 x 4 (nodes x ranks of a node)",
        "intra: 30.0 us, 2 GB/s, measured",
        "inter: 15.0 us, 50 GB/s, assumed",
        "attention: 0.005 TFLOP/s a rank, measured",
    ]


def test_measuring_wants_ranks(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--measure"])
    assert "--measure: there are no ranks: torchrun" in capsys.readouterr().err


def test_the_plan_of_the_page_is_what_the_model_says():
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \| (\d+) \| (\d+)% \|", page, re.M)
    assert [int(row[1]) for row in rows] == 2 * [8, 16, 32, 64, 128, 256, 512, 1024]
    for T, gpus, method, ms, ideal in rows:
        shape = LLAMA._replace(T=int(T))
        assert method == choice(shape, int(gpus), Rates())
        seconds = cost(method, shape, int(gpus), Rates()).seconds
        assert f"{seconds * 32 * 1e3:.0f}" == ms
        assert f"{ideal_seconds(shape, int(gpus), Rates()) / seconds:.0%}" == f"{ideal}%"


def test_the_steps_of_the_page_are_what_the_model_says():
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text(encoding="utf-8")
    _, _, part = page.partition("### A whole training step")
    lines = re.findall(r"^\| (\d.*) \|$", part.partition("\n## ")[0], re.M)
    rows = [line.split(" | ") for line in lines]
    assert [int(row[0]) for row in rows] == [8, 16, 32, 64, 128, 256, 512, 1024] + 4 * [64, 1024]
    model = DENSE["llama-8b"]
    for *sizes, ms, ideal, sent, calls, states in rows:
        gpus, dp, fsdp, cp, tp, T, local = map(int, sizes)
        assert gpus == dp * fsdp * cp * tp and T * local * dp * fsdp == 8192 * gpus
        found = step(model, (dp, fsdp, cp, tp), local, T, Rates())
        every = step_messages(model, (dp, fsdp, cp, tp), local, T).values()
        assert f"{found.seconds * 1e3:.0f}" == ms
        assert f"{found.ideal / found.seconds:.0%}" == ideal
        assert f"{sum(x.sent for x in every) / 1e9:.1f}" == sent
        assert sum(x.calls for x in every) == int(calls)
        assert f"{found.states / 1e9:.1f}" == states


def test_the_command_prints_steps_of_the_splits_that_can_be_had(capsys):
    main(["--gpus", "4,6,8", "--tokens", "8192", "--fsdp", "2", "--tensor-parallel", "4"])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("llama-8b, 8192 tokens a row, 1 rows")
    names = ["GPUs", "dp", "fsdp", "cp", "tp"]
    assert head.split()[:5] == names and [x.split()[:5] for x in lines] == [["8", *"1214"]]
    main(["--gpus", "8,16", "--tokens", "8192", "--fsdp", "auto", "--context-parallel", "2"])
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[:5] for line in lines] == [["8", *"1421"], ["16", *"1821"]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--fsdp 3", "--gpus must hold a number that the degrees divide"),
        ("--fsdp all", "--fsdp must be a number or auto, got all"),
        ("--tensor-parallel 3", "--tensor-parallel must divide heads and features of the model"),
        ("--context-parallel -2", "--context-parallel and --rows must be positive"),
        ("--rows -1", "--context-parallel and --rows must be positive"),
        ("--fsdp 2 --model gpt-oss-120b", "--model must be one of llama-8b, llama-70b for a step"),
        ("--fsdp 2 --plot x.png", "--plot draws attention alone"),
    ],
)
def test_a_step_that_cannot_be_is_refused(given, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--gpus", "8", *given.split()])
    assert said in capsys.readouterr().err
