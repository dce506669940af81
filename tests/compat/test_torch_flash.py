"""torch's flash operators by `fastattn.compat.torch_flash`."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from gloo_ranks import run_ranks
from oracles import assert_by_oracle, with_gradients
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

from fastattn import reference
from fastattn.compat import torch_flash

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

OFFSETS = (0, 5, 12)


@pytest.fixture
def active() -> Iterator[None]:
    """On the CPU, where torch has none of these operators of its own."""
    torch_flash.register("CPU")
    activate_flash_attention_impl("fastattn")
    assert current_flash_attention_impl() == "fastattn"
    yield
    restore_flash_attention_impl(_raise_warn=False)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def by_parts(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Each sequence of packed ones by the reference."""
    parts = []
    for begin, end in itertools.pairwise(OFFSETS):
        part = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(reference.attention(*part, **options)[0].transpose(0, 1))
    return torch.cat(parts)


WINDOWS = {(-1, -1): {}, (-1, 0): {"causal": True}, (3, 0): {"causal": True, "window": 4},
           (2, 1): {"window": (2, 1)}}  # fmt: skip


@pytest.mark.parametrize(
    ("window", "compiled"), [*((window, False) for window in WINDOWS), ((-1, 0), True)]
)
def test_packed_sequences(active, window, compiled):
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q, k, v, offsets, offsets, 7, 7, scale=0.3, window_size=window)

    torch._dynamo.reset()
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    x = tensors(OFFSETS[-1], 2, 8)
    naive = partial(by_parts, scale=0.3, **WINDOWS[window])
    actual = with_gradients(call, x, torch.float32)
    assert_by_oracle(actual, partial(with_gradients, naive, x))
    out = torch.full_like(x[0], torch.nan)
    with torch.no_grad():
        varlen_attn_out(out, *x, offsets, offsets, 7, 7, scale=0.3, window_size=window)
    assert_by_oracle([out], lambda dtype: [naive(*(y.to(dtype) for y in x))])


HELD, PAGE = (9, 14, 0), 4
NEW = (0, 3, 9, 9)  # offsets: the last row has no token, and holds none


