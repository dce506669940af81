"""Cross compilation: every target compiles, and its facts are those of the compilers."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from machine_code import loops
from nightly import gate_cases

from fastattn.testing.compiling import cross_compile
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import TARGETS, compiling_for, count_compilations
from fastattn.testing.compiling.kept import kept

HERE = str(Path(__file__).resolve())


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * K + (start + k)[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


def launch_matmul(
    M: int = 64, N: int = 64, K: int = 256, BLOCK_K: int = 64, **options: int
) -> None:
    a = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    b = torch.empty(K, N, dtype=torch.bfloat16, device="meta")
    c = torch.empty(M, N, device="meta")
    matmul_kernel[(1,)](a, b, c, K, M, N, BLOCK_K, **options)


def count_new_lengths() -> list[int]:
    """And look for the driver of this launch inside of another's."""
    matmul_kernel.device_caches.clear()
    with compiling_for("gfx942"):
        launch_matmul(N=16)
    lengths = (256, 512, 512, 509)
    return [count_compilations(lambda K=K: launch_matmul(N=16, K=K)) for K in lengths]


MATRIX_OPS = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma", "gfx950": "mfma"}
MATRIX_OPS |= {"gfx1100": "wmma", "gfx1201": "wmma"}
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
        products = loop.count("v_mfma", "v_wmma")
    assert 0 < products < loop.total


@pytest.mark.parametrize(("target", "M"), gate_cases([("sm_90", 128)], [("gfx942", 256)]))
def test_spills_are_seen(compile_pool: CompilePool, target: str, M: int) -> None:
    # Mx128 accumulators fill the registers of one warp, and more is needed beside them.
    (facts,) = compile_pool.facts(
        f"{HERE}:launch_matmul", target, M=M, N=128, BLOCK_K=16, num_warps=1
    )
    assert facts.spills
    assert facts.spill_store_bytes > 0 and facts.spill_load_bytes > 0


def test_amd_s_registers_are_those_of_the_largest_function() -> None:
    text = ".vgpr_count: 96\n.vgpr_spill_count: 3\n.vgpr_count: 12\n.vgpr_spill_count: 0\n"
    report = cross_compile._amd_report(text)
    assert (report.registers, report.spill_store_bytes) == (96, 12)


def test_too_much_shared_memory_is_reported(compile_pool: CompilePool) -> None:
    tile = {"M": 128, "N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3}
    fits = {}
    for target in ("sm_80", "sm_86"):
        (facts,) = compile_pool.facts(f"{HERE}:launch_matmul", target, **tile)
        assert facts.shared_bytes > TARGETS["sm_86"].shared_bytes
        fits[target] = facts.fits_shared_memory
    assert fits == {"sm_80": True, "sm_86": False}


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


def test_interpreted_kernels_are_refused() -> None:
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        with (
            pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 binds kernels"),
            compiling_for("sm_80"),
        ):
            pytest.fail("compiling in a process that interprets")
