"""The pages on accelerate and Lightning (docs/integrations): their programs on two ranks.

Their programs run as they are on two ranks, which are started once for all of them; a step
there is a step of one process. A page whose library is not installed is left out.
"""

import contextlib
import io
import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gloo_ranks import run_ranks
from oracles import assert_by_oracle
from programs_on_ranks import as_by_torchrun
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastattn.models.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

INTEGRATIONS = Path(__file__).parents[2] / "docs" / "integrations"
RANKS = 2


class Case(NamedTuple):
    """A program: its page and library, where its model is made, and the names of what it finds."""

    page: str
    until: str
    model: str
    loss: str
    change: tuple[str, str] = ("", "")  # a text of the program, and what is there instead


LIGHTNING = Case("lightning", "\ntrainer = ", "language.model", "trainer.callback_metrics['loss']")
CASES = {
    "accelerate": Case("accelerate", "\naccelerator = ", "model", "loss"),
    "lightning-heads": LIGHTNING,
    "lightning-rows": LIGHTNING._replace(change=("tensor_parallel = 2", "tensor_parallel = 1")),
}


def program_of(case: Case) -> tuple[str, str]:
    """The program of a page, up to where the model is there and from there on."""
    text = (INTEGRATIONS / f"{case.page}.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.DOTALL)
    assert case.change[0] in program
    before, after = program.replace(*case.change, 1).split(case.until)
    return before, case.until + after


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def run_pages(folder: str, names: list[str]) -> str:
    """Run programs on this rank and return what they print.

    The first rank stores what each began with and what it found.
    """
    printed = io.StringIO()
    os.chdir(folder)
    with as_by_torchrun(), contextlib.redirect_stdout(printed):
        run_programs(Path(folder), names)
    return printed.getvalue()


def run_programs(folder: Path, names: list[str]) -> None:
    for name, case in ((name, CASES[name]) for name in names):
        before, after = program_of(case)
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(before, scope)
        model = eval(case.model, scope)
        results = {"config": model.config, "rows": scope["rows"]}
        results["attention"] = getattr(model.config, "_attn_implementation", "")
        results["start"] = {key: whole(x) for key, x in model.state_dict().items()}
        exec(after, scope)
        results["placed"] = {type(x).__name__ for x in model.parameters()}
        results["loss"] = whole(eval(case.loss, scope))
        results["grads"] = {key: whole(x.grad) for key, x in model.named_parameters()}
        if torch.distributed.get_rank() == 0:
            torch.save(results, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A folder with a file for each program whose library is installed."""
    folder = tmp_path_factory.mktemp("found")
    cases = [name for name, case in CASES.items() if find_spec(case.page)]
    printed = run_ranks(f"{__file__}:run_pages", RANKS, folder=str(folder), names=cases)
    (folder / "stdout").write_text("".join(printed), encoding="utf-8")
    return folder


def gpt_step(results: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    model = GPT(results["config"])
    model.load_state_dict(results["start"])
    rows = results["rows"]
    return model, model.to(dtype)(rows[:, :-1], rows[:, 1:])[1]


def llama_step(results: dict[str, Any], dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """Take a step with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(results["config"], attn_implementation="eager")
    model.load_state_dict(results["start"])
    return model, model.to(dtype)(input_ids=results["rows"], labels=results["rows"]).loss


def needs(case: str, package: str) -> Any:
    reason = f"{package} is not installed: pip install -e .[integrations]"
    return pytest.param(case, marks=pytest.mark.skipif(not find_spec(package), reason=reason))


STEPS: dict[str, Callable[..., tuple[nn.Module, Tensor]]] = {
    "accelerate": llama_step,
    "lightning": gpt_step,
}


@pytest.mark.parametrize("case", [needs(case, CASES[case].page) for case in CASES])
def test_a_step_of_two_ranks_is_that_of_one_process(case: str, stored: Path) -> None:
    package = CASES[case].page
    results = torch.load(stored / f"{case}.pt", weights_only=False)

    def alone(dtype: torch.dtype) -> dict[str, Tensor]:
        model, loss = STEPS[package](results, dtype)
        loss.backward()
        return {"loss": loss} | {name: x.grad for name, x in model.named_parameters()}

    given = {"loss": results["loss"]} | results["grads"]
    assert_by_oracle(given.values(), lambda dtype: [*alone(dtype).values()], names=" ".join(given))
    if package == "accelerate":
        assert results["attention"] == "fastattn"
    else:
        assert results["placed"] == {"DTensor"}
    assert [*given] == [*alone(torch.float32)]


@pytest.mark.parametrize("package", [needs(package, package) for package in STEPS])
def test_the_first_rank_alone_tells_the_loss(package: str, stored: Path) -> None:
    told = re.findall(
        r"^loss (\d\.\d{4}) of ([\dx ]+) ranks$", (stored / "stdout").read_text(), re.M
    )
    expected = {"accelerate": ["2"], "lightning": ["1 x 2", "2 x 1"]}[package]
    assert [ranks for _, ranks in told if ranks in expected] == expected