def pool(paged: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Where rows are, what varlen_attn gets of keys and values, and their tokens by position."""
    k, v = (x.detach() for x in tensors(3, 16, 2, 8, dtype=dtype)[:2])
    used = torch.tensor(HELD, dtype=torch.int32)
    if not paged:  # room for 16 tokens each, behind one another
        return {"seqused_k": used}, [x.flatten(0, 1) for x in (k, v)], [k, v]
    table = torch.tensor([[5, 2, 9, 0], [1, 7, 3, 8], [0, 0, 0, 0]], dtype=torch.int32)
    pages = [torch.full((11, PAGE, 2, 8), torch.nan, dtype=dtype) for _ in "kv"]
    for b, t in ((b, t) for b, n in enumerate(HELD) for t in range(n)):
        for x, y in zip(pages, (k, v), strict=True):
            x[table[b, t // PAGE], t % PAGE] = y[b, t]
    return {"seqused_k": used, "block_table": table}, pages, [k, v]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("paged", [True, False], ids=["block_table", "seqused_k alone"])
def test_rows_of_a_cache(active, paged, window):
    """Fewer heads of keys, offsets and lengths, lse, and an output that is given."""
    where, given, rows = pool(paged, torch.float32)
    q = tensors(NEW[-1], 4, 8)[0].detach()
    offsets, held = torch.tensor(NEW, dtype=torch.int32), torch.tensor(HELD)
    cu_k = None if paged else torch.tensor([0, 16, 32, 48], dtype=torch.int32)
    call = (q, *given, offsets, cu_k, 6, 16)
    how = {"scale": 0.3, "window_size": window, "enable_gqa": True, **where}
    out = torch.full_like(q, torch.nan)
    actual = varlen_attn(*call, return_aux=AuxRequest(lse=True), num_splits=1, **how)
    returned = varlen_attn_out(out, *call, **how)
    options = {"causal": False, **WINDOWS[window]}

    def oracle(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = (x.transpose(1, 2).to(dtype) for x in rows)
        return reference.attention_paged(
            q.to(dtype), *keys, held, offsets, scale=0.3, return_lse=True, **options
        )

    assert_by_oracle(actual, oracle)
    assert returned.data_ptr() == out.data_ptr()
    assert_by_oracle([out], lambda dtype: oracle(dtype)[:1], names="out")


def test_rows_of_a_cache_are_written_where_the_output_is(active, monkeypatch):
    seen = []

    def paged(q: Tensor, *args: object, **how: object) -> tuple[Tensor, Tensor]:
        seen.append((how["out"], how["batch_invariant"]))
        return how["out"], q.new_zeros(4, NEW[-1])

    monkeypatch.setattr(torch_flash, "attention_paged", paged)
    where, given, _ = pool(True, torch.float32)
    q, offsets = tensors(NEW[-1], 2, 8)[0].detach(), torch.tensor(NEW, dtype=torch.int32)
    out = torch.zeros_like(q)
    varlen_attn_out(out, q, *given, offsets, None, 6, 16, num_splits=1, **where)
    varlen_attn_out(out, q, *given, offsets, None, 6, 16, **where)
    assert [(x.data_ptr() == out.data_ptr(), flag) for x, flag in seen] == [
        (True, True), (True, False)]  # fmt: skip


def test_where_rows_are_is_needed_whole(active):
    where, given, _ = pool(True, torch.float32)
    q, offsets = tensors(NEW[-1], 4, 8)[0].detach(), torch.tensor(NEW, dtype=torch.int32)
    for wrong in ({"block_table": where["block_table"]}, {"seqused_k": where["seqused_k"]}):
        with pytest.raises(ValueError, match="seqused_k needs cum_seq_q, and one of"):
            varlen_attn(q, *given, offsets, None, 6, 16, enable_gqa=True, **wrong)


def ring() -> list[Tensor]:
    """On a rank: torch's context parallelism of a causal sequence; its part of all results."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    torch_flash.register("CPU")
    activate_flash_attention_impl("fastattn")
    # Two chunks of each rank: the first and the last of four, or the middle ones.
    order = [(0, 3), (1, 2)][mesh.get_rank()]
    q, k, v, grad = (torch.cat([x.chunk(4, 2)[i] for i in order], 2) for x in sequence())
    o, lse, *rest = _attention._scaled_dot_product_ring_flash_attention(
        mesh, q, k, v, is_causal=True, scale=0.3
    )
    *seeds, _ = rest[-3:]
    gradients = _attention._scaled_dot_product_ring_flash_attention_backward(
        mesh, grad, q, k, v, o, lse, None, None, 8, 8, 0.0, True, *seeds, scale=0.3
    )
    restore_flash_attention_impl()
    return [o, *gradients[:3]]


def sequence() -> list[Tensor]:
    return [x.detach() for x in (*tensors(1, 2, 16, 8), tensors(1, 2, 16, 8)[0].flip(2))]


def test_torchs_context_parallelism():
    q, k, v, grad = sequence()

    def naive(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        o = reference.attention(*inputs, causal=True, scale=0.3)
        return [o.detach(), *torch.autograd.grad(o, inputs, grad.to(dtype))]

    results = []
    for first, last in zip(*run_ranks(f"{__file__}:ring", 2), strict=True):
        (a, d), (b, c) = first.chunk(2, 2), last.chunk(2, 2)
        results.append(torch.cat((a, b, c, d), 2))
    assert_by_oracle(results, naive, names="o dq dk dv")


OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


@pytest.mark.parametrize("causal", [False, True])
def test_dense_operator(active, causal):
    qkv = [x.transpose(1, 2) for x in tensors(2, 5, 3, 8)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OPERATOR(q, k, v, 0.0, causal, scale=0.3)[0]

    naive = partial(reference.attention, causal=causal, scale=0.3)
    assert_by_oracle(with_gradients(ours, qkv, torch.float32), partial(with_gradients, naive, qkv))
    # What torch's fake promises.
    fake = OPERATOR(*(x.detach().to("meta") for x in qkv), 0.0, causal)
    for got, promised in zip(OPERATOR(*qkv, 0.0, causal), fake, strict=True):
        if isinstance(got, Tensor):
            assert (got.shape, got.dtype, got.stride()) == (
                promised.shape, promised.dtype, promised.stride())  # fmt: skip


def test_dropout_has_the_forwards_bits_in_the_backward(active):
    q, k, v = tensors(1, 2, 6, 8)
    torch.manual_seed(0)
    o = OPERATOR(q, k, v, 0.5)[0]
    (dv,) = torch.autograd.grad(o.sum(), v)
    # o is linear in the values: o.sum() = (dv * v).sum() for the same dropped weights.
    torch.testing.assert_close((dv * v).sum(), o.sum())
    assert not torch.equal(OPERATOR(q, k, v, 0.5)[0], o)


def test_what_is_not_served_is_refused_and_restored(active):
    x = [y.detach() for y in tensors(12, 2, 8)]
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="return_debug_mask of torch's flash operators"):
        OPERATOR(*(y[None].transpose(1, 2) for y in x), 0.0, False, True)
    restore_flash_attention_impl()
    with pytest.raises(NotImplementedError, match="Could not run"):
        varlen_attn(*x, offsets, offsets, 7, 7)


def test_registered_for_cuda():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    q, k, v = (x.detach() for x in tensors(1, 2, 4, 8))
    torch_flash.register()
    activate_flash_attention_impl("fastattn")
    try:
        assert OPERATOR.redispatch(keys, q, k, v)[0].shape == q.shape
    finally:
        restore_flash_attention_impl()
