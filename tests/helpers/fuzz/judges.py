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
import torch.nn.functional as F
from emulated_hopper import emulate_hopper, grid_of
from torch import Tensor

import fastattn
from fastattn import dispatch, reference
from fastattn.functional import call_memo
from fastattn.kernels import backward_dkv
from fastattn.kernels.launch import decode_splits, launches, tiles
from fastattn.kernels.launch.tiles import TileConfig
from fastattn.options import LIKE_Q
from fastattn.testing import assert_matches_reference
from fastattn.testing.calls import CALLS, Made
from fastattn.testing.compare import DIFFERENTIABLE, assert_all_near, learned_names
from fastattn.testing.inputs import nan_filled_empty
from fastattn.testing.verify.scoring import assert_statistics, statistics_oracle
from fastattn.torch_backend import additive, dropout, formula, statistics, torch_attention
from fastattn.torch_backend.selected import selected_formula as selected

from . import caches, histories, mods
from .cases import DERIVED, FORMULA, LAYOUTS, ORDERS, Case, drawn, legal
from .derivatives import BY_FORMULA, by_levels, by_reverse, by_transform, derived
from .integrations import INTEGRATIONS, stand_in
from .tensors import assert_nan_stays, inputs, poisoned, relaid
from .values import VALUES, drawn_options


def check(case: Case) -> None:
    """Make the call and judge all that it returns, and its gradients.

    Raises:
        AssertionError: a result that is wrong. Any other error is one too: the call is legal.
    """
    with _setting(case), nan_filled_empty():
        JUDGES.get(case.call, _compare)(case)


