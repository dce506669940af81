"""Judges of a case's results: the oracle, within the error budget."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from emulated_hopper import emulate_hopper, grid_of
from torch import Tensor

import fastattn
from fastattn import dispatch, reference
from fastattn.kernels import backward_dkv
from fastattn.kernels.launch import decode_splits, launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.testing import assert_matches_reference
from fastattn.testing.compare import DIFFERENTIABLE
from fastattn.testing.inputs import nan_filled_empty
from fastattn.torch_backend import additive, statistics

from . import caches, histories, others
from .block import attention_block
from .cases import LAYOUTS, ORDERS, Case, drawn, legal
from .tensors import inputs, offsets, poisoned, relaid
from .values import drawn_options


def check(case: Case) -> None:
    """Make the call and judge all that it returns, and its gradients.

    Raises:
        AssertionError: a result that is wrong. Any other error is one too: the call is legal.
    """
    with _setting(case), nan_filled_empty():
        _JUDGES[case.call](case)


def check_by_kernels(call: str, seed: int, device: str) -> None:
    """Check a call of which few are drawn, by the kernels; no cache is without rows."""
    if device != "cpu":
        pytest.skip("calls are drawn on a CPU, for the interpreter")
    case = drawn(seed, "triton")
    check(legal(replace(case, call=call, B=max(1, case.B))))


@contextlib.contextmanager
def _setting(case: Case) -> Iterator[None]:
    """Small tiles, and what the case's traits change."""
    with contextlib.ExitStack() as stack:
        if "environment" in case.traits:
            stack.enter_context(mock.patch.dict(os.environ, {dispatch.ENVIRONMENT: case.backend}))
        if case.backend == "hopper":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            emulate_hopper(patch, str(case.seed))
            stack.enter_context(grid_of(case.random("grid").choice(1, 3, 132)))
        if "chunks" in case.traits:
            limit = case.random("chunks").integer(1, 4) * case.B * case.H_q * case.T_k
            for module, name in ((statistics, "_SCORES"), (additive, "_HIDDEN")):
                stack.enter_context(mock.patch.object(module, name, limit))
        if case.backend == "triton":
            wide, long = TileConfig(*case.tile), TileConfig(*case.tile[::-1])
            stack.enter_context(
                tiles.forced(
                    forward=wide,
                    backward_dq=long,
                    backward_dkv=long,
                    backward_one_pass=wide,
                    relative=long,
                    decode=TileConfig(16, 16),
                    decode_chunk=TileConfig(16, 16),
                    one_launch=case.random("merge").choice(False, True),
                )
            )
            stack.enter_context(mock.patch.object(decode_splits, "_LOADS_OF_A_LAUNCH", 1 << 20))
            if "split" in case.traits:
                stack.enter_context(mock.patch.object(decode_splits, "MANY_KEYS", 1))
                # More rows than a tile of 16 has are a chunk, whatever it would cost.
                stack.enter_context(mock.patch.object(decode_splits, "_FEW_ROWS", 1))
                stack.enter_context(
                    mock.patch.object(decode_splits, "_chunk_pays", lambda *call: True)
                )
            if "parts" in case.traits:
                parts = case.random("parts").integer(1, case.G)
                launches.forget()
                stack.callback(launches.forget)
                dealt = mock.patch.object(backward_dkv, "head_parts", lambda *sizes: parts)
                stack.enter_context(dealt)
        yield


def _how(case: Case) -> dict[str, Any]:
    return {} if "environment" in case.traits else {"backend": case.backend}


def _compare(
    case: Case,
    function: Callable[..., Any],
    oracle: Callable[..., Any],
    starts: tuple[Tensor, ...] = (),
) -> None:
    rows = case.B if not starts else starts[0].shape[0] - 1
    options = drawn_options(case, rows)
    ours = _asked(case, _seeded(case, partial(function, **_how(case))))
    # The oracle's results of no sequences depend on nothing.
    theirs = _asked(case, _seeded(case, oracle), loose=bool(starts) and rows == 0)
    turned = replace(case, layouts=(*case.layouts[1:], case.layouts[0]))
    for turn in range(4 if "again" in case.traits else 1):
        # The last of them in other layouts.
        clean = _packed(inputs(turned if turn == 3 else case, f"/{turn}"), starts)
        tested = _with_poison(case, clean, options, starts)
        backward = case.learns and turn == 0
        assert_matches_reference(
            ours,
            *tested,
            *starts,
            clean=clean,
            oracle=theirs,
            backward=backward,
            orders=ORDERS,
            **options,
        )
        # The memo knows the next call by its layouts. The one after has other numbers.
        if turn == 1:
            options |= _other_numbers(drawn_options(case, rows, "/again"), options)


