"""Features of torch around a model: transforms, selective checkpointing, graphs, determinism."""

from functools import partial

import pytest
import torch
import triton
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fastattn
from fastattn import kernels, reference
from fastattn.testing import make_qkv
from fastattn.torch_backend import formula

SIZES = {"B": 2, "H_q": 4, "H_k": 2, "T_q": 20, "D": 16}


def causal(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
    return fastattn.attention(q, k, v, causal=True, backend="triton", **options)


def loss(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> Tensor:
    return causal(q * 1.0, k, v, **options).float().sin().sum()


def test_functional_gradients(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels, though torch.func asks for gradients that can be differentiated again."""
    inputs = make_qkv(**SIZES, device=device)
    with monkeypatch.context() as patched:
        patched.delattr(formula, "attention")
        actual = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in inputs))
    for ours, expected in zip(actual, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_inputs_computed_from_one_another(backend: str, device: str) -> None:
    """Gradients with a graph count each way once, also those that lead from k over q."""
    x = make_qkv(1, 2, 2, 12, D=16, device=device)[0]

    def slope(attend, x):
        k = x.sin()
        o = attend(x, k, k, causal=True)
        return torch.autograd.grad(o.cos().sum(), x, create_graph=True)[0]

    ours = slope(partial(fastattn.attention, backend=backend), x)
    exact = x.detach().double().requires_grad_()
    expected = slope(reference.attention, exact)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
    ours, expected = (
        torch.autograd.grad(y.square().sum(), of)[0] for y, of in ((ours, x), (expected, exact))
    )
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_per_sample(masked: bool, device: str) -> None:
    """vmap over grad: gradients of each sample, here of two rows, as one call after another."""
    sizes = {**SIZES, "B": 6}
    q, k, v = (x.detach().unflatten(0, (3, 2)) for x in make_qkv(**sizes, device=device))
    v = v.movedim(0, 2)
    lengths = torch.tensor([[7, 20], [9, 3], [20, 1]], device=device) if masked else None

    def alone(q, k, v, lengths):
        o = fastattn.attention(q, k, v, causal=True, key_lengths=lengths, backend="triton")
        return o.sin().sum()

    together = torch.func.grad(alone, argnums=(0, 1, 2))
    dims = (0, 0, 2, 0 if masked else None)
    actual = torch.vmap(together, in_dims=dims, out_dims=(0, 0, 2))(q, k, v, lengths)
    for b in range(3):
        sample = (q[b], k[b], v[:, :, b], None if lengths is None else lengths[b])
        for ours, expected in zip(
            (actual[0][b], actual[1][b], actual[2][:, :, b]), together(*sample), strict=True
        ):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@triton.jit
def not_of_its_row(b, h, q_pos, k_pos):
    return (q_pos + k_pos) % 3 != b


# vmap calls torch's kernel for each entry, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_mapped_functions_count_the_rows_of_one_call(backend: str, device: str) -> None:
    inputs = [*make_qkv(**SIZES, device=device), torch.randn(4, 9, device=device)]
    inputs = [torch.stack([x, x + 1]).detach() for x in inputs]

    def alone(*x):
        options = {"mask_mod": not_of_its_row, "relative_bias": x[3], "backend": backend}
        return fastattn.attention(*x[:3], **options).sin().sum()

    gradients = partial(torch.func.grad, argnums=(0, 1, 2, 3))
    together, of_all = gradients(alone), gradients(lambda *x: torch.vmap(alone)(*x).sum())
    # In the second, the calls do not see that their bias has a gradient.
    for actual in (torch.vmap(together)(*inputs), of_all(*inputs)):
        for i, call in enumerate(zip(*inputs, strict=True)):
            for ours, expected in zip(actual, together(*call), strict=True):
                torch.testing.assert_close(ours[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [True, False])
def test_selective_checkpointing(kept: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy sees the forward op by its name, and one that keeps it saves the second run."""
    launches = []
    forward = kernels.forward
    launch = forward.launch_forward
    monkeypatch.setattr(
        forward, "launch_forward", lambda *args: launches.append(1) or launch(*args)
    )

    def policy(ctx, op, *args, **kwargs):
        mine = op is torch.ops.fastattn.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if mine and kept else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = make_qkv(**SIZES, device=device)
    o = checkpoint(
        loss,
        *inputs,
        use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )
    actual = torch.autograd.grad(o, inputs)
    assert len(launches) == (1 if kept else 2)
    for ours, expected in zip(actual, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        assert torch.equal(ours, expected)


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fastattn.attention(q, k, v, causal=True, backend="torch")


def exported_cases() -> list[tuple[nn.Module, tuple[Tensor, ...]]]:
    """Modules on torch, and inputs of few keys, for which NaN is looked for."""
    q, k, v = make_qkv(**SIZES, requires_grad=False)
    layer = fastattn.CausalGQAttention(32, 4, 2, backend="torch").eval()
    attend = Causal().eval()
    return [(attend, (q, k, v)), (attend, (q, q, q)), (layer, (torch.randn(2, 17, 32),))]


# Operators that onnxscript converts; it has none for aten.cummax.
IN_ONNX = """
__or__ _assert_tensor_metadata add any arange clamp cumsum flatten floor_divide gt index isnan
linear scaled_dot_product_attention to transpose unsqueeze view where
"""


def test_exported_graphs_have_operators_that_onnx_has() -> None:
    for module, inputs in exported_cases():
        graph = torch.export.export(module, inputs).graph
        used = {x.target.__name__.split(".")[0] for x in graph.nodes if x.op == "call_function"}
        assert "scaled_dot_product_attention" in used
        assert used <= set(IN_ONNX.split())


# Of torch's exporter.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_onnx_has_the_same_results() -> None:
    """And no more operators than torch's own function: no check for NaN, which Softmax keeps."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is no dependency of the tests")
    for module, inputs in exported_cases():
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
        assert "IsNaN" not in {node.op_type for node in program.model.graph}
        torch.testing.assert_close(program(*inputs)[0], module(*inputs))


@pytest.mark.gpu
def test_cuda_graphs_replay_forward_and_backward() -> None:
    inputs = make_qkv(**SIZES, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(loss(*inputs), inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = torch.autograd.grad(loss(*inputs), inputs)
    with torch.no_grad():
        for x in inputs:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for ours, expected in zip(actual, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        assert torch.equal(ours, expected)
