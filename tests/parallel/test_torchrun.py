"""What docs say to start by torchrun, started so: once, on two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"
# The commands take the group of the program: in one process torch makes a second one at times only.
BEFORE = """
import torch.distributed

end, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, int
"""
COMMANDS = """
from fastattn.cli.main import main
from fastattn.parallel.cost.__main__ import main as cost

cost(["--measure", "--gpus", "2", "--tokens", "65536"])
main(["info", "--distributed"])
end()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    program, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.DOTALL)
    path = tmp_path_factory.mktemp("page") / "example.py"
    path.write_text(BEFORE + program + COMMANDS, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Interpreted kernels would take minutes for what a processor does in seconds.
    environment = os.environ | {"FASTATTN_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


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
