"""vLLM's backend: the batches of vLLM's own tests of backends, and what is refused.

On stand-ins for vLLM's classes, or on vLLM itself unpacked in the folder FASTATTN_VLLM.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import server_stubs
import torch
from oracles import assert_by_oracle
from torch import Tensor

from fastattn import reference
from fastattn.compat import vllm as integration
from fastattn.quantization import codes_within

H_Q, H_K, D, SIZE = 4, 2, 16, 16


class Batch(NamedTuple):
    """Tokens of each request with its new ones, and the new ones."""

    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]


# vLLM's tests/v1/attention/test_attention_backends.py has these.
BATCHES = {
    "small_decode": Batch((32, 40), (1, 1)),
    "small_prefill": Batch((32, 40), (8, 8)),
    "mixed_small": Batch((32, 40, 48, 56), (1, 1, 5, 5)),
    "single_prefill": Batch((100,), (64,)),
    "padding request": Batch((33, 20, 0), (2, 20, 0)),
}
MEDIUM = {
    "medium_decode": Batch((128, 256, 512, 1024) * 2, (1,) * 8),
    "medium_prefill": Batch((256, 512, 1024, 2048), (16,) * 4),
    "mixed_medium": Batch((512, 1024, 2048) * 2, (1, 1, 1, 7, 7, 7)),
}
# Order of layers, blocks, heads, tokens and content in memory, as vLLM's KVCacheLayout names them.
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vllm.v1.attention.backend, the backend registered."""
    if server_stubs.VLLM:
        server_stubs.use_folder(monkeypatch, server_stubs.VLLM)
    else:
        server_stubs.install(monkeypatch, server_stubs.VLLM_STUBS)
    integration.register()
    yield importlib.import_module("vllm.v1.attention.backend")
    if not server_stubs.VLLM:
        for name in ("Backend", "MetadataBuilder", "Impl"):
            vars(integration).pop(name, None)


def backend() -> Any:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    return server_stubs.resolved(registry.AttentionBackendEnum.CUSTOM)


def builder() -> Any:
    return backend().get_builder_cls()(None, ["layer"], SimpleNamespace(), torch.device("cpu"))


class Step(NamedTuple):
    """A step of the scheduler, in vLLM's tensors, and the tokens of the requests by position."""

    common: Any
    kv_cache: Tensor
    q: Tensor
    new_k: Tensor
    new_v: Tensor
    k: Tensor
    v: Tensor


def pages(layout: str, blocks: int, dtype: torch.dtype) -> Tensor:
    """A cache [blocks, H_k, size, 2 D] of NaN, the second layer of two, laid out as named."""
    sizes = dict(zip("LBHNC", (2, blocks, H_K, SIZE, 2 * D), strict=True))
    wide = torch.full([sizes[x] for x in layout], torch.nan).to(dtype)
    return wide.permute([layout.index(x) for x in "LBHNC"])[1]


