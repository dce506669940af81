"""SGLang's backend: extend, decode and verification on its pool, in and out of graphs' buffers.

On stand-ins for SGLang's classes, or on SGLang itself unpacked in the folder FASTATTN_SGLANG.
"""

import importlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import server_stubs
import torch
from oracles import assert_by_oracle
from torch import Tensor

from fastattn import reference
from fastattn.compat import sglang as integration
from fastattn.quantization import codes_within

H_Q, H_K, D, ROWS, CONTEXT, LAYER = 4, 2, 16, 7, 80, 1
EXTEND = ((13, 0, 40), (5, 20, 1))  # older tokens of each request, and new ones
DECODE = ((13, 20, 40), (1, 1, 1))
DRAFTS = 4
VERIFY = ((13, 1, 40), (DRAFTS,) * 3)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Names of SGLang that a test uses, the backend registered."""
    if server_stubs.SGLANG:
        server_stubs.use_sglang(monkeypatch, server_stubs.SGLANG)
    else:
        server_stubs.install(monkeypatch, server_stubs.SGLANG_STUBS)
    integration.register()
    actual = SimpleNamespace()
    for module, names in server_stubs.SGLANG_STUBS.items():
        for name in names:
            setattr(actual, name, getattr(importlib.import_module(module), name))
    yield actual


class Server:
    """A runner's attributes, and the tokens of three requests by position."""

    def __init__(self, sglang: Any, page: int = 1, stored: torch.dtype = torch.float16) -> None:
        torch.manual_seed(0)
        self.sglang = sglang
        size = 6 * CONTEXT
        pool = sglang.MHATokenToKVPool(
            size=size, page_size=page, dtype=stored, head_num=H_K, head_dim=D, layer_num=2,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        for layer in range(2):
            for x in pool.get_kv_buffer(layer):
                x.view(torch.uint8).fill_(127)  # NaN, in e4m3 and in fp16 and fp32 too
        table = torch.zeros(ROWS, CONTEXT, dtype=torch.int32)
        pages = torch.randperm(size // page)[: 3 * CONTEXT // page].view(3, -1) + 1
        of_tokens = (pages[:, :, None] * page + torch.arange(page)).flatten(1)[:, :CONTEXT]
        self.rows = torch.tensor([4, 1, 6])
        table[self.rows] = of_tokens.int()
        self.runner = SimpleNamespace(
            device="cpu", use_mla_backend=False, token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            server_args=SimpleNamespace(
                enable_deterministic_inference=False, speculative_num_draft_tokens=DRAFTS
            ),
        )  # fmt: skip
        self.backend = sglang.ATTENTION_BACKENDS["fastattn"](self.runner)
        self.k, self.v = torch.randn(2, 3, H_K, CONTEXT, D).half()

    def layer(self, **how: Any) -> Any:
        return self.sglang.RadixAttention(H_Q, D, 0.3, H_K, LAYER, **how)

    def batch(self, mode: str, older: tuple[int, ...], new: tuple[int, ...], **how: Any) -> Any:
        """A ForwardBatch; its older tokens are in the pool already."""
        table = self.runner.req_to_token_pool.req_to_token
        pool, locations = self.runner.token_to_kv_pool, []
        for b, (n, m) in enumerate(zip(older, new, strict=True)):
            slots = table[self.rows[b]].long()
            locations.append(slots[n : n + m])
            where = self.sglang.KVWriteLoc(slots[:n])
            rows = (x[b, :, :n].transpose(0, 1).clone() for x in (self.k, self.v))
            scales = how.get("scales", ())
            pool.set_kv_buffer(SimpleNamespace(layer_id=LAYER), where, *rows, *scales)
        counted = torch.tensor(older) + (0 if mode == "TARGET_VERIFY" else torch.tensor(new))
        return SimpleNamespace(
            forward_mode=getattr(self.sglang.ForwardMode, mode), batch_size=3,
            req_pool_indices=self.rows, seq_lens=counted, out_cache_loc=torch.cat(locations),
            extend_prefix_lens=torch.tensor(older), extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=list(new), encoder_lens=None, spec_info=how.get("spec_info"),
            out_cache_loc_is_physical=False,
        )  # fmt: skip

    def new_tokens(self, older: tuple[int, ...], new: tuple[int, ...]) -> list[Tensor]:
        places = list(enumerate(zip(older, new, strict=True)))
        parts = ([x[b, :, n : n + m] for b, (n, m) in places] for x in (self.k, self.v))
        q = torch.randn(sum(new), H_Q * D).half()
        return [q, *(torch.cat(x, 1).transpose(0, 1).contiguous() for x in parts)]


def prepare(server: Server, fb: Any, graph: bool) -> None:
    if not graph:
        server.backend.init_forward_metadata(fb)
        return
    server.backend.init_cuda_graph_state(5, 5 * DRAFTS)
    # Captured with other rows and lengths, as a graph of padding is; replayed with these.
    other = SimpleNamespace(**vars(fb))
    other.req_pool_indices, other.seq_lens = torch.zeros(3, dtype=torch.int64), torch.ones(3).long()
    if fb.spec_info is not None and fb.spec_info.custom_mask is not None:
        mask = torch.ones(3 * DRAFTS * (1 + DRAFTS), dtype=torch.bool)
        other.spec_info = SimpleNamespace(custom_mask=mask, num_tokens_per_req=DRAFTS)
    server.backend.init_forward_metadata_out_graph(other, in_capture=True)
    captured = server.backend.forward_metadata
    server.backend.init_forward_metadata_out_graph(fb)
    # The graph reads the memory that it was captured with.
    for x, y in zip(captured, server.backend.forward_metadata, strict=True):
        assert not isinstance(x, Tensor) or x.data_ptr() == y.data_ptr()
    server.backend.forward_metadata = captured


def assert_pass(
    sglang: Any, mode: str, step: tuple[tuple[int, ...], tuple[int, ...]], *, page: int = 1,
    graph: bool = False, stored: torch.dtype = torch.float16, layer: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None, spec_info: Any = None, scale: Tensor | None = None,
    **kwargs: Any,
) -> None:  # fmt: skip
    """Check what a layer returns against the oracle on the requests' tokens by position."""
    server, (older, new) = Server(sglang, page, stored), step
    if scale is not None:
        server.k, server.v = (
            (codes_within(x, scale, "fp8").float() * scale).half() for x in (server.k, server.v)
        )
    scales = () if scale is None else (scale, scale)
    fb = server.batch(mode, older, new, spec_info=spec_info, scales=scales)
    attention = server.layer(**(layer or {}))
    attention.k_scale = attention.v_scale = scale
    q, k, v = server.new_tokens(older, new)
    kept = k.clone()
    prepare(server, fb, graph)
    actual = server.backend.forward(q, k, v, attention, fb, True, **kwargs)
    assert torch.equal(k, kept)
    o, *lse = actual if "return_lse" in kwargs else [actual]
    assert all(x.is_contiguous() for x in lse)  # as its kernels that merge want
    offsets = torch.tensor((0, *new)).cumsum(0)
    held = torch.tensor(older) + torch.tensor(new)

    def oracle(dtype: torch.dtype) -> Any:
        rows = (x.to(dtype) for x in (q.view(-1, H_Q, D), server.k, server.v))
        how = {"scale": 0.3, "return_lse": True, **(options or {})}
        return reference.attention_paged(*rows, held, offsets, **how)[: 1 + len(lse)]

    assert o.shape == (sum(new), H_Q * D)
    assert_by_oracle([o.view(-1, H_Q, D), *(x.T for x in lse)], oracle, torch.float16)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("mode", ["EXTEND", "MIXED", "DECODE", "DECODE in a graph"])
def test_passes(mode: str, page: int, sglang: Any) -> None:
    mode, *graph = mode.split(" in ")
    step = DECODE if mode == "DECODE" else EXTEND
    assert_pass(sglang, mode, step, page=page, graph=bool(graph))


OPTIONS: dict[str, dict[str, Any]] = {
    # SGLang's window does not count the own token.
    "window": {"layer": {"sliding_window_size": 9}, "options": {"window": 10}},
    "softcap": {"layer": {"logit_cap": 1.5}, "options": {"softcap": 1.5}},
    "fp8": {"stored": torch.float8_e4m3fn, "scale": torch.tensor(0.01)},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_layers(option: str, sglang: Any) -> None:
    assert_pass(sglang, "EXTEND", EXTEND, **OPTIONS[option])


def test_sinks_and_lse(sglang: Any) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    assert_pass(
        sglang, "EXTEND", EXTEND, options={"sinks": sinks}, sinks=sinks.half(), return_lse=True
    )


def test_encoders_see_both_ways(sglang: Any) -> None:
    kind = {"attn_type": sglang.AttentionType.ENCODER_ONLY}
    assert_pass(sglang, "EXTEND", ((0, 0, 0), (5, 20, 9)), layer=kind, options={"causal": False})


def tree() -> Tensor:
    """bool [3 requests, DRAFTS, DRAFTS]: the second draft and its child, beside the first's."""
    shown = torch.eye(DRAFTS, dtype=torch.bool).repeat(3, 1, 1)
    shown[:, :, 0] = True
    shown[1, 3, 1] = shown[2, 3, 2] = True
    return shown


def flat_mask(full: bool) -> Tensor:
    """Masks as SGLang lays them: each request's drafts by all that it holds, or by drafts."""
    parts = []
    for n, shown in zip(VERIFY[0], tree(), strict=True):
        older = torch.ones(DRAFTS, n if full else 0, dtype=torch.bool)
        parts.append(torch.cat((older, shown), 1).flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("full", [True, False], ids=["FULL_MASK", "QLEN_ONLY"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_trees_of_drafts(graph: bool, full: bool, sglang: Any) -> None:
    spec = SimpleNamespace(custom_mask=flat_mask(full), num_tokens_per_req=DRAFTS)
    assert_pass(
        sglang, "TARGET_VERIFY", VERIFY, graph=graph, spec_info=spec,
        options={"tree_mask": tree().flatten(0, 1)},
    )  # fmt: skip


def test_chains_of_drafts_are_causal(sglang: Any) -> None:
    spec = SimpleNamespace(custom_mask=None, num_tokens_per_req=-1)
    assert_pass(sglang, "TARGET_VERIFY", VERIFY, page=4, graph=True, spec_info=spec)


def test_kernels(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "triton")
    spec = SimpleNamespace(custom_mask=flat_mask(True), num_tokens_per_req=DRAFTS)
    tree_mask = {"tree_mask": tree().flatten(0, 1), "window": 12}
    assert_pass(
        sglang, "TARGET_VERIFY", VERIFY, graph=True, spec_info=spec, options=tree_mask,
        layer={"sliding_window_size": 11},
    )  # fmt: skip


def test_keys_of_a_layer_that_shares_a_cache_are_not_stored(sglang: Any) -> None:
    server = Server(sglang)
    fb = server.batch("DECODE", *DECODE)
    server.backend.init_forward_metadata(fb)
    pool = server.runner.token_to_kv_pool.get_kv_buffer(LAYER)
    before = [x.clone().view(torch.uint8) for x in pool]
    q, k, v = server.new_tokens(*DECODE)
    server.backend.forward(q, k, v, server.layer(), fb, False)
    server.backend.forward(q, None, None, server.layer(), fb, True)
    assert all(map(torch.equal, before, (x.view(torch.uint8) for x in pool)))


# By what a layer, a call or a batch has.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"is_cross_attention": True}, {}, {}, "cross-attention"),
    ({"attn_type": "DECODER_BIDIRECTIONAL"}, {}, {}, "attn_type='decoder_bidirectional'"),
    ({"pos_encoding_mode": "ALIBI"}, {}, {}, "pos_encoding_mode='ALIBI'"),
    ({"logit_cap": 1.0, "logit_capping_method": "sin"}, {}, {}, "logit_capping_method='sin'"),
    ({"attn_type": "ENCODER_ONLY", "sliding_window_size": 3}, {}, {}, "a sliding window of an enc"),
    ({}, {"q_rope": torch.zeros(1)}, {}, "q_rope"),
    ({}, {}, {"encoder_lens": torch.zeros(3)}, "encoder_lens"),
    ({}, {}, {"spec_info": SimpleNamespace(kv_indptr=torch.zeros(4))}, "a draft model's own steps"),
]


@pytest.mark.parametrize(("layer", "kwargs", "batch", "named"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_a_pass_may_not_have_is_named(
    layer: dict[str, Any], kwargs: dict[str, Any], batch: Any, named: str, sglang: Any
) -> None:
    if "attn_type" in layer:
        layer = {**layer, "attn_type": getattr(sglang.AttentionType, layer["attn_type"])}
    server = Server(sglang)
    fb = server.batch("DECODE", *DECODE)
    vars(fb).update(batch)
    tokens, made = server.new_tokens(*DECODE), server.layer(**layer)
    with pytest.raises(NotImplementedError, match=f"does not support {named}.*attention-backend"):
        server.backend.init_forward_metadata(fb)
        server.backend.forward_decode(*tokens, made, fb, **kwargs)


SERVERS: dict[str, dict[str, Any]] = {
    "MLA": {"use_mla_backend": True},
    "a pool with a part for windows: give --disable-hybrid-swa-memory": {"swa_kv_pool": 1},
    "the unified pool": {"requires_physical_write_loc": True},
    "a pool of float8_e5m2": {"dtype": torch.float8_e5m2},
    "a pool of fp4": {"is_quantized_kv_cache": True},
}


@pytest.mark.parametrize("named", SERVERS)
def test_what_a_server_may_not_have_is_named(named: str, sglang: Any) -> None:
    runner, change = Server(sglang).runner, SERVERS[named]
    runner.token_to_kv_pool = SimpleNamespace(**{"dtype": torch.float16, "page_size": 1, **change})
    runner.use_mla_backend = "use_mla_backend" in change
    with pytest.raises(NotImplementedError, match=f"does not support {named}"):
        sglang.ATTENTION_BACKENDS["fastattn"](runner)


def test_graphs_of_prompts_are_refused_and_an_idle_pass_needs_no_metadata(sglang: Any) -> None:
    server = Server(sglang)
    server.backend.init_cuda_graph_state(5, 20)
    with pytest.raises(NotImplementedError, match="CUDA graphs of EXTEND"):
        server.backend.init_forward_metadata_out_graph(server.batch("EXTEND", *EXTEND))
    fb = server.batch("IDLE", *DECODE)
    server.backend.init_forward_metadata(fb)
    assert server.backend.forward_metadata is None


def test_the_class_has_sglangs_signatures(sglang: Any) -> None:
    backend = Server(sglang).backend
    for name, method in server_stubs.methods(sglang.AttentionBackend).items():
        if name in vars(type(backend).__mro__[1]) and name != "__init__":
            taken, asked = map(server_stubs.signature_of, (getattr(type(backend), name), method))
            named = [x for x in asked if x[1] is not inspect.Parameter.VAR_KEYWORD]
            assert taken[: len(named)] == named, name
    ends = {"DECODE": "POST_REPLAY", "TARGET_VERIFY": "POST_REPLAY", "EXTEND": "UNKNOWN"}
    for mode, end in ends.items():
        actual = backend.shared_read_ends(getattr(sglang.ForwardMode, mode))
        assert actual is getattr(sglang.SharedReadEnds, end)


def test_the_name_is_among_the_choices_once(sglang: Any) -> None:
    integration.register()
    for name in vars(sglang):
        if name.startswith(("ATTENTION_BACKEND_C", "DETERMINISTIC", "RADIX_SUPPORTED")):
            assert getattr(sglang, name).count("fastattn") == 1


def test_sglang_finds_the_door() -> None:
    assert server_stubs.entry_point("sglang.srt.plugins") == "fastattn.compat.sglang:register"
