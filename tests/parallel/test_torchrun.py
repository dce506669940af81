"""What docs say to start by torchrun, on two ranks as by torchrun."""

import re
from pathlib import Path

import pytest
from programs_on_ranks import run_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
COMMANDS = """
from fastattn.cli.main import main
from fastattn.parallel.cost.__main__ import main as cost

cost(["--measure", "--gpus", "2", "--tokens", "65536"])
main(["info", "--distributed"])
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    program, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.DOTALL)
    path = tmp_path_factory.mktemp("page") / "example.py"
    path.write_text(program + COMMANDS, encoding="utf-8")
    return run_on_ranks(str(path)).splitlines()


def test_the_program_of_the_page_runs(printed):
    assert re.fullmatch(r"\w+ imbalance 1\.\d\d", printed[0])


def test_the_rates_are_measured_and_the_table_goes_by_them(printed):
    assert printed[1] == "ranks: 1 x 2 (nodes x ranks of a node)"
    assert re.fullmatch(r"intra: \d+\.\d us, [\d.e+-]+ GB/s, measured", printed[2])
    assert printed[3] == "inter: 15.0 us, 50 GB/s, assumed"
    assert re.fullmatch(r"attention: [\d.e-]+ TFLOP/s a rank, measured", printed[4])
    assert printed[5].startswith("llama-8b, 65536 tokens, causal")
    assert [line.split()[:2] for line in printed[7:11]] == [
        ["2", method] for method in ("gather", "ring", "ulysses", "usp")
    ]


def test_info_says_what_ranks_there_are_and_what_the_model_would_choose(printed):
    assert re.fullmatch(r"torch\.distributed: gloo, of (\w+, )*gloo(, \w+)*", printed[11])
    assert printed[12] == printed[1] and printed[13].endswith("GB/s, measured")
    (chosen,) = (line for line in printed if line.startswith("llama-8b on 2 ranks, by the model"))
    assert re.search(r": (\w+) for 8192 tokens, (\w+) for 131072 tokens, (\w+) for", chosen)
