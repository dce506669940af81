"""Python functions over tensors as mask_mod and score_mod: they compute what torch does."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

import fastattn
from fastattn import BlockMask, attention, dispatch, mods, reference
from fastattn.block_mask import with_tensors
from fastattn.testing import make_qkv
from fastattn.testing.compare import assert_matches_reference
from fastattn.testing.compiling.compile_pool import CompilePool
from fastattn.torch_backend import triton_language

B, H, T = 2, 3, 12
CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 4, (B, T), generator=GENERATOR)
SHARED = torch.rand(H, T, 2 * T, generator=GENERATOR)
SMALL = torch.randint(0, 9, (7,), generator=GENERATOR, dtype=torch.int8)
FLAGS = torch.rand(T, generator=GENERATOR) < 0.5
HALF = torch.linspace(-2, 2, H).bfloat16()
FACTOR = torch.tensor(1.5)
WIDTH = 5


def places() -> triton_language.Places:
    q_pos, k_pos = (torch.arange(T, dtype=torch.int32) for _ in range(2))
    return triton_language.Places(0, B, 0, H, q_pos[None, None, :, None], k_pos[None, None, None])


def assert_as_torch(function: Callable[..., Any], *scores: Tensor) -> None:
    """Check the translation of a function at all indices."""
    option = "score_mod" if scores else "mask_mod"
    made = with_tensors({option: function}, CPU)
    if scores:
        actual = triton_language.score_mod(made[option], *scores, places(), made["mod_tensors"])
    else:
        actual = triton_language.mask_mod(made[option], places(), made["mod_tensors"])
    assert actual.dim() == 4
    expected = reference.applied(function, places(), (), *scores)
    torch.testing.assert_close(
        actual.expand(expected.shape), expected.to(actual.dtype), equal_nan=True
    )


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (IDS[b, i] == IDS[b, j])


def doubled(b: Any, h: Any, i: Any, j: Any) -> Any:
    """A mask like that of block diffusion."""
    return torch.where(i >= 6, (i - 6) // 3, i // 3) == torch.where(j >= 6, (j - 6) // 3, j // 3)


# Each line has something that no other line has.
MASKS: dict[str, Callable[..., Any]] = {
    "documents": documents,
    "blocks": doubled,
    "windows of heads": lambda b, h, i, j: (i - j).abs() < (h + 1) * 2,
    "a constant": lambda b, h, i, j: b.new_ones((), dtype=torch.bool),
    "nothing": lambda b, h, i, j: False,
    "torch's own joins": torchs.or_masks(
        torchs.and_masks(documents, lambda b, h, i, j: j > 1), lambda b, h, i, j: i == j
    ),
    "rows in rows": lambda b, h, i, j: SHARED[h][i, j] > SHARED[0][j][i + 1],
    "counted from the end": lambda b, h, i, j: FLAGS[i - T] | FLAGS[-1] & (SMALL[j % 7 - 7] > 4),
    "an index in an index": lambda b, h, i, j: SMALL[IDS[b, i] + 1] >= IDS[b, j] + SMALL[IDS[b, j]],
    "bools as numbers": lambda b, h, i, j: FLAGS[i] + FLAGS[j] * 2 + 1 == i - (b == 1) * j,
    "xor, shifts, ~": lambda b, h, i, j: ((i ^ j) >> 1 & 3 | ~j & 1 | 1 << b) % 3 == 0,
    "modulus of negatives": lambda b, h, i, j: (i - j) % WIDTH == (j - 2 * i) // -WIDTH % -3 + 4,
    "fractions": lambda b, h, i, j: (i - j) / 4 % 1.5 >= torch.floor((j - i) / 3.0) // 2 + 2,
    "rounding": lambda b, h, i, j: torch.div(i - j, 3, rounding_mode="trunc")
    == torch.round(j / 2) + torch.trunc((i - 3) / 2),
    "clamped": lambda b, h, i, j: (i.clamp(2, 9) - torch.clamp(j, max=7)).abs() <= 2,
    "logical": lambda b, h, i, j: torch.logical_or(torch.logical_not(i % 2), (i > j) ^ (b > 0)),
    "an element alone": lambda b, h, i, j: (i - j) * FACTOR < torch.tensor([4]) + HALF[h],
    "64 bits": lambda b, h, i, j: ((i + 300) ** 4 % 97 < 50) & (i - j < 2**31)
    ^ ((j << 31) // 2**30 > i),
    "one element": lambda b, h, i, j: FLAGS[-1],
    "numbers of numpy": lambda b, h, i, j: np.int64(9) - i > (i - j) * np.float32(1.5),
    "casts": lambda b, h, i, j: (i / 5).long() == (j.float() / 4).to(torch.int32) + b.to(i).bool(),
}  # fmt: skip
SCORES: dict[str, Callable[..., Any]] = {
    "softcap": lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
    "bias": lambda s, b, h, i, j: s + SHARED[h, i, i - j + T],
    "alibi": lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i),
    "product": lambda s, b, h, i, j: s * s * FACTOR - s**3 / 2 + 2.0**s,
    "choice": lambda s, b, h, i, j: torch.where(s > 0, torch.sqrt(s.abs() + 1), s.sigmoid()),
    "hidden": lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf),
    "no number": lambda s, b, h, i, j: torch.where(
        (s / (i - j)).isinf() | torch.isnan(j / s), h, s
    ),
    "one condition": lambda s, b, h, i, j: torch.where(b.new_ones((), dtype=torch.bool), s, h),
    "half": lambda s, b, h, i, j: s + HALF[h] * HALF[2 - h] + torch.rsub(s, 1, alpha=2),
    "weighed": lambda s, b, h, i, j: torch.add(s, torch.sub(i, j, alpha=3), alpha=2),
    "without the score": lambda s, b, h, i, j: i * 0.5,
    "a number": lambda s, b, h, i, j: 2,
    "other functions": lambda s, b, h, i, j: (
        s.erf() + torch.maximum(s, s.new_zeros(())).log1p() + s.sign() * s.square().rsqrt().relu()
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    assert_as_torch(MASKS[name])


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    scores = torch.randn(B, H, T, T, generator=torch.Generator().manual_seed(1))
    assert_as_torch(SCORES[name], scores)


INTEGERS = (
    *("b", "h", "i", "j", "1", "3", "-2", "8"),
    *("({0} + {1})", "({0} - {1})", "({0} * {1})", "({0} // {2})", "({0} % {2})", "abs({0})"),
    *("({0} * 2654435761)", "({0} * 70001)", "({0} - 3000000000)", "({0} >> 20)"),
    *("torch.minimum({0} * b.new_ones(()), {1} + 0 * h)", "torch.where({3}, {0}, {1})"),
    *("IDS[b, {0} % T]", "IDS[b][{0} % T - T]", "({3} * {0})", "({0} & 7)", "-{0}"),
)
BOOLS = (
    *("({0} < {1} + 0 * h)", "({0} >= h + {1})", "(b + {0} == {1})", "({0} != {1} + b)"),
    "FLAGS[{0} % T]",
    *("({3} & {4})", "({3} | {4})", "({3} ^ {4})", "~(h + {0} > {1})"),
)
DIVISORS = ("2", "3", "-4", "5", "8", "(h + 1)", "-(b + 2)")


def drawn(draw: random.Random, kinds: tuple[str, ...], depth: int) -> str:
    """A random expression."""
    if depth == 0:
        return draw.choice(INTEGERS[:8]) if kinds is INTEGERS else "(i > j)"
    return draw.choice(kinds).format(
        *(drawn(draw, INTEGERS, depth - 1) for _ in range(2)),
        draw.choice(DIVISORS),
        *(drawn(draw, BOOLS, depth - 1) for _ in range(2)),
    )


def test_drawn_expressions() -> None:
    """Signs, constants and dtypes in combinations that nobody chose."""
    draw = random.Random(0)
    for _ in range(150):
        text = f"lambda b, h, i, j: {drawn(draw, BOOLS, 3)}"
        try:
            assert_as_torch(eval(text))
        except AssertionError as error:
            raise AssertionError(text) from error


def test_kernels_take_what_was_drawn(device: str) -> None:
    """Several expressions in one function, and scores that are not of the score."""
    draw = random.Random(1)
    texts = [
        drawn(draw, BOOLS, 2).replace("IDS", "ids").replace("FLAGS", "flags") for _ in range(8)
    ]
    scope = {**globals(), "ids": IDS.to(device), "flags": FLAGS.to(device)}
    q, k, v = make_qkv(B, H, H, T, T, 16, device=device)
    for text, score in zip((texts[:4], texts[4:]), ("without the score", "a number"), strict=True):
        mask = eval(f"lambda b, h, i, j: (i == j) | {' ^ '.join(text)}", scope)
        how: dict[str, Any] = {"mask_mod": mask, "score_mod": SCORES[score]}
        expected = reference.attention(q, k, v, **how)
        o = attention(q, k, v, **how, backend="triton")
        torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-4)


def compiled_functions(names: list[tuple[str, str]]) -> None:
    """Launch, in a process that compiles."""
    q, k, v = (x.detach() for x in make_qkv(B, H, H, T, T, 64, dtype=torch.bfloat16))
    with mock.patch.object(dispatch, "why_no_kernel", lambda inputs: None):
        for mask, score in names:
            how: dict[str, Any] = {"mask_mod": MASKS[mask], "score_mod": SCORES[score]}
            attention(q, k, v, **how, backend="triton")


def test_what_was_translated_compiles(compile_pool: CompilePool) -> None:
    names = [("an index in an index", "without the score"), ("fractions", "other functions")]
    kernels = compile_pool.facts(f"{__file__}:compiled_functions", "sm_90", names=names)
    assert sum(fact.name == "attention_forward_kernel" for fact in kernels) == len(names)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_captured_tensors_learn(backend: str, device: str) -> None:
    """Tensors of scores do, also where a mask reads them too, and in fp64."""
    table, factor = torch.rand(H, 2 * T, dtype=torch.float64), torch.tensor(0.5)
    bound = torch.tensor(6.5)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(s) * factor + table.T[i - j + T, h] * bound

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() < bound

    leaves = [x.detach().to(device).requires_grad_() for x in (table, factor, bound)]
    table, factor, bound = leaves
    q, k, v = make_qkv(B, H, H, T, T, 16, device=device)
    how: dict[str, Any] = {"mask_mod": mask, "score_mod": score}
    assert_matches_reference(partial(attention, backend=backend), q, k, v, **how)
    o = attention(q, k, v, **how, backend=backend)
    grads = torch.autograd.grad(o.sin().sum(), leaves)
    expected = reference.attention(q, k, v, **how)
    plain = torch.autograd.grad(expected.sin().sum(), leaves, materialize_grads=True)
    torch.testing.assert_close(grads, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_call_takes_them(backend: str, device: str) -> None:
    """With @triton.jit functions, packed, over caches, and as a mask of blocks."""
    ids, slopes = IDS.to(device), torch.linspace(0.1, 0.9, H, device=device)
    q, k, v = make_qkv(B, H, H, T, T, 16, device=device)
    options: dict[str, Any] = {
        "mask_mod": lambda b, h, i, j: ids[b, i] == ids[b, j],
        "score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(),
    }
    o = attention(q, k, v, causal=True, **options, backend=backend)
    same = {"documents": ids, "alibi_slopes": slopes}
    torch.testing.assert_close(o, attention(q, k, v, causal=True, **same), atol=1e-5, rtol=1e-4)
    offsets = torch.arange(0, (B + 1) * T, T, device=device)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    packed = fastattn.attention_varlen(*rows, offsets, causal=True, **options, backend=backend)
    torch.testing.assert_close(packed.view(B, T, H, 16).transpose(1, 2), o)
    cache = fastattn.KVCache(B, H, T, 16, device=device, dtype=q.dtype)
    cache.append(k.detach(), v.detach())
    step = fastattn.decode_attention(q[:, :, -1:].detach(), cache, **options, backend=backend)
    torch.testing.assert_close(step, o[:, :, -1:], atol=1e-5, rtol=1e-4)
    joined = mods.and_masks(mods.causal, options["mask_mod"])
    for mask in (joined, BlockMask(joined), BlockMask(mods.or_masks(joined, joined))):
        given = {**options, "mask_mod": mask}
        torch.testing.assert_close(
            attention(q, k, v, **given, backend=backend), o, atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_sizes_are_data_and_objects_keep_their_tensors(backend: str, device: str) -> None:
    """Other lengths and tensors take the same function; calls in turn do not mix them up."""
    q, k, v = make_qkv(B, H, H, T, T, 16, device=device)
    masks, functions = [], set()
    for n in (0, 0, 1, 2):
        ids = IDS.roll(n + len(masks), 1)[:, : T - n].to(device)

        def own(b: Any, h: Any, i: Any, j: Any, ids: Tensor = ids) -> Any:
            return ids[b, i] == ids[b, j]

        functions.add(with_tensors({"mask_mod": own}, q.device)["mask_mod"])
        masks.append((BlockMask(own, per_head=False), ids))
        given = with_tensors({"mask_mod": masks[-1][0]}, q.device)["mask_mod"]
        assert given == masks[-1][0] and given.tables is masks[-1][0].tables
    assert len(functions) == 1
    for _ in range(2):
        for mask, ids in masks:
            short = [x[:, :, : ids.shape[1]] for x in (q, k, v)]
            expected = attention(*short, documents=ids)
            o = attention(*short, mask_mod=mask, backend=backend)
            torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-4)


def test_torch_compile_traces_what_was_translated() -> None:
    q, k, v = make_qkv(B, H, H, T, T, 16)
    call = torch.compile(attention, fullgraph=True, backend="aot_eager")
    score = mods.from_python(lambda s, b, h, i, j: s + SHARED[h, i, j])
    for option, x in (
        ("mask_mod", BlockMask(documents)),
        ("mask_mod", mods.from_python(doubled)),
        ("mask_mod", BlockMask(mods.and_masks(documents, lambda b, h, i, j: j > 1))),
        ("score_mod", score),
    ):
        o, plain = call(q, k, v, **{option: x}), attention(q, k, v, **{option: x})
        torch.testing.assert_close(o, plain)
        grads = (torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (o, plain))
        torch.testing.assert_close(*grads)
    with pytest.raises(Exception, match="must be translated before torch"):
        call(q, k, v, mask_mod=documents)
