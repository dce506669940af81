"""Calls that torch traces: one graph for all lengths, and what torch.jit makes of them."""

import io
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from nightly import gate_cases
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import fastattn
from fastattn import dispatch
from fastattn.compat.llama import LlamaAttention
from fastattn.compat.sdpa import scaled_dot_product_attention

B, D, WIDTH = 1, 8, 32
DEVICE = "cpu"  # of a test's tensors: see `backend`
LENGTHS = (6, 17, 19)


# What follows from the backend: a graph of sizes, of a cache, of offsets, of users' functions. The
# others have by day what they have in common.
BY_BOTH = (
    "test_functions_compile_for_all_sizes",
    "test_decoding_compiles_for_all_lengths",
    "test_users_functions_compile",
    "test_packed_sequences_compile_once",
    "test_packed_sequences_export_and_trace",
    "test_exports_for_all_lengths",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    by_both = metafunc.function.__name__ in BY_BOTH
    backends = ["torch", "triton"] if by_both else gate_cases(["torch"], ["triton"])
    metafunc.parametrize("backend", backends, indirect=True)


@pytest.fixture(autouse=True)
def backend(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setenv(dispatch.ENVIRONMENT, request.param)
    monkeypatch.setitem(globals(), "DEVICE", device if request.param == "triton" else "cpu")
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def heads(T: int, H: int = 4, T_k: int | None = None) -> tuple[Tensor, ...]:
    sizes = ((H, T), (2, T_k or T), (2, T_k or T))
    return tuple(torch.randn(B, *size, D, device=DEVICE) for size in sizes)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return fastattn.attention(q, k, v, causal=True, **options)


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call torch's function as models write it: both flags are comparisons of sizes."""
    causal, gqa = q.shape[2] > 1, q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)


def scaled_by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v, softcap=2.0, window=q.shape[2] // 2, query_offset=q.shape[2] - 1)


def measured(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With what torch's own function does not have."""
    o, largest = attend(q, k, v, softcap=2.0, return_max=True)
    return o * largest[..., None]


def packed(*lengths: int) -> tuple[Tensor, ...]:
    q, k, v = (x[0].transpose(0, 1) for x in heads(sum(lengths)))
    return q, k, v, torch.tensor([0, *lengths], device=DEVICE).cumsum(0)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    return fastattn.attention_varlen(q, k, v, offsets, causal=True)


def scored_packed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """With lse, and every option that has a gradient."""
    bias, sinks = k[:3, 0, :1].mT.expand(q.shape[1], 3), v[0, 0, :4]
    o, lse = fastattn.attention_varlen(
        q, k, v, offsets, relative_bias=bias, sinks=sinks, return_lse=True,
        relative_keys=k[:3].transpose(0, 1), relative_query=q * 2.0,
    )  # fmt: skip
    return o * lse.mT[..., None]


def tokens(T: int) -> tuple[Tensor, ...]:
    return (torch.randn(B, T, WIDTH, device=DEVICE),)


def layer(name: str) -> Callable[..., Tensor]:
    torch.manual_seed(0)
    if name == "MultiheadAttention":
        self_attention = fastattn.MultiheadAttention(WIDTH, 4, batch_first=True).to(DEVICE)
        return lambda x: self_attention(x, x, x, need_weights=False)[0]
    if name == "CrossGQAttention":
        cross = fastattn.CrossGQAttention(WIDTH, 4, 2).to(DEVICE)
        return lambda x: cross(x, x * 2.0)
    blocks = {"block_k": 4, "n": 2} if name == "MoBAttention" else {}
    return getattr(fastattn, name)(WIDTH, 4, 2, **blocks).to(DEVICE)


LAYERS = (
    "GQAttention",
    "CausalGQAttention",
    "CrossGQAttention",
    "MultiheadAttention",
    "MoBAttention",
)


def copies(given: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x in given]


def gradients(y: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.sin().sum(), [x for x in leaves if x.requires_grad])


def compiled_count(
    function: Callable[..., Tensor],
    inputs: list[tuple[Tensor, ...]],
    how: str,
    backend: str = "eager",
) -> int:
    """Compilations, once every call and its gradients were seen to be those of eager."""
    counter = CompileCounterWithBackend(backend)
    dynamic = True if how == "dynamic" else None
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    for given in inputs:
        leaves = copies(given)
        if how == "marked":
            for x in leaves:
                torch._dynamo.mark_dynamic(x, x.dim() - 2)
        again = copies(given)
        actual, expected = compiled(*leaves), function(*again)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(actual, leaves), gradients(expected, again))
    return counter.frame_count


# Graphs: one for the first sizes and one for all, or (marked, dynamic) for all at once; and once
# more where a number of heads is first seen to change, or two sizes that were equal differ.
@pytest.mark.parametrize(
    ("function", "how", "most"),
    [
        (attend, "automatic", 3),
        (torchs, "dynamic", 3),
        (scaled_by_length, "marked", 2),
    ],
)
def test_functions_compile_for_all_sizes(
    function: Callable[..., Tensor], how: str, most: int
) -> None:
    inputs = [heads(T, 2) for T in LENGTHS] + [heads(LENGTHS[-1], 4)]
    assert 1 <= compiled_count(function, inputs, how) <= most


def test_layers_compile_for_all_lengths(backend: str) -> None:
    layers = [layer(name) for name in LAYERS]
    stacked = Module(lambda x: torch.stack([each(x) for each in layers]))
    tracer = "aot_eager" if backend == "torch" else "eager"
    assert compiled_count(stacked, [tokens(T) for T in LENGTHS[1:]], "marked", tracer) == 1


def test_decoding_compiles_for_all_lengths() -> None:
    counter = CompileCounterWithBackend("eager")
    cache = fastattn.KVCache(B, 2, 64, D, device=DEVICE)
    compiled = torch.compile(
        lambda q, cache: fastattn.decode_attention(q, cache), fullgraph=True, backend=counter
    )
    for T in (6, 1, 1, 5, 5):
        q, k, v = heads(T)
        cache.append(k, v)
        q = q[:, :, :5]
        torch.testing.assert_close(compiled(q, cache), fastattn.decode_attention(q, cache))
    assert counter.frame_count <= 4


def test_steps_over_grown_caches_compile_for_all_lengths() -> None:
    counter = CompileCounterWithBackend("eager")
    llama = LlamaAttention(fastattn.CausalGQAttention(WIDTH, 4, 2)).to(DEVICE)
    compiled = torch.compile(llama, fullgraph=True, backend=counter)
    keys = values = None
    for T in (6, 1, 1, 1, 1):
        (x,) = tokens(T)
        expected = llama(x, None, True, keys, values)
        torch.testing.assert_close(compiled(x, None, True, keys, values), expected)
        keys, values = (cached.detach() for cached in expected[1:])
    # The prompt, the first step, and one for all that follow.
    assert counter.frame_count <= 3


@triton.jit
def near(b, h, q_pos, k_pos):
    return q_pos - k_pos < 4 * h


@triton.jit
def steeper(x, b, h, q_pos, k_pos):
    return 1.5 * x


@triton.jit
def steeper_grad(dx, x, b, h, q_pos, k_pos):
    return 1.5 * dx


@triton.jit
def by_row_and_head(b, h, q_pos, k_pos, reach):
    if h < 2:
        return q_pos - k_pos < tl.load(reach + b)
    return k_pos != q_pos - 2


# A branching mask takes a row and a head at a time; each of these needs its places in the whole.
USERS_MASKS = {
    "bare": {"mask_mod": near},
    "with-tables": {"mask_mod": fastattn.BlockMask(near, per_batch=False)},
    "branching": {"mask_mod": by_row_and_head},
    "of a part": {"mask_mod": by_row_and_head, "heads": (1, 6)},
}


@pytest.mark.parametrize("name", gate_cases(["bare", "with-tables", "of a part"], ["branching"]))
def test_users_functions_compile(name: str, backend: str) -> None:
    """In one graph for all lengths, whether a kernel takes them in or torch evaluates them."""
    mask = USERS_MASKS[name]
    reads = mask["mask_mod"] is by_row_and_head
    tensors = {"mod_tensors": (torch.tensor([3], device=DEVICE),)} if reads else {}
    scores = {} if reads else {"score_mod": steeper, "score_mod_grad": steeper_grad}

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, **mask, **tensors, **scores)

    # The kernels' operators are traced with gradients in the tests of operators.
    tracer = "aot_eager" if backend == "torch" else "eager"
    inputs = [heads(T) for T in (17, 19)]
    assert compiled_count(function, inputs, "marked", tracer) == 1


