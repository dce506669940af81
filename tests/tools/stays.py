"""The way of a call: functions, files and layers from the public name to the launch.

A stay is a run of calls inside one file; a climb, a stay in a layer above the one before. Frames
are those from the public name to the launch of a kernel.

    TRITON_INTERPRET=1 python tests/tools/stays.py
"""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import tomllib
import torch

import fastattn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from layout_rules import find_modules  # type: ignore[import-not-found]

_ROOT = Path(__file__).resolve().parents[2]
_MODULES = find_modules(_ROOT)
_CONTRACTS = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
_LAYERS = {
    name.strip(): layer
    for layer, names in enumerate(_CONTRACTS["contracts"][0]["layers"])
    for name in names.split(":")
}
_NAMES = {str(path.resolve()): name for name, path in _MODULES.items()}
_LAUNCH = ("fastattn.kernels.launch.launches", "__call__")
_INTERPRETER = "fastattn.kernels.launch.emulation"


class Way(NamedTuple):
    """Counts of one call."""

    calls: int
    stays: int
    climbs: int
    files: int
    frames: int  # 0: no kernel was launched


def way(call: Callable[[], object]) -> Way:
    """Counts of this call, up to the kernel that it launches first."""
    stack: list[str | None] = []
    visits: list[str] = []
    counts = {"calls": 0, "frames": 0, "interpreted": 0}

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        name = _NAMES.get(frame.f_code.co_filename)
        # An interpreted kernel is Python too.
        if name == _INTERPRETER:
            counts["interpreted"] += 1 if event == "call" else -1
        if counts["interpreted"] or name == _INTERPRETER:
            return
        if event == "call":
            stack.append(name)
            counts["calls"] += name is not None
            if (name, frame.f_code.co_name) == _LAUNCH and not counts["frames"]:
                counts["frames"] = len([x for x in stack if x])
        elif stack:
            stack.pop()
            name = next((x for x in reversed(stack) if x), None)
        if name and visits[-1:] != [name]:
            visits.append(name)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    layers = [_LAYERS.get(name.split(".")[1], 0) for name in visits if "." in name]
    climbs = sum(after < before for before, after in pairwise(layers))  # the top is 0
    return Way(counts["calls"], len(visits), climbs, len(set(visits)), counts["frames"])


def calls(backend: str) -> dict[str, Callable[[], object]]:
    """A call of each kind by this backend."""
    q, k, v = torch.randn(1, 2, 16, 16), torch.randn(1, 1, 16, 16), torch.randn(1, 1, 16, 16)
    q_rows, k_rows, v_rows = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    cache = fastattn.PagedKVCache(num_pages=8, page_size=4, num_kv_heads=1, head_dim=16)
    row = cache.allocate()
    cache.append([row], k, v)
    layer = fastattn.CausalGQAttention(64, num_heads=4, num_kv_heads=2, backend=backend)
    x, leaf = torch.randn(2, 16, 64), q.clone().requires_grad_()
    graphs: list[torch.Tensor] = []

    def forward() -> None:
        graphs.append(fastattn.attention(leaf, k, v, causal=True, softcap=9.0, backend=backend))

    def backward() -> None:
        torch.autograd.backward(graphs.pop().sum())

    def unrecorded(call: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(call)

    how: dict[str, Any] = {"causal": True, "backend": backend}
    return {
        "attention": unrecorded(lambda: fastattn.attention(q, k, v, **how)),
        "attention_varlen": unrecorded(
            lambda: fastattn.attention_varlen(q_rows, k_rows, v_rows, offsets, **how)
        ),
        "attention_paged": unrecorded(
            lambda: fastattn.attention_paged(q_rows[:1], cache, offsets.clamp(max=1), **how)
        ),
        "CausalGQAttention": unrecorded(lambda: layer(x)),
        "attention, recorded": forward,
        "its backward": backward,
    }


def main() -> None:
    write = sys.stdout.write
    write(f"{'call':22}{'backend':9}{'':6}" + "".join(f"{x:>8}" for x in Way._fields) + "\n")
    for backend in ("triton", "torch"):
        fastattn.attention(*(torch.ones(1, 1, 2, 16) for _ in range(3)), backend=backend)
        every = calls(backend)
        first = {name: way(call) for name, call in every.items()}
        again = {name: way(call) for name, call in every.items()}
        for name in every:
            for kind, counts in (("cold", first[name]), ("warm", again[name])):
                write(f"{name:22}{backend:9}{kind:6}" + "".join(f"{x:8}" for x in counts) + "\n")


if __name__ == "__main__":
    main()