def step_of(
    vllm: Any, batch: Batch, layout: str, dtype: torch.dtype, codes: Tensor | None = None,
    **how: Any,
) -> Step:  # fmt: skip
    """Contexts are in the cache already, their blocks anywhere; unused slots are NaN."""
    torch.manual_seed(0)
    B, T, total = len(batch.seq_lens), max(batch.seq_lens), sum(batch.query_lens)
    columns = -(-T // SIZE)
    q = torch.randn(total + 3, H_Q, D).to(dtype)
    k, v = torch.randn(2, B, H_K, T, D).to(dtype)
    if codes is not None:
        k, v = ((codes_within(x, codes, "fp8").float() * codes).to(dtype) for x in (k, v))
    table = torch.randperm(B * columns).view(B, columns).int() + 1  # block 0 is nobody's
    cache = pages(layout, B * columns + 1, torch.float8_e4m3fn if codes is not None else dtype)
    cache = cache if codes is None else cache.view(torch.uint8)
    slots, new = [], []
    for b, (held, n) in enumerate(zip(*batch, strict=True)):
        table[b, -(-held // SIZE) :] = 0
        for t in range(held):
            page, slot = int(table[b, t // SIZE]), t % SIZE
            row = torch.cat((k[b, :, t], v[b, :, t]), -1)
            if t >= held - n:
                slots.append(page * SIZE + slot)
                new.append(row)
                continue
            if codes is not None:
                row = codes_within(row, codes, "fp8").view(torch.uint8)
            cache[page, :, slot] = row
    padded = torch.stack([*new, *[torch.full_like(new[0], torch.nan)] * 3]).chunk(2, -1)
    offsets = torch.tensor((0, *batch.query_lens)).cumsum(0).int()
    common = vllm.CommonAttentionMetadata(
        query_start_loc=offsets, query_start_loc_cpu=offsets, num_reqs=B, num_actual_tokens=total,
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32), max_seq_len=T,
        max_query_len=max(batch.query_lens), block_table_tensor=table,
        slot_mapping=torch.tensor(slots), **how,
    )  # fmt: skip
    return Step(common, cache, q, *padded, k, v)


def assert_step(vllm: Any, batch: Batch, layout: str, dtype: torch.dtype, **how: Any) -> None:
    """Check a layer's output against the oracle's; behind the tokens nothing is written."""
    options, codes = how.get("options", {}), how.get("codes")
    step = step_of(vllm, batch, layout, dtype, codes, causal=options.get("causal", True))
    metadata = builder().build(0, step.common)
    kv = "auto" if codes is None else "fp8"
    impl = backend().get_impl_cls()(
        num_heads=H_Q, head_size=D, scale=0.3, num_kv_heads=H_K, kv_cache_dtype=kv,
        **how.get("impl", {}),
    )  # fmt: skip
    one = torch.tensor(1.0) if codes is None else codes
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    impl.do_kv_cache_update(layer, step.new_k, step.new_v, step.kv_cache, metadata.slot_mapping)
    output = torch.full_like(step.q, 7)
    assert impl.forward(layer, step.q, None, None, step.kv_cache, metadata, output) is output
    assert not output[-3:].any()
    total = sum(batch.query_lens)
    held, offsets = step.common.seq_lens, step.common.query_start_loc

    def oracle(dtype: torch.dtype) -> list[Tensor]:
        rows = (x.to(dtype) for x in (step.q[:total], step.k, step.v))
        return [reference.attention_paged(*rows, held, offsets, scale=0.3, **options)]

    assert_by_oracle([output[:total]], oracle, dtype)


SLOPES = [0.5, 0.25, 0.125, 1.0]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"impl": {"sliding_window": 9}, "options": {"window": 9}},
    "sinks": {"impl": {"sinks": SINKS.half()}, "options": {"sinks": SINKS}},
    "softcap": {"impl": {"logits_soft_cap": 1.5}, "options": {"softcap": 1.5}},
    "alibi": {"impl": {"alibi_slopes": SLOPES}, "options": {"alibi_slopes": torch.tensor(SLOPES)}},
    "bidirectional window": {
        "impl": {"sliding_window": 3}, "options": {"causal": False, "window": (2, 2)},
    },
    "fp8": {"codes": torch.tensor(0.01)},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BATCHES)
def test_batches_in_every_layout(name: str, layout: str, vllm: Any) -> None:
    assert_step(vllm, BATCHES[name], layout, torch.float16)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MEDIUM)
def test_larger_batches(name: str, vllm: Any) -> None:
    assert_step(vllm, MEDIUM[name], "LBNHC", torch.bfloat16)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_layers(option: str, vllm: Any) -> None:
    assert_step(vllm, BATCHES["mixed_small"], "LBNHC", torch.float16, **OPTIONS[option])


@pytest.mark.parametrize("option", ["window", "fp8"])
def test_kernels(option: str, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    assert_step(vllm, BATCHES["mixed_small"], "BLHNC", torch.float16, **OPTIONS[option])


def test_a_profiling_run_is_zeros(vllm: Any) -> None:
    impl = backend().get_impl_cls()(H_Q, D, 0.3)
    q, output = torch.randn(5, H_Q, D), torch.full((5, H_Q, D), torch.nan)
    assert impl.forward(None, q, q, q, torch.empty(0), None, output) is output
    assert not output.any()
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(None, q, q, q, torch.empty(0), None, q, output_scale=torch.ones(()))


def test_one_step_serves_layers_of_several_block_tables(vllm: Any) -> None:
    common = step_of(vllm, BATCHES["small_decode"], "LBHNC", torch.float32).common
    metadata = builder().build(0, common)
    table, slots = common.block_table_tensor.clone(), common.slot_mapping + 1
    other = builder().update_block_table(metadata, table, slots)
    assert other.block_table is table and other.slot_mapping is slots
    assert metadata.block_table is common.block_table_tensor
    assert other.query_start_loc is metadata.query_start_loc


REFUSED: list[tuple[str, Any]] = [
    ("attn_type", "encoder_only"),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("use_alibi_sqrt", True),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_a_layer_may_not_have_is_named(name: str, value: Any, vllm: Any) -> None:
    message = f"does not support {name}={value!r}.*attention-backend"
    with pytest.raises(NotImplementedError, match=message):
        backend().get_impl_cls()(H_Q, D, 0.3, **{name: value})


STEPS: dict[str, dict[str, Any]] = {
    "a causal flag for each request": {"causal": torch.tensor([True, False])},
    "mm_prefix": {"mm_req_doc_ranges": {0: [(0, 3)]}},
    "R-SWA": {"rswa_prefix_lens": torch.zeros(2)},
}


@pytest.mark.parametrize("named", STEPS)
def test_what_a_step_may_not_have_is_named(named: str, vllm: Any) -> None:
    step = step_of(vllm, BATCHES["small_decode"], "LBHNC", torch.float32, **STEPS[named])
    with pytest.raises(NotImplementedError, match=named):
        builder().build(0, step.common)


def test_classes_have_vllms_signatures(vllm: Any) -> None:
    """Every method that vLLM calls takes what vLLM's own takes, in its order."""
    actual = backend()
    assert actual.get_name() == "CUSTOM"
    assert actual.forward_includes_kv_cache_update is False
    kinds = {
        actual: vllm.AttentionBackend,
        actual.get_builder_cls(): vllm.AttentionMetadataBuilder,
        actual.get_impl_cls(): vllm.AttentionImpl,
    }
    for ours, theirs in kinds.items():
        assert issubclass(ours, theirs)
        for name, method in server_stubs.methods(theirs).items():
            if name in vars(ours.__mro__[1]):
                taken = server_stubs.signature_of(inspect.getattr_static(ours, name))
                requested = server_stubs.signature_of(method)
                assert taken[: len(requested)] == requested, f"{ours.__name__}.{name}"
                more = taken[len(requested) :]
                assert all(x[2] or x[1] is inspect.Parameter.VAR_KEYWORD for x in more)
    assert actual.get_builder_cls()._cudagraph_support is vllm.AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.skipif(not server_stubs.VLLM, reason="needs FASTATTN_VLLM, a folder of vLLM")
def test_stand_ins_have_vllms_signatures(vllm: Any) -> None:
    for stub in (server_stubs.VllmBackend, server_stubs.VllmBuilder, server_stubs.VllmImpl):
        for name, method in server_stubs.methods(stub).items():
            theirs = inspect.getattr_static(getattr(vllm, stub.__name__), name)
            expected = server_stubs.signature_of(theirs)
            assert server_stubs.signature_of(method) == expected, f"{stub.__name__}.{name}"


def test_vllm_finds_the_door() -> None:
    assert server_stubs.entry_point("vllm.general_plugins") == "fastattn.compat.vllm:register"


def test_another_version_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration.distributions, "version", lambda name: "0.34.1")
    with pytest.warns(UserWarning, match=r"written for vLLM 0.33, and this is 0.34.1"):
        _ = integration.__getattr__("Backend")
    monkeypatch.setattr(integration.distributions, "version", lambda name: "0.33.2")
    _ = integration.__getattr__("Backend")
    assert "vllm" in sys.modules
