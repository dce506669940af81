"""Kernels that are compiled before they are needed."""

import tempfile
from functools import partial
from importlib import import_module

import pytest
import torch
import triton
from nightly import gate_cases

import fastattn
from fastattn import attention, attention_varlen, dispatch
from fastattn.bench.time import overhead
from fastattn.functional import call_memo
from fastattn.functional.warmup import _FLAGS
from fastattn.kernels import forward
from fastattn.kernels.launch import launches
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.testing.compiling.cross_compile import count_compilations


def heads(B: int, H: int, T: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(B, T, H, 32, dtype=dtype).transpose(1, 2).requires_grad_()


def use(B: int, H_q: int, H_k: int, T: int) -> None:
    """Make the calls of a program after `warmup`."""
    q, k = (heads(B, H, T, torch.bfloat16) for H in (H_q, H_k))
    lengths = torch.full((B,), T)
    attention(q, k, k, causal=True, key_lengths=lengths.int(), backend="triton").sum().backward()
    packed = (x.detach()[0].transpose(0, 1) for x in (q, k, k))
    last = q.detach()[:, :, -1:]
    few = q.detach()[:, :, -64:]
    for part in (last, few):
        attention(part, k, k, causal=True, key_lengths=lengths.int(), backend="triton")
    starts = torch.tensor([0, T // 2, T], dtype=torch.int32)
    attention_varlen(*packed, starts, causal=True, backend="triton")


def compilations() -> list[int]:
    """Count compilations: in `warmup`, in calls of the kinds it covers, in one of another dtype."""

    def warm() -> None:
        fastattn.warmup(32, calls="causal+key_lengths", device="cpu")
        fastattn.warmup(32, calls="varlen+causal", backward=False, device="cpu")

    with overhead.stand_in_gpu():
        counts = [count_compilations(warm)]
        for sizes in ((1, 2, 2, 64), (3, 4, 1, 1), (2, 6, 3, 1000), (1, 8, 2, 8192)):
            counts.append(count_compilations(lambda sizes=sizes: use(*sizes)))
        q = heads(1, 2, 64, torch.float16).detach()
        counts.append(count_compilations(lambda: attention(q, q, q, backend="triton")))
    return counts


def generate(cache: fastattn.KVCache, T: int, H_q: int) -> None:
    """A prompt of rows of several lengths, and two steps."""
    B, H_k, _, D = cache.k.shape
    for new, lengths in ((T, torch.ones(B, dtype=torch.int32)), (1, None), (1, None)):
        q, k = (torch.zeros(B, H, new, D, dtype=cache.dtype) for H in (H_q, H_k))
        cache.append(k, k, lengths, backend="triton")
        for splits in (None, 1, 3):
            fastattn.decode_attention(
                q, cache, new_lengths=lengths, num_splits=splits, backend="triton"
            )


def generations() -> list[int]:
    """Compilations by `warmup`, and by generations of other sizes than it has."""
    with overhead.stand_in_gpu(), torch.no_grad():
        counts = [
            count_compilations(lambda: fastattn.warmup(32, calls="decode+int8", device="cpu"))
        ]
        for B, H_q, H_k, T in ((1, 4, 2, 50), (5, 8, 1, 7)):
            cache = fastattn.KVCache(B, H_k, 99, 32, quantize="int8", dtype=torch.bfloat16)
            counts.append(count_compilations(lambda c=cache, T=T, H=H_q: generate(c, T, H)))
    return counts


def steps() -> list[int]:
    """Compilations by `warmup`, and by a server's steps of other sizes than it has."""
    with overhead.stand_in_gpu(), torch.no_grad():
        flags = "decode+paged+packed+shared"
        counts = [count_compilations(lambda: fastattn.warmup(32, calls=flags, device="cpu"))]
        for H, total, columns in ((8, 300, 2000), (4, 5, 1), (4, 70, 64)):
            pages = torch.zeros(9, 2, 16, 32, dtype=torch.bfloat16)
            view = fastattn.view_of_tensors(
                pages,
                pages.clone(),
                torch.zeros(3).int(),
                block_table=torch.zeros(3, columns).int(),
            )
            q = torch.zeros(total, H, 32, dtype=torch.bfloat16)
            offsets = torch.zeros(4, dtype=torch.int32)
            groups = torch.tensor([0, 1, 3], dtype=torch.int32)
            shared = fastattn.shared_pages(view, offsets, groups, groups[1:] * 0)
            how = {"backend": "triton"}
            for sharing in (None, shared):
                call = partial(fastattn.attention_paged, q, view, offsets, shared=sharing, **how)
                counts.append(count_compilations(call))
    return counts


def found_on_disk() -> list[list[bool]]:
    """Kernels of a first call that the disk cache held: when it was empty, and after that."""
    calls: list[list[bool]] = []
    q = torch.zeros(1, 2, 64, 48, dtype=torch.bfloat16)
    knobs = triton.knobs
    with (
        knobs.cache.scope(),
        tempfile.TemporaryDirectory() as folder,
        knobs.compilation.scope(),
        overhead.stand_in_gpu(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.listener = lambda **details: calls[-1].append(details["cache_hit"])
        for _ in range(2):
            forward.attention_forward_kernel.device_caches.clear()
            call_memo.forget()
            launches.forget()
            calls.append([])
            attention(q, q, q, causal=True, softcap=30.0, backend="triton")
    return calls


def test_what_is_warm_compiles_nothing() -> None:
    """A program, generations, and a first call of a later process, which the disk cache serves."""
    # In a process of its own: what adds up gradients is the same kernel for other calls.
    with CompilePool(1) as pool:
        counts, generated, cached = (
            pool.call(f"{__file__}:{name}", "sm_90")
            for name in ("compilations", "generations", "found_on_disk")
        )
    assert counts == [8, 0, 0, 0, 0, 1]
    assert generated[0] > 0 and generated[1:] == [0, 0]
    assert cached == [[False], [True]]


@pytest.mark.nightly
def test_steps_of_a_server_compile_nothing() -> None:
    with CompilePool(1) as pool:
        first, *others = pool.call(f"{__file__}:steps", "sm_90")
    assert first > 0 and others == [0] * 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"device must be one that is here, got cuda: .* no GPU"):
        fastattn.warmup(16)


@pytest.mark.parametrize(
    "call", ["decode+rotary+softcap", "decode+paged+int8+return_lse", "decode+fp8+window"]
)
def test_every_kind_of_cache_is_served(call: str, device: str) -> None:
    fastattn.warmup(16, torch.float32, calls=call, device=device)


NAMES = list(_FLAGS)


@pytest.mark.parametrize("name", gate_cases(NAMES[1::3], [*NAMES[::3], *NAMES[2::3]]))
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


def test_on_hopper_its_kernels_are_warm_too(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    requested = []

    def record(q, k, v, *, backend, alibi_slopes=None):
        assert not torch.is_autocast_enabled("cpu")
        requested.append((q.shape[-1], backend))
        if backend == "hopper" and q.shape[-1] == 32:
            raise ValueError('backend "hopper" cannot serve this call: head dim 32 is none of ...')
        return q

    monkeypatch.setattr(import_module("fastattn.functional.warmup"), "attention", record)
    with torch.autocast("cpu", torch.bfloat16):
        fastattn.warmup((32, 64), calls="full", backward=False, device="cpu")
    assert requested == [(32, "triton")] * 3 + [(64, "triton")] * 3
    of_64 = [(64, "triton")] * 3 + [(64, "hopper")] * 3
    monkeypatch.setattr(dispatch, "on_hopper", lambda device: True)
    for call, hopper in (("full", of_64), ("alibi_slopes", of_64[:3])):
        requested.clear()
        fastattn.warmup((32, 64), calls=call, backward=False, device="cpu")
        assert requested == [(32, "triton")] * 3 + hopper, "what never ran is not launched"
    request.getfixturevalue("hopper_ran")
    requested.clear()
    fastattn.warmup((32, 64), calls="full", backward=False, device="cpu")
    assert requested == [(32, "triton")] * 3 + [(32, "hopper")] + of_64
