"""Choice of a backend, what explain() says, and the one warning about slow calls."""

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fastattn
from fastattn import dispatch
from fastattn.functional import call_memo
from fastattn.ops import call
from fastattn.options import Options
from fastattn.testing import make_qkv


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTATTN_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: False)


REASONS = [
    ({"dtype": torch.float64}, "q is float64; kernels exist for float16, bfloat16 and float32"),
    ({"D": 264}, "head dim 264 is larger than 256, the limit for float32"),
    ({"D": 16, "D_v": 300}, "head dim 300 is larger than 256, the limit for float32"),
    ({"D": 520, "dtype": torch.bfloat16}, "head dim 520 is larger than 512"),
    ({"device": "meta"}, "q is on meta; kernels exist for CUDA and ROCm devices"),
]


@pytest.mark.parametrize(("arguments", "reason"), REASONS)
def test_reason_for_torch(arguments, reason: str, device: str) -> None:
    q, k, v = make_qkv(**{"device": device, **arguments})
    explanation = fastattn.explain(q, k, v)
    assert explanation == fastattn.Explanation("torch", {"triton": reason})
    assert str(explanation) == f"backend: torch\n  not triton: {reason}"
    with pytest.raises(ValueError, match=f'backend "triton" cannot serve this call: {reason}'):
        fastattn.attention(q, k, v, backend="triton")


def test_reason_on_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "interpreting", lambda: False)
    explanation = fastattn.explain(*make_qkv())
    assert explanation.backend == "torch"
    assert explanation.reasons["triton"].startswith("q is on the CPU and TRITON_INTERPRET=1")


def test_reason_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "TRITON_INSTALLED", False)
    assert not call.interpreting()
    assert fastattn.explain(*make_qkv()).reasons == {"triton": "triton is not installed"}


def test_names_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import fastattn as f; from fastattn import *"
    code += "; assert not any(hasattr(f, x) or x in f.__all__ for x in ('tune', 'verify'))"
    # Python functions are translated all the same.
    code += "; import torch; ids = torch.arange(6)[None] // 4; x = torch.randn(1, 1, 6, 8)"
    code += "; same = BlockMask(lambda b, h, i, j: ids[b, i] == ids[b, j])"
    code += "; o, other = attention(x, x, x, mask_mod=same), attention(x, x, x, documents=ids)"
    code += "; torch.testing.assert_close(o, other)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kernels_serve_where_they_run_and_an_argument_forces_a_backend(device: str) -> None:
    q, k, v = make_qkv(device=device)
    served = fastattn.explain(q, k, v)
    assert served == fastattn.Explanation("triton", {}) and str(served) == "backend: triton"
    explanation = fastattn.explain(q, k, v, backend="torch")
    asked = {"triton": 'backend "torch" was requested'}
    assert explanation == fastattn.Explanation("torch", asked, forced=True)
    forced = fastattn.explain(q, k, v, backend="triton")
    assert forced == fastattn.Explanation("triton", {}, forced=True)


