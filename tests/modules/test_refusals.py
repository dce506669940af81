"""Every row of refusals.txt is refused by name, and the call that it changes is served."""

from typing import Any

import pytest
import torch
from naive_layers import make_layer
from refusals import rows_of, served

from fastattn import (
    CausalGQAttention,
    CrossGQAttention,
    GQAttention,
    KVCache,
    LatentCache,
    MultiheadLatentAttention,
)
from fastattn.models import positions
from fastattn.modules import sparse, weights
from fastattn.rotary import rotary_tables

ROWS = rows_of(__file__)
X, MEMORY, LENGTHS = torch.zeros(2, 5, 32), torch.zeros(2, 9, 24), torch.tensor([9, 5])
CROSS = CrossGQAttention(32, 4, memory_dim=24)
PROJECTED = CROSS.project_memory(MEMORY)
TABLES, ONE = rotary_tables(5, 8), torch.tensor(1.0)
COMPLEX = torch.complex(*TABLES)
ADDITIVE = {"scoring": "additive"}
VALUES = {"relative": positions.RelativeScalar(4, 3, value_dim=8)}


def both_ways(**change: Any) -> Any:
    return GQAttention(32, 4, **change)


def causal(**change: Any) -> Any:
    return CausalGQAttention(**{"embed_dim": 32, "num_heads": 4, **change})


def latent(**change: Any) -> Any:
    sizes = {"kv_latent_dim": 16, "nope_dim": 12, "rope_dim": 8, "v_head_dim": 10}
    return MultiheadLatentAttention(32, 4, **{**sizes, **change})


def cross(x: Any = X, memory: Any = MEMORY, **change: Any) -> Any:
    with torch.no_grad():
        return CROSS(x, memory, **change)


def forward(**change: Any) -> Any:
    with torch.no_grad():
        return make_layer(num_heads=4, rotary="half")(**{"x": X, **change})


def plain(**change: Any) -> Any:
    return make_layer(num_heads=4)(X, **change)


def on_values(**change: Any) -> Any:
    return both_ways(**VALUES)(X, **change)


NAMES = vars(positions) | vars(sparse) | vars(weights) | globals()
NAMES |= {"KVCache": KVCache, "LatentCache": LatentCache}
# The others are called by rows with all that they take.
CHANGED = [
    name
    for name in ROWS
    if name in ("both_ways", "causal", "latent", "cross", "forward", "on_values")
]


@pytest.mark.parametrize("name", ROWS)
def test_refused(name: str) -> None:
    assert served(ROWS[name], NAMES) == []


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_rows_change_is_served(name: str) -> None:
    globals()[name]()
