"""The class of docs/integrations/torchtitan.md keeps the interface of torchtitan's attention.

torchtitan brings a logger, data sets and more, and is not installed for tests: stand-ins have what
the page uses of it. Where it is installed, the facts below are compared with it.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import server_stubs
import torch
from oracles import assert_by_oracle
from torch import nn

from fastattn import reference

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "torchtitan.md"
# Of VarlenAttention.forward in torchtitan 0.3.0, torchtitan/models/common/attention.py: parameters,
# the first three of which decoder_sharding.py shards by name, and the fields of the masks.
POSITIONAL = ["q_BLNH", "k_BLNH", "v_BLNH"]
KEYWORDS = {"attention_masks", "scale", "out_transform"}
MASKS = ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "cu_seq_q_host")


class Stand(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)


@pytest.fixture
def page(monkeypatch) -> Iterator[dict[str, Any]]:
    """The names of the page's program, on stand-ins."""
    stands = {
        "torchtitan.config": {
            "derive": lambda config, made: made(window_size=config.window_size),
            "override": lambda **_: lambda function: function,
        },
        "torchtitan.models.common.attention": {"VarlenAttention": Stand},
        "torchtitan.protocols.module": {"Module": nn.Module},
    }
    # In place of those that are installed.
    for name in {*sys.modules, "torchtitan"}:
        if name.partition(".")[0] == "torchtitan":
            monkeypatch.delitem(sys.modules, name, raising=False)
    server_stubs.install(monkeypatch, stands)
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.DOTALL)
    scope: dict[str, Any] = {"__name__": "my_attention"}
    exec(program, scope)
    yield scope


def names_of(forward: Any) -> tuple[list[str], set[str], bool]:
    actual = list(inspect.signature(forward).parameters.values())[1:]
    positional = [x.name for x in actual if x.kind is x.POSITIONAL_OR_KEYWORD]
    keywords = {x.name for x in actual if x.kind is x.KEYWORD_ONLY}
    return positional, keywords, any(x.kind is x.VAR_KEYWORD for x in actual)


def test_the_parameters_are_those_of_torchtitan(page):
    assert names_of(page["FastAttention"].forward) == (POSITIONAL, KEYWORDS, True)


@pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_the_facts_are_those_of_the_torchtitan_that_is_installed():
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

    assert names_of(VarlenAttention.forward) == (POSITIONAL, KEYWORDS, True)
    assert VarlenMetadata._fields == MASKS


@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (-1, -1)])
def test_documents_of_a_batch_attend_among_themselves(page, window):
    config = page["fast_attention"](Stand.Config(window_size=window))
    assert type(config) is page["FastAttention"].Config
    layer = page["FastAttention"](config)
    starts = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    masks = SimpleNamespace(**dict(zip(MASKS, (starts, starts, 6, 6, None), strict=True)))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 6, heads, 16, generator=generator) for heads in (4, 2, 2)]
    documents = torch.repeat_interleave(torch.arange(3), starts.diff())[None]
    causal = window[1] == 0
    options: dict[str, Any] = {"causal": causal, "scale": 0.3, "documents": documents}
    if window[0] >= 0:
        options["window"] = window[0] + 1

    def expected(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x.flatten(0, 1).transpose(0, 1)[None].to(dtype) for x in given)
        o, lse = reference.attention(q, k, v, return_lse=True, **options)
        return tuple(x[0].transpose(0, 1).unflatten(0, (2, 6)) for x in (o, lse))

    call = {"attention_masks": masks, "scale": 0.3, "enable_gqa": True}
    actual = layer(*given, **call, out_transform=lambda *both: both)
    assert torch.equal(layer(*given, **call), actual[0])
    assert_by_oracle(actual, expected)