def check_by_kernels(call: str, seed: int, device: str) -> None:
    """Check a call of which few are drawn, by the kernels."""
    if device != "cpu":
        pytest.skip("calls are drawn on a CPU, for the interpreter")
    check(legal(replace(drawn(seed, "triton"), call=call)))


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
            of_all = [(statistics, "_SCORES"), (additive, "_HIDDEN"), (selected, "_AT_ONCE")]
            sizes: dict[Any, int] = {(dropout, "_AT_ONCE"): limit // 8}
            sizes[formula, "_TOGETHER"] = limit * case.T_q // 8
            if "dropout" not in case.options or "dropout_seed" in case.options:
                # The oracle knows what torch draws at once.
                of_all += [(torch_attention, x) for x in ("_MOST", "_AT_ONCE", "_WITH_TANGENTS")]
                sizes[torch_attention, "_QUERIES"] = 1 + limit % 3
            for (module, name), size in (sizes | dict.fromkeys(of_all, limit)).items():
                stack.enter_context(mock.patch.object(module, name, size))
            call_memo.forget()
            stack.callback(call_memo.forget)
        if case.backend == "triton":
            wide, long = TileConfig(*case.tile), TileConfig(*case.tile[::-1])
            # dK and dV by a launch each, as where heads are wide.
            apart = TileConfig(*case.tile[::-1], apart=case.random("apart").chance(0.3))
            stack.enter_context(
                tiles.forced(
                    forward=wide,
                    backward_dq=long,
                    backward_dkv=apart,
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
            by_formula = FORMULA.intersection(case.options) or case.call == "flex_attention"
            if DERIVED & case.traits and not by_formula:
                for module, name in BY_FORMULA:
                    stack.enter_context(mock.patch.object(module, name, None))
            if "parts" in case.traits:
                parts = case.random("parts").integer(1, case.G)
                launches.forget()
                stack.callback(launches.forget)
                split = mock.patch.object(backward_dkv, "head_parts", lambda *sizes: parts)
                stack.enter_context(split)
        yield


def _how(case: Case) -> dict[str, Any]:
    return {} if "environment" in case.traits else {"backend": case.backend}


def _compare(case: Case, function: Callable[..., Any] | None = None) -> None:
    """Check the call, or a function that stands for it."""
    call = CALLS[case.call]
    if call.packed:  # a first row, of whose sequences there may be none
        case = replace(case, B=1) if case.B else replace(case, B=1, T_q=0, T_k=0)

    def make(of: Case, salt: str) -> Made:
        return call.make(case.random("arguments"), *inputs(of, salt))

    made = make(case, "")
    rows = len(made.beside["cu_seqlens_q"]) - 1 if call.packed else case.B
    options = drawn_options(case, rows)
    stands, oracle = function or call.function, call.oracle
    if case.learns_a_table:
        options["weight"] = options["mod_tensors"][0]
        stands, oracle = mods.learning(stands), mods.learning(oracle)
    turned = replace(case, layouts=(*case.layouts[1:], case.layouts[0]))
    for turn in range(4 if "again" in case.traits else 1):
        # The last of them in other layouts.
        made = make(turned if turn == 3 else case, f"/{turn}")
        ours = partial(case.call_of, stands, **_how(case), **made.alone)
        largest: list[Tensor] = []
        ours = _noting(ours, largest) if "max" in case.traits else ours
        ours = _cast(case.dtype, ours) if "autocast" in case.traits else ours
        ours, theirs = _dropping_alike(case, ours, oracle)
        called = ours
        ours = derived(case, ours, case.random("push").choice(by_levels, by_transform))
        theirs = derived(case, theirs, by_reverse)
        assert_matches_reference(
            _asked(case, ours),
            *_with_poison(case, made, options),
            clean=made.clean,
            oracle=_asked(case, theirs, loose=not rows and call.packed),
            backward=case.learns and turn == 0,
            orders=ORDERS,
            **made.beside,
            **_with_nan_where_hidden(case, options),
        )
        if largest and made.clean[1].numel():
            _assert_largest(case, made, options, largest[-1])
        if turn == 0:
            keys = dict(zip("kv", made.qkv[1:], strict=True))
            same = partial(called, **keys, **made.beside, **options)
            assert_nan_stays(case, made.qkv[0], same, options)
        # The memo knows the next call by its layouts. The one after has other numbers.
        if turn == 1:
            options |= _other_numbers(drawn_options(case, rows, "/again"), options)


def _noting(function: Callable[..., Any], largest: list[Tensor]) -> Callable[..., Any]:
    """The function with return_max, whose result is put aside."""

    def call(*args: Any, return_lse: bool, **options: Any) -> Any:
        *results, x = function(*args, return_lse=return_lse, return_max=True, **options)
        assert not x.requires_grad
        largest.append(x)
        return tuple(results) if return_lse else results[0]

    return call


def _assert_largest(case: Case, made: Made, options: dict[str, Any], largest: Tensor) -> None:
    """Check the largest score of each query: the largest weight is its exponential over the sum."""
    q, k, _ = made.clean
    T = k.shape[0 if case.packed else 2]
    units = torch.eye(T)[:, None] if case.packed else torch.eye(T)
    # None changes the largest score; a high sink would leave no weight in 16 bits.
    given = {name: x for name, x in options.items() if name not in _OF_WEIGHTS}

    def oracle(dtype: torch.dtype) -> Tensor:
        v = units.expand(*k.shape[:-1], T)
        oracle = CALLS[case.call].oracle
        rows = (x.detach().to(dtype) for x in (q, k, v))
        weights, lse = oracle(*rows, return_lse=True, **made.beside, **given)
        of_rows = weights.detach().amax(-1).log()
        return lse.detach() + (of_rows.T if case.packed else of_rows)

    exact = oracle(torch.float64)
    assert_all_near(("largest",), (largest,), (exact,), lambda: (oracle(case.dtype),), ORDERS)


def _other_numbers(fresh: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options that are plain numbers, not tensors or functions, in both."""

    def plain(x: Any) -> bool:
        parts = x if isinstance(x, tuple) else (x,)
        return all(part is None or isinstance(part, (bool, int, float)) for part in parts)

    return {name: x for name, x in fresh.items() if plain(x) and plain(options[name])}


def _cast(dtype: torch.dtype, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under autocast, of fp32 that this casts back, or of fp64, which it leaves."""
    wide = torch.promote_types(dtype, torch.float32)
    narrow = torch.bfloat16 if dtype is torch.float64 else dtype

    def call(*rows: Tensor, **given: Any) -> Any:
        given |= {name: x.to(wide) for name, x in given.items() if name in LIKE_Q}
        with torch.autocast("cpu", narrow):
            return function(*(x.to(wide) for x in rows), **given)

    return call


def _seeded(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, drawing the same seed of dropout at each call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(case.seed)
        return function(*args, **kwargs)

    return call


def _dropping_alike(
    case: Case, ours: Callable[..., Any], theirs: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both `_seeded`; where torch's function draws in ours, the oracle keeps what that keeps."""
    seeded = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal seeded
        with mock.patch.object(dropout, "draw_seed", wraps=dropout.draw_seed) as draw:
            result = _seeded(case, ours)(*args, **kwargs)
        seeded = draw.called
        return result

    def oracle(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dropout") and "dropout_seed" not in kwargs and not seeded:
            dtype = torch.promote_types(case.dtype, torch.float32)
            ones = torch.ones(*q.shape[:3], k.shape[2], dtype=dtype)
            kwargs["dropout_keep"] = _seeded(case, F.dropout)(ones, kwargs["dropout"]) > 0
        return _seeded(case, theirs)(q, k, *args, **kwargs)

    return call, oracle


def _asked(case: Case, function: Callable[..., Any], loose: bool = False) -> Callable[..., Any]:
    """The function, with what the case's traits request.

    Results and gradients that are not requested are 0. loose: so are those of inputs on which its
    results do not depend, as where there is no sequence.
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
        assert args[0].element_size() == 1 or o.dtype == args[0].dtype
        alone = "lse" in case.traits and with_lse
        o = o.detach() if alone else o
        if o.requires_grad:
            o.register_hook(partial(relaid, layout=layout, packed=case.packed))
        zero = _zero(x for name, x in leaves.items() if loose or alone or name in some)
        return o + zero.to(o.dtype), lse + (zero if with_lse else _zero(leaves.values()))

    return call


def _zero(leaves: Iterable[Tensor]) -> Tensor:
    """0 that depends on the tensors: gradients that are not requested."""
    never = torch.zeros((), dtype=torch.bool)
    return sum((torch.where(never, x, 0.0).sum().float() for x in leaves), torch.zeros(()))


def _no_lse(case: Case, o: Tensor) -> Tensor:
    return o.new_zeros(o.shape[:-1] if not case.packed else o.shape[1::-1])


def _with_poison(case: Case, made: Made, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """q, k and v with NaN or inf in keys and values that no query may see, and in rows of no packed
    sequence; codes as they are.
    """
    if "nan" not in case.traits or made.alone:
        return made.qkv
    q, k, v = made.qkv
    if case.packed:
        starts = tuple(made.beside.values())
        ids = [
            fastattn.document_ids(x, len(rows))[0] for x, rows in zip(starts, (q, k), strict=True)
        ]
        unseen = [x < 0 for x in ids]
        if "key_lengths" in options and len(starts[1]) > 1:
            place = torch.arange(len(k)) - starts[1][ids[1]]
            unseen[1] |= place >= options["key_lengths"][ids[1]]
        of_rows = zip((q, k, v), (*unseen, unseen[1]), strict=True)
        return tuple(x.masked_fill(rows[:, None, None], math.nan) for x, rows in of_rows)
    documents = options.get("documents")
    exists = reference.existing_keys(
        case.B, case.T_k, options.get("key_padding_mask"), options.get("key_lengths"),
        documents=documents[1] if isinstance(documents, tuple) else documents,
    )[:, None]  # fmt: skip
    if "indices" in made.beside:  # of blocks that no list names
        named = reference.selected_mask(H_q=case.H_q, T_q=case.T_q, T_k=case.T_k, **made.beside)
        exists = exists & named.unflatten(1, (case.H_k, -1)).any(3).any(2)
    if exists.all():
        return made.qkv
    draw = case.random("poison")
    return q, *(
        poisoned(x, exists, layout, draw)
        for x, layout in zip((k, v), case.layouts[1:], strict=True)
    )


# What changes weights alone, or is no option.
_OF_WEIGHTS = ("dropout", "dropout_seed", "sinks", "weight")
# Options that say which keys a query sees.
_MASKS = frozenset(
    ("causal", "window", "keep_first", "stride", "mask_mod", "mod_tensors", "prefix_lengths",
     "key_lengths", "query_offset", "attn_mask", "key_padding_mask", "documents", "positions",
     "heads")
)  # fmt: skip


def _with_nan_where_hidden(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Options of the case, with attn_bias NaN where no query sees the key."""
    bias = options.get("attn_bias")
    if bias is None or "nan" not in case.traits:
        return options
    q, k = torch.zeros(case.B, case.H_q, case.T_q, 1), torch.zeros(case.B, 1, case.T_k, 1)
    each_key = torch.eye(case.T_k).expand(case.B, 1, -1, -1)
    masks = {name: x for name, x in options.items() if name in _MASKS}
    seen = reference.attention(q, k, each_key, **masks).sum_to_size(bias.shape) != 0
    return options | {"attn_bias": bias.masked_fill(~seen, math.nan)}


def _statistics(case: Case) -> None:
    """Entropy, weight received, the largest weights, all of them, and two derivatives of these."""
    q, k, _ = inputs(case)
    backend, options = _how(case).get("backend"), drawn_options(case, case.B)
    assert_statistics(q, k, backend, options)
    if "autocast" in case.traits:
        plain = fastattn.attention_statistics(q, k, backend=backend, **options)
        cast = _cast(case.dtype, fastattn.attention_statistics)(q, k, backend=backend, **options)
        assert all(map(torch.equal, plain, cast))
    alike = case.layouts[1] == "one-token"  # of equal keys any may be among the largest
    if "forward" in case.traits or case.dtype is not torch.float32 or alike:
        return
    tensors = {"q": q, "k": k}
    tensors |= {name: options.pop(name) for name in learned_names(options)}

    def ours(**given: Any) -> tuple[Tensor, ...]:
        actual = fastattn.attention_statistics(**given, **options, top=2, backend=backend)
        weights = fastattn.attention_weights(**given, **options, backend=backend)
        return actual.entropy, actual.received, actual.top_weights, actual.distance, weights

    def oracle(**given: Any) -> tuple[Tensor, ...]:
        entropy, received, weights, distance = statistics_oracle(**given, **options)
        top = weights.topk(min(2, case.T_k)).values
        return entropy, received, top, distance, weights

    def derived(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}
        entropy, received, top, distance, weights = function(**leaves)
        loss = weights.exp().sum() + entropy.sin().sum() + distance.sin().sum()
        loss = loss + (received.cos() + top.square().sum((-1, -2))[..., None]).sum()
        grads = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
        squares = sum(x.square().sum() for x in grads)
        return [*grads, *torch.autograd.grad(squares, [*leaves.values()])]

    exact = derived(oracle, torch.float64)
    names = [f"{order} gradient of {name}" for order in ("first", "second") for name in tensors]
    assert_all_near(
        names, derived(ours, case.dtype), exact, partial(derived, oracle, case.dtype), ORDERS
    )


def _merge(case: Case) -> None:
    """Two parts, each of which may have seen nothing, some of it NaN then."""
    draw = case.random("merge")
    shape = (case.B, case.H_q, case.T_q)
    lse_dtype = torch.float64 if case.dtype is torch.float64 else torch.float32
    given, plain = [], []
    for _ in range(2):
        o = draw.normal(*shape, case.D_v).to(case.dtype)
        blind = draw.bools(0.2, *shape)
        lse = (draw.normal(*shape) * draw.choice(1.0, 50.0)).masked_fill(blind, -torch.inf)
        spoilt = o.masked_fill(blind[..., None], torch.nan) if "nan" in case.traits else o
        given += [spoilt, lse.to(lse_dtype)]
        plain += [o, lse.to(lse_dtype)]
    call = CALLS["merge"]
    tested = _with_gradients(partial(call.function, **_how(case)), case, given)
    exact = _with_gradients(call.oracle, case, [x.double() for x in plain])
    names = ("o", "lse", "do1", "dlse1", "do2", "dlse2")[: len(exact)]

    def naive() -> tuple[Tensor, ...]:
        return _with_gradients(call.oracle, case, plain)

    assert_all_near(names, tested, exact, naive, ORDERS)


def _with_gradients(
    function: Callable[..., Any], case: Case, given: list[Tensor]
) -> tuple[Tensor, ...]:
    """The results, and unless the case is one of the forward alone the gradients of all inputs."""
    if "forward" in case.traits:
        actual: tuple[Tensor, ...] = function(*given)
        return actual
    leaves = [x.detach().requires_grad_() for x in given]
    results = function(*leaves)
    draw = case.random("gradients")
    grads = [draw.normal(*x.shape).bfloat16().to(x.dtype) for x in results]
    return (*results, *torch.autograd.grad(results, leaves, grads))


def _integration(case: Case) -> None:
    with mock.patch.dict(VALUES, INTEGRATIONS[case.call].values):
        _compare(*stand_in(case))


# Of functions that are called in other ways.
JUDGES: dict[str, Callable[[Case], None]] = {
    "attention_statistics": _statistics,
    "merge": _merge,
    "decode_attention": lambda case: caches.decode(case, _how(case)),
    "attention_paged": lambda case: caches.paged(case, _how(case)),
    "cascade_attention": lambda case: caches.cascade(case, _how(case)),
    "append": histories.judge,
    "flash_attn_with_kvcache": lambda case: caches.with_kvcache(case),
    **dict.fromkeys(INTEGRATIONS, _integration),
}
