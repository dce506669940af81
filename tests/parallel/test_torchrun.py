"""Programs that the docs start by torchrun, on two ranks as by torchrun."""

import re
from pathlib import Path

import pytest
from programs_on_ranks import run_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
COMMANDS = """
from fastattn.cli.main import main

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


def test_info_says_what_ranks_there_are_and_what_the_model_would_choose(printed):
    assert re.fullmatch(r"torch\.distributed: gloo, of (\w+, )*gloo(, \w+)*", printed[1])
    assert printed[2] == "ranks: 1 x 2 (nodes x ranks of a node)"
    assert re.fullmatch(r"intra: \d+\.\d us, [\d.e+-]+ GB/s, measured", printed[3])
    assert printed[4] == "inter: 15.0 us, 50 GB/s, assumed"
    assert re.fullmatch(r"attention: [\d.e-]+ TFLOP/s a rank, measured", printed[5])
    (chosen,) = (line for line in printed if line.startswith("llama-8b on 2 ranks, modelled: "))
    assert re.search(r": (\w+) for 8192 tokens, (\w+) for 131072 tokens, (\w+) for", chosen)