def test_environment_forces_a_backend(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(device=device)
    monkeypatch.setenv("FASTATTN_BACKEND", "torch")
    assert fastattn.explain(q, k, v).backend == "torch"
    assert fastattn.explain(q, k, v, backend="triton").backend == "triton"
    for automatic in ("auto", ""):
        monkeypatch.setenv("FASTATTN_BACKEND", automatic)
        assert fastattn.explain(q, k, v).backend == "triton"
    monkeypatch.setenv("FASTATTN_BACKEND", "fast")
    with pytest.raises(
        ValueError, match="FASTATTN_BACKEND must be one of auto, hopper, triton, torch"
    ):
        fastattn.attention(q, k, v)


def test_slow_call_on_a_gpu_warns_once_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())
    gpu = torch.device("cuda")
    slow = fastattn.Explanation("torch", {"triton": "head dim 264 is larger than 256"})
    with pytest.warns(UserWarning, match="falls back to torch: head dim 264"):
        dispatch.warn_if_slow(slow, gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.warn_if_slow(slow, gpu)
        dispatch.warn_if_slow(fastattn.Explanation("triton", {}), gpu)
        asked = fastattn.Explanation("torch", {"triton": "requested"}, forced=True)
        dispatch.warn_if_slow(asked, gpu)
        dispatch.warn_if_slow(fastattn.Explanation("torch", {"triton": "CPU"}), torch.device("cpu"))
    other = fastattn.Explanation("torch", {"triton": "q is float64"})
    with pytest.warns(UserWarning, match="q is float64"):
        dispatch.warn_if_slow(other, gpu)


@pytest.mark.parametrize("T_q", [63, 64])
def test_few_queries_are_left_to_the_portable_kernels(
    T_q: int, device: str, hopper_ran: None
) -> None:
    inputs = make_qkv(D=64, T_q=T_q, T_k=8, dtype=torch.bfloat16, device=device)
    actual = fastattn.explain(*inputs)._replace(findings=())
    reason = {"hopper": "63 queries fill less than half of a tile of 128"}
    assert actual == fastattn.Explanation(*(("triton", reason) if T_q == 63 else ("hopper", {})))
    assert fastattn.explain(*inputs, backend="hopper").backend == "hopper"


def test_hopper_needs_its_gpu(device: str) -> None:
    inputs = make_qkv(D=64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"written for GPUs of compute capability 9\.0"):
        fastattn.attention(*inputs, backend="hopper")
    assert "hopper" not in fastattn.explain(*inputs).reasons


def test_hopper_is_no_backend_of_other_functions(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    q, k, _ = make_qkv(D=64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="there is no such kernel"):
        fastattn.attention_weights(q, k, backend="hopper")


def test_a_log_has_a_line_for_each_kind_of_call(monkeypatch, capsys, device: str) -> None:
    q, k, v = make_qkv(1, 2, 1, 4, 4, 16, device=device)
    fastattn.attention(q, k, v)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(dispatch.LOG, "1")
    dispatch.write_once.cache_clear()
    for _ in range(2):
        fastattn.attention(q, k, v, softcap=3.0)
        fastattn.attention(q, k, v, softcap=3.0, backend="torch")
    by_kernel, by_torch = capsys.readouterr().err.splitlines()
    call = "fastattn: attention q[1, 2, 4, 16] k[1, 1, 4, 16] v[1, 1, 4, 16] float32 softcap"
    assert by_kernel.startswith(f"{call} -> triton; tile ")
    assert by_torch == f'{call} -> torch; not triton: backend "torch" was requested'


@pytest.mark.parametrize(
    ("hip", "major", "served"),
    [(None, 7, False), (None, 8, True), (None, 10, True), ("7.0", 10, False), ("7.0", 11, True)],
)
def test_gpus_whose_tiles_all_spill_are_left_to_torch(
    hip: str | None, major: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 64, device="cuda", dtype=torch.float16)
    told = dispatch.why_no_kernel({"q": q})
    reason = "tiles spill registers below compute capability 8.0 and on gfx10; none was tried"
    assert told == (None if served else reason)


@pytest.mark.parametrize(
    ("arch", "D", "dtype", "options", "reason"),
    [
        (11, 128, torch.bfloat16, {"causal": True, "softcap": 9.0}, None),
        (11, 64, torch.float32, {}, "tiles for float32, and those for relative_keys, spill"),
        (12, 256, torch.float16, {}, "head dim 256 is larger than 128, the limit on RDNA"),
        (12, 64, torch.float16, {"relative_keys": (4, 17, 64)}, "tiles for float32, and those"),
        (9, 256, torch.float16, {}, None),
        (9, 64, torch.float32, {"relative_keys": (4, 17, 64)}, None),
    ],
)
def test_rdna_gets_the_kernels_that_do_not_spill(
    arch: int, D: int, dtype: torch.dtype, options: dict[str, Any], reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """And torch all others, with the reason; CDNA, of major version 9, keeps its own."""
    properties = SimpleNamespace(major=arch, minor=0, multi_processor_count=96)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with FakeTensorMode():
        q, k, v = torch.empty(3, 1, 4, 8, D, device="cuda", dtype=dtype)
        if "relative_keys" in options:
            shape = options["relative_keys"]
            options = {"relative_keys": torch.empty(shape, device="cuda", dtype=dtype)}
    told = dispatch.why_not_triton(q, k, v, Options(**options))
    assert (told is None) if reason is None else str(told).startswith(reason)
    if arch == 11 and reason is None:
        told = dispatch.choose(q, k, v, Options(), family="statistics").reasons["triton"]
        assert told.endswith("does not compile its kernels for RDNA")


def test_a_layout_that_is_probably_wrong_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads of [B, T, H, D] are fewer keys than queries, and give the right shape."""
    monkeypatch.setattr(dispatch, "_warned", set())
    q, k = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 2, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention(q.transpose(1, 2), *[k.transpose(1, 2)] * 2, causal=True)
        fastattn.attention(q, k, k, causal=True, query_offset=0)
        fastattn.attention(q, k, k)
    calls = (
        lambda q: fastattn.attention(q, k, k, causal=True),
        lambda q: fastattn.attention_statistics(q, k, causal=True),
        lambda q: fastattn.dot_product_attention(q, k, k, causal=True),
        lambda q: fastattn.explain(q, k, k, causal=True),
    )
    for by_layout in calls:
        dispatch._warned.clear()
        call_memo.forget()
        with pytest.warns(UserWarning, match=r"If the tensors are \[B, T, H, D\]") as seen:
            for T in (8, 4):
                by_layout(q[:, :, :T])
        assert [x.filename for x in seen] == [__file__]
