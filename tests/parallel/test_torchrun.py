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


def test_info_says_what_ranks_there_are(printed):
    assert re.fullmatch(
        r"torch\.distributed: (\w+, )*gloo(, \w+)*; 2 ranks, 2 on a node", printed[1]
    )
