"""The custom ops in torch's machinery: registration, compile, export, checkpointing."""

import shutil

import pytest
import torch
import triton
from nightly import gate_cases
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastattn
from fastattn.ops import attention_ops, schema, torch_varlen
from fastattn.options import Options
from fastattn.testing import make_qkv

SIZES = {"B": 2, "H_q": 4, "H_k": 2, "T_q": 20, "D": 16}


def causal(q, k, v):
    return fastattn.attention(q, k, v, causal=True, backend="triton")


def output_and_gradients(function, inputs):
    o = function(*inputs)
    return (o.detach(), *torch.autograd.grad(o.float().sin().sum(), inputs))


# torch's own inductor still imports what torch deprecates.
@pytest.mark.parametrize("backend", gate_cases(["eager", "aot_eager"], ["inductor"]))
def test_compiles_as_one_graph(backend: str, device: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor compiles with a C++ compiler, and none is installed")

    def model(q, k, v):
        return causal(q * 2.0, k, v) * 0.5

    torch._dynamo.reset()
    inputs = make_qkv(**SIZES, device=device)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for ours, eager in zip(
        output_and_gradients(compiled, inputs), output_and_gradients(model, inputs), strict=True
    ):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def test_fp32_products_follow_torchs_tf32_switch() -> None:
    from fastattn.kernels.launch.arguments import dot_precision

    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        switch.fp32_precision = "ieee"
        assert dot_precision(torch.float32) == "ieee"
        switch.fp32_precision = "tf32"
        assert dot_precision(torch.float32) == "tf32"
        assert dot_precision(torch.bfloat16) == "ieee"
    finally:
        switch.fp32_precision = before


def test_a_traced_function_must_have_a_name(device: str) -> None:
    @triton.jit
    def local(b, h, q_pos, k_pos):
        return q_pos == k_pos

    q, k, v = make_qkv(**SIZES, device=device)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="top level"):
        attention_ops.attention_forward.op(q, k, v, *schema.flat(Options(mask_mod=local)))


def test_tracers_see_the_op(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The kernels themselves would be invisible to these, or fail in them."""
    seen = []
    op = attention_ops.attention_forward.op

    def counted(*arguments):
        seen.append("op")
        return op(*arguments)

    monkeypatch.setattr(attention_ops.attention_forward, "op", counted)
    inputs = [x.detach() for x in make_qkv(**SIZES, device=device)]
    causal(*inputs)
    assert seen == []
    with FakeTensorMode():
        causal(*(torch.empty(2, 4, 20, 16, device=device) for _ in range(3)))
    assert seen == ["op"]
    torch.vmap(causal)(*(x[None] for x in inputs))
    assert seen == ["op"] * 2
    graph = make_fx(causal)(*inputs)
    assert seen == ["op"] * 3
    assert any("attention_forward" in str(node.target) for node in graph.graph.nodes)


def test_packed_ops_of_the_torch_backend_are_registered_right(device: str) -> None:
    sizes = {**SIZES, "D_v": 8, "device": device}
    q, k, v = (x[:1].detach().requires_grad_() for x in make_qkv(**sizes))
    heads, (T_q, T_k) = q.shape[1], (q.shape[2], k.shape[2])
    offsets = [torch.tensor([0, 2, T, T], device=device) for T in (T_q, T_k)]
    bias = torch.randn(heads, 3, device=device, requires_grad=True)
    how = {"relative_bias": bias, "causal": True, "scale": 0.25}
    options = Options(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], query_offset=None, **how)
    flat = schema.flat(options)
    torch.library.opcheck(torch_varlen.varlen_forward, (q, k, v, *flat))
    torch.library.opcheck(torch_varlen.varlen_forward_lse, (q, k, v, *flat))
    o, lse = torch_varlen.varlen_forward_lse(q, k, v, *flat)
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    expected = fastattn.reference.attention_varlen(*rows, *offsets, **how)
    firsts = [torch.autograd.grad(x.sin().sum(), q, create_graph=True) for x in (o, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), q) for (x,) in firsts))
    flat = schema.flat(options._replace(relative_bias=bias.detach()))
    inputs = (x.detach() for x in (o, lse, q, k, v))
    torch.library.opcheck(torch_varlen.varlen_backward, (*inputs, *flat))
