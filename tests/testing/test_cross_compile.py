"""Cross compilation: every target compiles, and its facts are those of the compilers."""

import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from machine_code import loops
from nightly import gate_cases

from fastattn.testing.compiling.compile_pool import CompilePool, CrossCompileError
from fastattn.testing.compiling.cross_compile import (
    TARGETS,
    compiling_for,
    count_compilations,
)
from fastattn.testing.compiling.kept import kept

HERE = str(Path(__file__).resolve())


@triton.jit
def matmul_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    K,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TWICE: tl.constexpr,
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
        if TWICE:
            ab = tl.dot(a, b).to(a.dtype)
            acc = tl.dot(ab, b, acc)
        else:
            acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


@triton.jit
def bad_assembly_kernel(out_ptr):
    x = tl.inline_asm_elementwise(
        "no.such.instruction $0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out_ptr, x)


def launch_matmul(
    M: int = 64,
    N: int = 64,
    K: int = 256,
    BLOCK_K: int = 64,
    twice: bool = False,
    device: str = "meta",
    **options: int,
) -> None:
    a = torch.empty(M, K, dtype=torch.bfloat16, device=device)
    b = torch.empty(K, N, dtype=torch.bfloat16, device=device)
    c = torch.empty(M, N, device=device)
    matmul_kernel[(1,)](a, b, c, K, M, N, BLOCK_K, twice, **options)


def count_new_lengths() -> list[int]:
    """And look for the driver of this launch inside of another's."""
    matmul_kernel.device_caches.clear()
    with compiling_for("gfx942"):
        launch_matmul(N=16)
    lengths = (256, 512, 512, 509)
    return [count_compilations(lambda K=K: launch_matmul(N=16, K=K)) for K in lengths]


def launch_bad_assembly() -> None:
    bad_assembly_kernel[(1,)](torch.empty(1, dtype=torch.int32))


def raise_unpicklable() -> None:
    class LocalError(Exception):
        pass

    os.write(2, b"as LLVM prints")
    os.write(1, b"." * 10_000)
    raise LocalError("cannot travel")


def die() -> None:
    os._exit(3)


MATRIX_OPS = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma", "gfx950": "mfma"}
OFTEN = ("sm_90", "gfx942")


@pytest.mark.parametrize(
    "target", gate_cases(OFTEN, [target for target in TARGETS if target not in OFTEN])
)
def test_a_matmul_compiles_for_every_target(compile_pool: CompilePool, target: str) -> None:
    (facts,) = compile_pool.facts(f"{HERE}:launch_matmul", target, num_warps=4, num_stages=2)
    assert (facts.name, facts.target) == ("matmul_kernel", target)
    assert (facts.num_warps, facts.num_stages) == (4, 2)
    assert facts.mma == {MATRIX_OPS.get(target, "mma.sync")}
    assert facts.fits_shared_memory and facts.shared_bytes > 0
    assert 0 < facts.registers <= 255
    assert not facts.spills and not facts.warnings
    (loop,) = loops(facts)
    products = loop.count("HMMA", "HGMMA", "UTCHMMA")
    if not target.startswith("sm_"):
        products = sum(n for opcode, n in loop.opcodes.items() if opcode.startswith("v_mfma"))
    assert 0 < products < loop.total


@pytest.mark.parametrize(("target", "M"), gate_cases([("sm_90", 128)], [("gfx942", 256)]))
def test_spills_are_seen(compile_pool: CompilePool, target: str, M: int) -> None:
    # Mx128 accumulators fill the registers of one warp, and more is needed beside them.
    (facts,) = compile_pool.facts(
        f"{HERE}:launch_matmul", target, M=M, N=128, BLOCK_K=16, num_warps=1
    )
    assert facts.spills
    assert facts.spill_store_bytes > 0 and facts.spill_load_bytes > 0


def test_too_much_shared_memory_is_reported(compile_pool: CompilePool) -> None:
    tile = {"M": 128, "N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3}
    fits = {}
    for target in ("sm_80", "sm_86"):
        (facts,) = compile_pool.facts(f"{HERE}:launch_matmul", target, **tile)
        assert facts.shared_bytes > TARGETS["sm_86"].shared_bytes
        fits[target] = facts.fits_shared_memory
    assert fits == {"sm_80": True, "sm_86": False}


def test_a_product_that_feeds_a_product_stays_in_registers(compile_pool: CompilePool) -> None:
    (once,) = compile_pool.facts(f"{HERE}:launch_matmul", "sm_90")
    (twice,) = compile_pool.facts(f"{HERE}:launch_matmul", "sm_90", twice=True)
    assert once.wgmma_register_a == 0
    assert twice.wgmma_register_a > 0


def test_only_the_same_code_by_the_same_reader_is_found_again(tmp_path: Path) -> None:
    code = tmp_path / "kernel.cubin"
    code.write_bytes(b"code")
    read = iter(range(9))

    def find(reader: bytes = b"a reader") -> int:
        actual: int = kept(str(code), "number", lambda: next(read), reader)
        return actual

    assert [find(), find()] == [0, 0]
    code.write_bytes(b"other code")
    assert [find(), find()] == [1, 1]
    assert [find(b"another"), find(b"another")] == [2, 2]
    assert kept(str(code), "another number", lambda: 7, b"a reader") == 7


def test_compilations_are_counted(compile_pool: CompilePool) -> None:
    # 509 is odd: without do_not_specialize its divisibility compiles the kernel anew.
    assert compile_pool.call(f"{HERE}:count_new_lengths", "sm_80") == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ("launch_bad_assembly", r"(?s)launch_bad_assembly for sm_80: .*\.such"),
        (
            "raise_unpicklable",
            r"raise_unpicklable for sm_80: LocalError: cannot travel\nas LLVM prints\.",
        ),
        ("not_there", "has no attribute 'not_there'"),
    ],
)
def test_a_failing_job_says_which_and_why(
    compile_pool: CompilePool, job: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CrossCompileError, match=reason) as caught:
        compile_pool.facts(f"{HERE}:{job}", "sm_80")
    assert len(str(caught.value)) < 5000
    assert capfd.readouterr() == ("", "")


def test_the_pool_survives_the_death_of_a_worker(compile_pool: CompilePool) -> None:
    with pytest.raises(CrossCompileError, match="die for sm_80: the worker process died"):
        compile_pool.facts(f"{HERE}:die", "sm_80")
    assert len(compile_pool.facts(f"{HERE}:launch_matmul", "sm_80")) == 1


def test_interpreted_kernels_are_refused() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        with (
            pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 binds kernels"),
            compiling_for("sm_80"),
        ):
            pytest.fail("compiling in a process that interprets")