def _other_numbers(fresh: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options that are plain numbers, not tensors or functions, in both."""

    def plain(x: Any) -> bool:
        parts = x if isinstance(x, tuple) else (x,)
        return all(part is None or isinstance(part, (bool, int, float)) for part in parts)

    return {name: x for name, x in fresh.items() if plain(x) and plain(options[name])}


def _seeded(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, drawing the same seed of dropout at each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(case.seed)
        return function(*args, **kwargs)

    return call


def _asked(case: Case, function: Callable[..., Any], loose: bool = False) -> Callable[..., Any]:
    """The function, asked for what the case's traits say.

    Results and gradients that it is not asked for are 0. loose: so are those of inputs on which its
    results do not depend.
    """
    draw = case.random("asked")
    layout = draw.choice(*LAYOUTS)
    some = {name for name in ("q", "k", "v", *DIFFERENTIABLE) if draw.chance(0.5)}
    some = some if "some" in case.traits else set()
    with_lse = "o" not in case.traits

    def call(*args: Any, return_lse: bool, **options: Any) -> Any:
        inputs = dict(zip(("q", "k", "v"), args, strict=False)) | options
        leaves = {name: x for name, x in inputs.items() if getattr(x, "requires_grad", False)}
        inputs |= {name: inputs[name].detach() for name in some & inputs.keys()}
        tensors = (inputs.pop(name) for name in ("q", "k", "v"))
        actual = function(*tensors, *args[3:], **inputs, return_lse=with_lse)
        o, lse = actual if with_lse else (actual, _no_lse(case, actual))
        alone = "lse" in case.traits and with_lse
        o = o.detach() if alone else o
        if o.requires_grad:
            o.register_hook(partial(relaid, layout=layout, packed=case.packed))
        zero = _zero(x for name, x in leaves.items() if loose or alone or name in some)
        return o + zero.to(o.dtype), lse + (zero if with_lse else _zero(leaves.values()))

    return call


def _zero(leaves: Iterable[Tensor]) -> Tensor:
    """0 that depends on the tensors: gradients of what the function is not asked for."""
    never = torch.zeros((), dtype=torch.bool)
    return sum((torch.where(never, x, 0.0).sum().float() for x in leaves), torch.zeros(()))


def _no_lse(case: Case, o: Tensor) -> Tensor:
    return o.new_zeros(o.shape[:-1] if not case.packed else o.shape[1::-1])


def _packed(rows: tuple[Tensor, ...], starts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x[0].transpose(0, 1) for x in rows) if starts else rows


def _with_poison(
    case: Case, clean: tuple[Tensor, ...], options: dict[str, Any], starts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """q, k and v with NaN or inf in keys and values that no query may see, and in rows of no packed
    sequence.
    """
    if "nan" not in case.traits:
        return clean
    if starts:
        ids = [
            fastattn.document_ids(x, len(rows))[0] for x, rows in zip(starts, clean, strict=False)
        ]
        unseen = [x < 0 for x in ids]
        if "key_lengths" in options and len(starts[1]) > 1:
            place = torch.arange(len(ids[1])) - starts[1][ids[1]]
            unseen[1] |= place >= options["key_lengths"][ids[1]]
        of_rows = zip(clean, (*unseen, unseen[1]), strict=True)
        return tuple(x.masked_fill(rows[:, None, None], math.nan) for x, rows in of_rows)
    documents = options.get("documents")
    exists = reference.existing_keys(
        case.B, case.T_k, options.get("key_padding_mask"), options.get("key_lengths"),
        documents=documents[1] if isinstance(documents, tuple) else documents,
    )  # fmt: skip
    if exists.all():
        return clean
    q, k, v = clean
    draw = case.random("poison")
    return q, poisoned(k, exists, case.layouts[1], draw), poisoned(v, exists, case.layouts[2], draw)


def _attention(case: Case) -> None:
    _compare(case, fastattn.attention, reference.attention)


def _varlen(case: Case) -> None:
    one = replace(case, B=1) if case.B else replace(case, B=1, T_q=0, T_k=0)
    _compare(one, fastattn.attention_varlen, reference.attention_varlen, offsets(case))


def _block(case: Case) -> None:
    _compare(case, attention_block, reference.attention)


def _dot_product(case: Case) -> None:
    _compare(case, fastattn.dot_product_attention, partial(reference.attention, scale=1.0))


def _multiplicative(case: Case) -> None:
    draw = case.random("weight")
    shape = draw.choice((case.D, case.D), (case.H_q, case.D, case.D))
    weight = (draw.normal(*shape) / case.D**0.5).to(case.dtype)

    def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return fastattn.multiplicative_attention(q, k, v, weight, **options)

    def oracle(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return reference.attention(q @ weight.to(q.dtype).mT, k, v, scale=1.0, **options)

    _compare(case, ours, oracle)


def _selected(case: Case) -> None:
    draw = case.random("lists")
    of_q, of_k = block = draw.choice(1, 1, 3, 16), draw.choice(16, 32, 5, 1, 64)
    H_q, H_k, n = case.H_q, case.H_k, draw.integer(0, 5)
    lists = [x for x in range(1, H_q + 1) if not H_k % x or not (x % H_k or H_q % x)]
    shape = case.B, draw.choice(*lists), -(-case.T_q // of_q)
    indices = draw.integers(-1, -(-case.T_k // of_k) - 1, *shape, n)
    counts = draw.integers(0, n, *shape) if draw.chance(0.3) else None
    keep = reference.selected_mask(indices, block, H_q, case.T_q, case.T_k, counts)

    def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        given = {"block": block, "counts": counts, **options}
        return fastattn.selected_attention(q, k, v, indices, **given)

    _compare(case, ours, partial(reference.attention, attn_mask=keep))


_JUDGES: dict[str, Callable[[Case], None]] = {
    "attention": _attention,
    "attention_varlen": _varlen,
    "attention_block": _block,
    "dot_product_attention": _dot_product,
    "multiplicative_attention": _multiplicative,
    "selected_attention": _selected,
    "attention_statistics": lambda case: others.statistics(case, _how(case)),
    "additive_attention": lambda case: others.additive(case, _how(case)),
    "attention_fp8": lambda case: others.fp8(case, _how(case)),
    "attention_varlen_fp8": lambda case: others.varlen_fp8(case, _how(case)),
    "merge": lambda case: others.merge(case, _how(case)),
    "decode_attention": lambda case: caches.decode(case, _how(case)),
    "attention_paged": lambda case: caches.paged(case, _how(case)),
    "cascade_attention": lambda case: caches.cascade(case, _how(case)),
    "append": histories.judge,
}
