"""Programs that the docs start by torchrun, on two ranks as by torchrun."""

import re
import time
from pathlib import Path

import gloo_ranks
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


def sleep_long() -> None:
    time.sleep(1000.0)


def test_ranks_that_hang_are_killed(monkeypatch):
    monkeypatch.setattr(gloo_ranks, "LONGEST", 0.2)
    with pytest.raises(AssertionError, match=r"0 of 2 ranks ended within 0\.2 s"):
        gloo_ranks.run_ranks(f"{__file__}:sleep_long")
