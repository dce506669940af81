"""Kernels that are compiled before they are needed."""

import tempfile
import time

import pytest
import torch
import triton

import fastattn
from fastattn import attention, attention_varlen, known_calls
from fastattn.bench import overhead
from fastattn.kernels import forward, plan
from fastattn.testing.compile_pool import CompilePool
from fastattn.testing.cross_compile import count_compilations
from fastattn.warmup import _FLAGS


def heads(B: int, H: int, T: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(B, T, H, 32, dtype=dtype).transpose(1, 2).requires_grad_()


def use(B: int, H_q: int, H_k: int, T: int) -> None:
    """What a program does after `warmup`."""
    q, k = (heads(B, H, T, torch.bfloat16) for H in (H_q, H_k))
    lengths = torch.full((B,), T)
    attention(q, k, k, causal=True, key_lengths=lengths.int(), backend="triton").sum().backward()
    packed = (x.detach()[0].transpose(0, 1) for x in (q, k, k))
    starts = torch.tensor([0, T // 2, T], dtype=torch.int32)
    attention_varlen(*packed, starts, causal=True, backend="triton")


def compilations() -> list[int]:
    """By `warmup`, by calls of the kinds it was told of, and by one of another dtype."""

    def warm() -> None:
        fastattn.warmup(32, calls="causal+key_lengths", device="cpu")
        fastattn.warmup(32, calls="varlen+causal", backward=False, device="cpu")

    with overhead.stand_in_gpu():
        counts = [count_compilations(warm)]
        for sizes in ((1, 2, 2, 64), (3, 4, 1, 1), (2, 6, 3, 1000)):
            counts.append(count_compilations(lambda sizes=sizes: use(*sizes)))
        q = heads(1, 2, 64, torch.float16).detach()
        counts.append(count_compilations(lambda: attention(q, q, q, backend="triton")))
    return counts


def test_what_is_warm_compiles_nothing(compile_pool: CompilePool) -> None:
    counts = compile_pool.call(f"{__file__}:compilations", "sm_90")
    assert counts == [4, 0, 0, 0, 1]


def first_calls() -> tuple[float, float]:
    """Seconds of a first call: with an empty disk cache, and with what that call left there."""
    seconds = []
    q = torch.zeros(1, 2, 64, 48, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with overhead.stand_in_gpu():
            for _ in range(2):
                forward.attention_forward_kernel.device_caches.clear()
                known_calls.forget()
                plan.forget()
                begin = time.perf_counter()
                attention(q, q, q, causal=True, softcap=30.0, backend="triton")
                seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]


def test_the_disk_cache_spares_a_first_call_the_compilers(compile_pool: CompilePool) -> None:
    """Limits for a machine with other work: it is a matter of one second, and of milliseconds."""
    empty, warm = compile_pool.call(f"{__file__}:first_calls", "sm_90")
    assert empty < 15
    assert warm < empty / 4


@pytest.mark.parametrize("name", _FLAGS)
def test_every_name_is_a_call_that_is_served(name: str, device: str) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        fastattn.warmup(
            [16],
            [torch.float32],
            calls=[name],
            device=device,
            backward=name in ("return_lse", "deterministic=False"),
        )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"head_dims": 16, "calls": "causal+windowed"}, ValueError, "got 'windowed'"),
        ({"head_dims": 16, "calls": ""}, ValueError, "calls must name some of full, causal"),
        ({"head_dims": 0}, ValueError, "head_dims must be at least 1, got 0"),
        ({"head_dims": [64, "x"]}, TypeError, "head_dims must be an int, got str"),
        ({"head_dims": 16, "dtypes": ["bf16"]}, TypeError, "must be torch dtypes, got 'bf16'"),
        ({"head_dims": 1024}, ValueError, "head dim 1024 is larger than 512"),
        ({"head_dims": 16, "calls": "varlen+documents"}, TypeError, "takes no documents"),
    ],
)
def test_refusals(arguments: dict, error: type[Exception], message: str, device: str) -> None:
    with pytest.raises(error, match=message):
        fastattn.warmup(**arguments, device=device)
