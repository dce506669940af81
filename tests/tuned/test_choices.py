"""Findings applied to calls: a backend is skipped, preferred as faster, or findings are ignored."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fastattn
from fastattn import attention, dispatch, explain
from fastattn.functional import call_memo
from fastattn.kernels.launch import tiles
from fastattn.ops import attention_ops
from fastattn.options import Options
from fastattn.testing import assert_matches_reference, make_qkv
from fastattn.tuned import choices, store
from fastattn.tuned.environment import Environment
from fastattn.tuned.store import Store

HERE = Environment("A GPU", 4, "550.1", "2.13.0", "3.7.1", "0" * 16)
DAY = "2026-01-31"


ATOMIC = Options(atomic_dq=True)
WRONG = {"family": "forward", "verdict": "wrong", "reason": "o is 9.1 of its budget in causal"}
FOUND = f"fastattn verify found forward wrong on this device ({DAY}): {WRONG['reason']}"
TORCH = f"fastattn tune found torch faster on this device (triton 0.75 ms, torch 0.5 ms), {DAY}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[Store]:
    """The store of findings about the device of tests, which count here."""
    monkeypatch.setenv("FASTATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FASTATTN_TUNED")
    monkeypatch.delenv("FASTATTN_BACKEND", raising=False)
    monkeypatch.setattr(choices, "environment", lambda device: HERE)
    monkeypatch.setattr(choices, "applies", lambda device: True)
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: False)
    monkeypatch.setattr(store, "_warned", set())
    forget()
    yield Store(HERE)
    forget()


def forget() -> None:
    choices.forget()
    call_memo.forget()


Plant = Callable[..., None]


@pytest.fixture
def plant(here: Store) -> Plant:
    """Stores rows of a kind, for bfloat16 and head dim 64 unless they say otherwise."""
    usual = {
        "verification": {"backend": "triton", "dtype": "bfloat16", "head_dim": 64, "cases": 3},
        "tiles": {"calls": "plain", "element_size": 2, "BLOCK_D": 64, "ms": 0.9, "ms_shipped": 1.0},
        "passes": {"backend": "triton", "dtype": "bfloat16", "head_dim": 64},
        "backends": {
            "direction": "forward",
            "dtype": "bfloat16",
            "head_dim": 64,
            "causal": True,
            "waves": "few",
            "ms": {"triton": 0.75, "torch": 0.5},
        },
    }

    def plant(kind: str, *rows: dict) -> None:
        assert here.put(kind, *({**usual[kind], "date": DAY, **row} for row in rows))
        forget()

    return plant


def inputs(device: str, T: int = 5, **changes: Any) -> tuple[Tensor, ...]:
    usual = {"H_q": 2, "H_k": 1, "D": 64, "dtype": torch.bfloat16}
    return make_qkv(1, T_q=T, device=device, **{**usual, **changes})


def backend(*qkv: Tensor, **options: Any) -> str:
    return explain(*qkv, **options).backend


def test_what_is_wrong_here_is_passed_over(plant: Plant, device: str) -> None:
    qkv = inputs(device)
    assert backend(*qkv) == "triton"
    plant("verification", WRONG)
    told = explain(*qkv)
    assert told.backend == "torch" and told.reasons == {"triton": FOUND}
    assert str(told) == f"backend: torch\n  not triton: {FOUND}"
    assert torch.equal(attention(*qkv), attention(*qkv, backend="torch"))
    forced = explain(*qkv, backend="triton")
    assert forced.backend == "triton" and forced.findings == (FOUND,)
    # Of other dtypes and wider heads nothing is known.
    for other in ({"dtype": torch.float16}, {"D": 72}):
        assert backend(*inputs(device, **other)) == "triton"
    assert backend(*inputs(device, D=40)) == "torch"


def test_only_calls_of_a_wrong_family_are_passed_over(plant: Plant, device: str) -> None:
    qkv = inputs(device, requires_grad=False)
    plant("verification", {**WRONG, "family": "masked"}, {**WRONG, "family": "decode"})
    assert backend(*qkv, causal=True) == "triton"
    assert backend(*qkv, causal=True, window=2) == "torch"
    cache = fastattn.KVCache(1, 1, 8, 64, dtype=torch.bfloat16, device=device)
    cache.append(*qkv[1:])
    assert fastattn.explain_decode(qkv[0], cache).backend == "torch"
    assert choices.why_quarantined("triton", qkv[0], qkv[2], ("merge",)) is None
    assert choices.why_quarantined("triton", qkv[0], qkv[2], ("decode",)) is not None


def test_a_wrong_backward_leaves_the_forward(plant: Plant, device: str) -> None:
    plant("verification", {**WRONG, "family": "backward"})
    for _ in range(2):  # the second is a known call
        assert attention(*inputs(device, requires_grad=False)).grad_fn is None
        o = attention(*inputs(device))
        assert o.grad_fn is not None and o.grad_fn.name() != "_AttentionBackward"
    with torch.no_grad():
        assert backend(*inputs(device)) == "triton"


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("verification", {**WRONG, "family": "one-pass"}, "fastattn verify found one-pass wrong"),
        (
            "passes",
            {"passes": "two", "ms": {"one": 0.5, "two": 0.4}},
            "fastattn tune found two passes faster on this device (one 0.5 ms, two 0.4 ms)",
        ),
    ],
)
def test_one_pass_that_is_wrong_or_slower_leaves_two(
    plant: Plant, device: str, kind: str, row: dict, reason: str
) -> None:
    qkv = inputs(device)
    plant(kind, row)
    told = explain(*qkv, deterministic=False)
    assert told.backend == "triton" and not told.one_pass
    assert told.reasons["one-pass"].startswith(reason)
    assert explain(*qkv, deterministic=False, backend="triton").one_pass
    # What is slower is proven.
    unproven = [choices.why_unproven("triton", *qkv, ATOMIC, learns) for learns in (True, False)]
    assert [x is not None for x in unproven] == [kind == "verification", False]
    grads = [
        torch.autograd.grad(attention(*qkv, deterministic=flag).float().sum(), qkv)
        for flag in (True, False)
    ]
    for two_passes, one_pass in zip(*grads, strict=True):
        assert torch.equal(two_passes, one_pass)


def test_what_is_right_is_said(plant: Plant, device: str) -> None:
    plant("verification", {"family": "forward", "verdict": "right", "share": 0.4567})
    told = explain(*inputs(device, requires_grad=False))
    said = f"fastattn verify found forward right on this device ({DAY}): 3 cases, worst error 0.46 "
    assert told.findings == (f"{said}of its budget",)
    assert str(told) == f"backend: triton\n  {said}of its budget"


def test_a_stored_tile_is_used_and_shown(plant: Plant, device: str) -> None:
    qkv = inputs(device, T=40)
    usual = tiles.lookup("forward", 2, 64)
    tile = {"kernel": "forward", "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4}
    plant("tiles", tile, {"kernel": "hopper_forward", "D": 64, "BLOCK": 64, "STAGES": 2})
    for requested in ("triton", None):
        forget()
        first, second = attention(*qkv, backend=requested), attention(*qkv, backend=requested)
        assert tiles.lookup("forward", 2, 64) == tiles.TileConfig(16, 16) != usual
        assert torch.equal(first, second)
        assert_matches_reference(partial(attention, backend=requested), *qkv)
    said = f"fastattn tune found the tile of forward ({DAY}): 0.9 ms, shipped 1.0 ms"
    assert explain(*qkv).findings == (said,)
    assert explain(*qkv, softcap=3.0).findings == ()


@pytest.mark.parametrize(
    "tile", [{"BLOCK_M": 16}, {"BLOCK_M": 17, "BLOCK_N": 16}, {"kernel": "afterward"}]
)
def test_a_tile_that_is_none_is_ignored_with_one_warning(
    plant: Plant, device: str, tile: dict
) -> None:
    plant("tiles", {"kernel": "forward", **tile})
    usual = tiles.lookup("forward", 2, 64)
    with pytest.warns(UserWarning, match="ignores the tiles that were tuned"):
        assert backend(*inputs(device)) == "triton"
    assert tiles.lookup("forward", 2, 64) == usual


def test_findings_that_cannot_be_looked_for_are_told(
    plant: Plant, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("verification", WRONG)

    def environment(device: torch.device) -> Environment:
        raise OSError("no disk")

    monkeypatch.setattr(choices, "environment", environment)
    with pytest.warns(UserWarning, match="no folder for results: no disk"):
        assert backend(*inputs(device)) == "triton"


def test_what_is_faster_serves(plant: Plant, device: str) -> None:
    qkv = inputs(device, requires_grad=False)
    plant("backends", {"backend": "torch"})
    told = explain(*qkv, causal=True)
    assert told == fastattn.Explanation("torch", {"triton": TORCH}, measured=True)
    assert torch.equal(attention(*qkv, causal=True), attention(*qkv, causal=True, backend="torch"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.warn_if_slow(told, torch.device("cuda"))
    # Nobody timed calls with other options, in other directions, or of torch's mask.
    for options in ({"causal": False}, {"window": 3}, {"softcap": 2.0}, {"query_offset": 3}):
        assert backend(*qkv, **{"causal": True, **options}) == "triton", options
    assert backend(*inputs(device), causal=True) == "triton"
    q, k, v = qkv
    assert backend(q[:, :, :3], k, v, causal=True) == "triton"
    assert backend(*qkv, causal=True, backend="triton") == "triton"


def test_torch_serves_no_gradients_that_have_to_repeat(plant: Plant, device: str) -> None:
    qkv = inputs(device)
    plant("backends", {"backend": "torch", "direction": "training"})
    assert backend(*qkv, causal=True) == "triton"
    assert backend(*qkv, causal=True, deterministic=False) == "torch"
    with torch.no_grad():
        assert backend(*qkv, causal=True, deterministic=False) == "triton"


# Of 2 heads, for 4 multiprocessors.
@pytest.mark.parametrize(
    ("T", "waves"), [(1, "few"), (128, "few"), (129, "some"), (896, "some"), (897, "many")]
)
def test_lengths_count_by_the_waves_of_their_tiles(
    plant: Plant, device: str, T: int, waves: str
) -> None:
    qkv = inputs(device, T=T, requires_grad=False)
    for name in ("few", "some", "many"):
        plant("backends", *({"backend": "triton", "waves": x} for x in ("few", "some", "many")))
        plant("backends", {"backend": "torch", "waves": name})
        assert backend(*qkv, causal=True) == ("torch" if name == waves else "triton")


def test_hopper_or_triton_by_time(
    plant: Plant, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    qkv = inputs(device, T=64, requires_grad=False)
    plant("backends", {"backend": "hopper"}, {"backend": "triton", "causal": False})
    told = explain(*qkv, causal=True)
    assert told._replace(findings=()) == fastattn.Explanation("hopper", {}, measured=True)
    told = explain(*qkv)
    assert (told.backend, told.measured) == ("triton", True)
    assert told.reasons["hopper"].startswith("fastattn tune found triton faster")
    plant("verification", {**WRONG, "backend": "hopper"})
    told = explain(*qkv, causal=True)
    assert (told.backend, told.reasons) == ("triton", {"hopper": FOUND})
    # What is wrong is not taken for being fast.
    plant("verification", {**WRONG, "backend": "triton"})
    assert backend(*qkv) == "torch"
    # Nor does hopper serve what it cannot.
    plant("backends", {"backend": "hopper", "dtype": "float16", "head_dim": 128})
    assert backend(*inputs(device, T=64, D=100, dtype=torch.float16), causal=True) == "triton"


def test_the_interpreter_and_the_cpu_go_by_no_findings(
    plant: Plant, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert not choices.applies(torch.device("cpu"))
    assert choices.applies(torch.device("cuda", 0)) == (device == "cuda")


def test_findings_are_read_once(plant: Plant, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("verification", WRONG)
    reads = []
    read = Store.read
    monkeypatch.setattr(Store, "read", lambda self, kind: reads.append(kind) or read(self, kind))
    for T in range(1, 4):
        assert backend(*inputs(device, T=T)) == "torch"
    assert sorted(reads) == sorted(set(reads))


def test_what_is_found_later_holds_for_known_calls_too(
    here: Store, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv = inputs(device, requires_grad=False)
    served = []
    launch = attention_ops.launch
    counted = lambda *x, **_: served.append(1) or launch(*x, **_)  # noqa: E731
    monkeypatch.setattr(attention_ops, "launch", counted)
    for _ in range(2):
        attention(*qkv)
    row = {"backend": "triton", "dtype": "bfloat16", "head_dim": 64}
    here.put("verification", {**row, **WRONG})
    attention(*qkv)
    choices.forget()
    assert len(served) == 3
    attention(*qkv)
    assert len(served) == 3


def test_environment_leaves_findings_aside_or_names_a_file(
    plant: Plant, here: Store, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv = inputs(device)
    plant("verification", WRONG)
    path = tmp_path / "findings.json"
    here.export(path)
    here.clear("verification")

    def now(setting: str) -> str:
        monkeypatch.setenv("FASTATTN_TUNED", setting)
        forget()
        return backend(*qkv)

    assert (now("0"), now("1"), now(str(path))) == ("triton", "triton", "torch")
    assert here.import_(path) == 1
    assert (now("0"), now("1"), now("")) == ("triton", "torch", "torch")
    for text, reason in (
        (path.read_text().replace("550.1", "550.2"), "it has driver 550.2 instead of 550.1"),
        (path.read_text()[:-9], "it is damaged"),
    ):
        path.write_text(text)
        with pytest.warns(UserWarning, match=f"ignores FASTATTN_TUNED=.*{reason}"):
            assert now(str(path)) == "triton"
    with pytest.warns(UserWarning, match=r"ignores FASTATTN_TUNED=.*No such file"):
        assert now(str(tmp_path / "none.json")) == "triton"


def test_a_file_of_another_environment_is_not_imported(here: Store, tmp_path: Path) -> None:
    there = Store(HERE._replace(gpu="B GPU", triton="3.6.0"))
    there.put("verification", {**WRONG, "backend": "triton", "dtype": "float16", "head_dim": 64})
    there.export(tmp_path / "findings.json")
    message = "has a different environment: gpu B GPU instead of A GPU, triton 3.6.0 instead of"
    with pytest.raises(ValueError, match=message):
        here.import_(tmp_path / "findings.json")
    assert not here.folder.exists()


def test_findings_of_other_software_are_named(plant: Plant, device: str) -> None:
    there = Store(HERE._replace(driver="540.0"))
    row = {"backend": "triton", "dtype": "bfloat16", "head_dim": 64, **WRONG}
    Store(HERE._replace(gpu="B GPU")).put("verification", row)
    assert backend(*inputs(device)) == "triton"
    there.put("verification", row)
    forget()
    with pytest.warns(UserWarning, match=r"for this GPU, but with driver 540.0 instead of 550.1"):
        assert backend(*inputs(device)) == "triton"


def test_what_is_compiled_takes_findings_for_constants(plant: Plant, device: str) -> None:
    """For many lengths at once the calls count as many tiles."""
    plant("backends", {"backend": "torch", "waves": "many"}, {"backend": "triton"})
    plant("verification", {**WRONG, "family": "masked"})
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True) + attention(q, k, v, causal=True, softcap=9.0)

    for T in (5, 9, 200, 700):
        q, k, v = inputs(device, T=T, requires_grad=False)
        expected = attention(q, k, v, causal=True, backend="torch")
        expected = expected + attention(q, k, v, causal=True, softcap=9.0, backend="torch")
        assert torch.equal(run(q, k, v), expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()