PACKS = ((4, 5), (3, 1, 6))


@pytest.mark.parametrize("function", [attend_packed, scored_packed])
def test_packed_sequences_compile_once(function: Callable[..., Tensor], backend: str) -> None:
    """Nothing of the graph depends on the offsets, on how many or on how long in all."""
    inputs = [packed(*lengths) for lengths in PACKS]
    # The kernels' operators are traced with gradients in the tests of operators.
    tracer = "aot_eager" if backend == "torch" else "eager"
    assert compiled_count(function, inputs, "dynamic", tracer) == 1


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("function", [attend_packed, scored_packed])
def test_packed_sequences_export_and_trace(function: Callable[..., Tensor]) -> None:
    total, starts = {0: Dim("total", min=4)}, {0: Dim("starts", min=2)}
    first = packed(*PACKS[0])
    exported = export(Module(function), first, dynamic_shapes=((total, total, total, starts),))
    traced = torch.jit.trace(function, first, check_trace=False)
    for lengths in PACKS[1:]:
        inputs = packed(*lengths)
        for called in (exported.module(), traced):
            torch.testing.assert_close(called(*inputs), function(*inputs))


class Module(nn.Module):
    """A function or a layer with one input, as a module that can be exported."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def choosing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fastattn.moba_attention(q, k, v, block_k=4, n=3)


@pytest.mark.parametrize("function", [attend, measured, choosing])
def test_exports_for_all_lengths(
    function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = function is not measured
    # torch 2.11 orders strides of a measured call's tensors by guards.
    guarded = function is measured and torch.__version__.startswith("2.11.")
    T = Dim.AUTO if function is choosing or guarded else Dim("T", max=4096)
    T_k = Dim("T_k", max=4096)
    keys, first = ({2: T_k}, heads(16, T_k=20)) if function is attend else ({2: T}, heads(16))
    with monkeypatch.context() as patch:
        # The tests' own function is traced with a warning, once a process.
        patch.setattr(Tensor, "new_empty", torch._C.TensorBase.new_empty)
        exported = export(
            Module(function), first, dynamic_shapes=(({2: T}, keys, keys),), strict=strict
        )
    # ONNX rounds quotients of negative sizes differently.
    assert operator.neg not in {x.target for x in exported.graph.nodes}
    for T_q, several in ((33, 33), (40, 41), (2, 9)):
        inputs = heads(T_q if function is attend else several, T_k=several)
        torch.testing.assert_close(exported.module()(*inputs), function(*inputs))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_what_torch_jit_traces_serves_other_lengths(backend: str) -> None:
    unserved = choosing if backend == "triton" else lambda *x: attend(*x, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="keep the sizes of this call for all others"):
        torch.jit.trace(unserved, heads(16))
    traced = torch.jit.trace(attend, heads(16), check_trace=False)
    for sizes in ((16, 4, 16), (33, 4, 33), (5, 4, 20), (16, 2, 16)):
        inputs = heads(*sizes)
        torch.testing.assert_close(traced(*inputs), attend(*inputs))
    if backend == "torch":  # the kernels have no fp64
        for function, inputs in ((attend, heads(5)), (attend_packed, packed(2, 3))):
            doubles = [x.double() if x.is_floating_point() else x for x in inputs]
            traced = torch.jit.trace(function, doubles, check_trace=False)
            assert torch.equal(traced(*doubles), function(*doubles))


def scriptable(name: str) -> nn.Module:
    if name == "alone":
        return fastattn.MultiheadAttention(WIDTH, 4, add_bias_kv=True, backend="torch")
    layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)
    fastattn.swap(layer)
    return layer


@pytest.mark.parametrize("name", ["alone", "encoder"])
def test_scripts_call_multihead_attention(name: str) -> None:
    module = scriptable(name).to(DEVICE)
    x = torch.randn(3, 5, WIDTH, device=DEVICE)
    inputs, options = {"alone": 3, "encoder": 1}[name] * (x,), {}
    if name == "encoder":
        # A row that sees nothing: NaN in torch's own attention, which must not serve here.
        padding = torch.tensor([[True], [False], [False]], device=DEVICE)
        options["src_key_padding_mask"] = padding.expand(3, 5)
    script = torch.jit.script(module)
    actual, expected = (m(*inputs, **options) for m in (script, module))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    o, eager = (y[0] if name == "alone" else y for y in (actual, expected))
    assert o.isfinite().all()
    parameters = list(module.parameters())
    grads = (torch.autograd.grad(y.sum(), parameters) for y in (o, eager))
    assert all(map(torch.equal, *grads))
    with pytest.raises(RuntimeError, match="Could not export Python function call '_attend'"):
        torch.jit.save(script, io.BytesIO())
