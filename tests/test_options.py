"""The table of options: what follows from it, and in how few places an option stands.

`python tests/test_options.py` writes what type checkers read from it: `fastattn/arguments.pyi` and
the package's stub, `fastattn/__init__.pyi`.
"""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import attention, checks
from fastattn.checks import FOREIGN
from fastattn.functional import warmup
from fastattn.functional.call_options import dense_options
from fastattn.options import CALLS, EXPECTED, OPTIONS, TENSORS, Options
from fastattn.testing import make_qkv
from fastattn.testing.option_examples import option_examples
from fastattn.testing.verify import caches

CHECKOUT = Path(__file__).resolve().parents[1]
ARGUMENTS = CHECKOUT / "fastattn" / "arguments.pyi"
STUB = CHECKOUT / "fastattn" / "__init__.pyi"
TAKEN_BY = {call: {x: row for x, row in OPTIONS.items() if call in row.calls} for call in CALLS}
q, k, v = make_qkv(B=1, H_q=2, H_k=1, T_q=4, T_k=4, D=16, requires_grad=False)
NONE = torch.full((1, 1, 4, 1), -1)


def cache() -> fastattn.KVCache:
    kv_cache = fastattn.KVCache(1, 1, 8, 16)
    kv_cache.append(k, v)
    return kv_cache


def packed() -> tuple[torch.Tensor, ...]:
    return (*(x[0].transpose(0, 1) for x in (q, k, v)), torch.tensor([0, 4]))


def paged() -> tuple[Any, ...]:
    return (q[0].transpose(0, 1), cache(), torch.tensor([0, 4]))


CALLS: dict[str, Any] = {
    "attention": lambda **given: attention(q, k, v, **given),
    "explain": lambda **given: fastattn.explain(q, k, v, **given),
    "attention_varlen": lambda **given: fastattn.attention_varlen(*packed(), **given),
    "decode_attention": lambda **given: fastattn.decode_attention(q, cache(), **given),
    "explain_decode": lambda **given: fastattn.explain_decode(q, cache(), **given),
    "attention_paged": lambda **given: fastattn.attention_paged(*paged(), **given),
    "explain_paged": lambda **given: fastattn.explain_paged(*paged(), **given),
    "attention_fp8": lambda **given: fastattn.attention_fp8(q, k, v, **given),
    "explain_fp8": lambda **given: fastattn.explain_fp8(q, k, v, **given),
    "additive_attention": lambda **given: fastattn.additive_attention(q, k, v, q[0, 0, 0], **given),
    "selected_attention": lambda **given: fastattn.selected_attention(q, k, v, NONE, **given),
    "explain_selected": lambda **given: fastattn.explain_selected(q, k, v, NONE, **given),
    "attention_statistics": lambda **given: fastattn.attention_statistics(q, k, **given),
    "dot_product_attention": lambda **given: fastattn.dot_product_attention(q, k, v, **given),
}


def test_rows_and_fields_agree() -> None:
    for name, row in OPTIONS.items():
        for field in row.fields or (name,):
            assert field in Options._fields, name
    given = {field for name, row in OPTIONS.items() for field in row.fields or (name,)}
    of_calls = {"cu_seqlens_q", "cu_seqlens_k", "fp32_results", "tree_mask", "tree_starts"}
    assert set(Options._fields) - given == of_calls


@pytest.mark.parametrize("name", OPTIONS)
def test_who_refuses_an_option_says_why(name: str) -> None:
    row = OPTIONS[name]
    assert ("attention_varlen" in row.calls) == (not row.packed)
    assert ("decode_attention" in row.calls) == (not row.cache)
    assert ("attention_paged" in row.calls) <= (not row.cache)
    assert "attention_paged" in row.calls or row.cache or row.packed


def spelled(hint: Any) -> str:
    """A type as it is written in a signature."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return text.replace("torch.", "").replace("typing.", "")


def type_of(call: str) -> str:
    """Name of the type of a call's options in `fastattn/arguments.pyi`."""
    return call.title().replace("_", "") + "Arguments"


def typed_signatures() -> str:
    """The text of `fastattn/arguments.pyi`: the options of each call, for type checkers."""
    lines = [
        '"""Options of each call, for type checkers: written from the table of options."""',
        "",
        "from typing import Any, TypedDict",
        "",
        "from torch import Tensor",
    ]
    for call, rows in TAKEN_BY.items():
        lines += ["", f"class {type_of(call)}(TypedDict, total=False):"]
        lines += [f'    """Options of `{call}`; see there."""', ""]
        lines += [f"    {option}: {spelled(row.type)}" for option, row in rows.items()]
    return "\n".join(lines) + "\n"


# What a call returns by its flags: with a literal, and with a bool that is known at run time.
RESULTS = {
    "return_lse: Literal[False] = ...": "Tensor",
    "return_lse: Literal[True]": "tuple[Tensor, Tensor]",
    "return_lse: bool": "Tensor | tuple[Tensor, Tensor]",
}
WITH_MAX = {
    **{f"{flag}, return_max: Literal[False] = ...": x for flag, x in RESULTS.items()},
    "return_lse: bool = ..., return_max: Literal[True]": "tuple[Tensor, ...]",
    "return_lse: bool = ..., return_max: bool": "Tensor | tuple[Tensor, ...]",
}


HEADER = '''"""Public names for type checkers: written by tests/test_options.py."""

# ruff: noqa: I001
# fmt: off
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from .functional.merge import SharedPages
from .functional.paged import TreeMask'''
EXPLAINED = {
    "explain": "attention",
    "explain_decode": "decode_attention",
    "explain_paged": "attention_paged",
    "explain_fp8": "attention_fp8",
    "explain_selected": "selected_attention",
}


def stub() -> str:
    """The text of `fastattn/__init__.pyi`: public names, and a call's results by its flags."""
    tree = ast.parse(STUB.with_suffix(".py").read_text(encoding="utf-8"))
    imports = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom) and x.level]
    names = [x for x in fastattn.__all__ if EXPLAINED.get(x, x) in TAKEN_BY]
    lines = [HEADER, f"from .arguments import {', '.join(map(type_of, TAKEN_BY))}  # noqa: E501"]
    lines += [*(ast.unparse(x) for x in imports if x.names[0].name not in names)]
    lines += ["", "__version__: str", "tune: Callable[..., Any]", "verify: Callable[..., Any]"]
    lines += textwrap.wrap(f"__all__ = {fastattn.__all__}", 99, subsequent_indent="    ")
    for name in names:
        lines += ["", *declarations(name, getattr(fastattn, name))]
    return "\n".join(lines) + "\n"


def declarations(name: str, function: Any) -> Iterator[str]:
    """Lines of a function's declaration, or of its overloads if it returns an lse on request."""
    (source,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(source, ast.FunctionDef) and source.returns is not None
    options = f"**options: Unpack[{type_of(EXPLAINED.get(name, name))}]"
    own = source.args
    assert own.kwarg is not None
    defaults = [None] * (len(own.args) - len(own.defaults)) + [*own.defaults]
    given = [_declared(x, y) for x, y in zip(own.args, defaults, strict=True)] + ["*"]
    flags = ("return_lse", "return_max")
    explains = ast.unparse(source.returns) == "Explanation"
    for x, y in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        if explains or x.arg not in flags:
            given.append(_declared(x, y))
    results = WITH_MAX if any(x.arg == "return_max" for x in own.kwonlyargs) else RESULTS
    for flag, result in {"": "Explanation"}.items() if explains else results.items():
        text = ", ".join([*given, flag, options] if flag else [*given, options])
        yield from [] if explains else ["@overload"]
        yield f"def {name}("
        yield from textwrap.wrap(text, 94, initial_indent="    ", subsequent_indent="    ")
        yield f") -> {result}: ..."


def _declared(parameter: ast.arg, default: ast.expr | None) -> str:
    assert parameter.annotation is not None
    text = f"{parameter.arg}: {ast.unparse(parameter.annotation)}"
    return text if default is None else f"{text} = ..."


def test_type_checkers_know_every_option_of_every_call() -> None:
    assert ARGUMENTS.read_text(encoding="utf-8") == typed_signatures()
    assert STUB.read_text(encoding="utf-8") == stub()


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_option_is_refused_with_the_closest_known_one(call: str) -> None:
    with pytest.raises(TypeError, match=r"unexpected argument 'windows'; did you mean 'window'\?$"):
        CALLS[call](windows=3)
    with pytest.raises(TypeError, match=r"unexpected argument 'zzz'$"):
        CALLS[call](zzz=3)
    with pytest.raises(TypeError, match=r"'is_causal'; did you mean 'causal'\?$"):
        CALLS[call](is_causal=True)


def test_names_of_other_libraries_are_no_names_here_and_stand_for_options() -> None:
    assert not FOREIGN.keys() & OPTIONS.keys()
    of_layers = {"memory_padding_mask", "rotary_tables", "cache"}
    assert {name for ours in FOREIGN.values() for name in ours} - of_layers <= OPTIONS.keys()
    # What users of flash-attn and torch write first.
    flash = ("softmax_scale", "dropout_p", "window_size", "s_aux")
    assert [FOREIGN[name][0] for name in flash] == ["scale", "dropout", "window", "sinks"]


SIZES = {
    "B": 2,
    "H_q": 4,
    "T_q": 3,
    "D": 8,
    "H_k": 2,
    "T_k": 5,
    "D_v": 8,
    "H_k2": 1,
    "D2": 6,
    "H": 1,
}
SIZES |= {"total_q": 3, "total_k": 5, "2R+1": 5, "2": 2}
OF_ONE = {field: name for name, row in OPTIONS.items() for field in row.fields or (name,)}


def drawn(dtype: str, dims: str) -> Tensor:
    shape = [SIZES[dim.strip("[]()?")] for dim in dims.split()]
    kind = {"integer": "int64", "float": "float16", "as q": "float32"}.get(dtype, dtype)
    return torch.arange(shape[-1]).expand(shape).to(getattr(torch, kind))


def wrong(
    x: Tensor, dims: str, free: tuple[str, ...] = ()
) -> Iterator[tuple[type[Exception], Tensor]]:
    """Tensors that differ from x in one thing, each with the error that it is refused by."""
    yield TypeError, x.to(torch.int16)
    yield ValueError, x.to("meta")
    yield ValueError, x[(None,) * (5 - x.dim())]
    if x.dim() > 1 and not {"[", "?"} & set(dims):  # a number is another form
        yield ValueError, x[0]
    for axis, dim in enumerate(dims.split()):
        if dim not in free:
            n = x.shape[axis]
            other = {n + 1 if dim in ("2R+1", "H_q") else n + 2}
            if dim[-1] not in ")]1":
                other |= {1} - {n}
            for size in other:
                yield ValueError, x.new_zeros((*x.shape[:axis], size, *x.shape[axis + 1 :]))


@pytest.mark.parametrize("field", [field for field in OF_ONE if field in TENSORS])
def test_a_tensor_that_is_not_as_its_tags_say_is_refused_by_name(field: str) -> None:
    q, k, v = (drawn("float32", dims) for dims in checks.DENSE)
    name, (dtype, dims, _) = OF_ONE[field], EXPECTED[field]
    row = OPTIONS[name]
    others = {"causal": True} | {x: drawn(*EXPECTED[x][:2]) for x in (row.needs,) if x}

    def call(x: Tensor) -> None:
        given = {name: x}
        if row.fields and "q_" in row.fields[0]:
            parts = {part: drawn(*EXPECTED[part][:2]) for part in row.fields} | {field: x}
            given = {name: tuple(parts.values())}
        dense_options(q, k, v, **others, **given)

    call(drawn(dtype, dims))
    for error, x in wrong(drawn(dtype, dims), dims):
        with pytest.raises(error, match=f"^({name}|{row.needs or name})"):
            call(x)


@pytest.mark.parametrize("layout", [checks.DENSE, checks.PACKED])
def test_inputs_that_are_not_as_their_layout_says_are_refused(layout: checks.Layout) -> None:
    qkv = [drawn("float32", dims) for dims in layout]
    for n, dims in enumerate(layout):
        for error, x in wrong(qkv[n], dims, ("T_q", "total_q", "D_v")):
            given = [*qkv[:n], x, *qkv[n + 1 :]]
            with pytest.raises(error, match=r"^[qkv]"):
                checks.check_tensors(*given, layout)
                checks.check_qkv(*given, layout)


@pytest.mark.parametrize("name", TAKEN_BY)
def test_help_shows_every_option_with_its_default(name: str) -> None:
    function = getattr(fastattn, name)
    parameters = inspect.signature(function).parameters
    taken = TAKEN_BY[name]
    assert taken.keys() <= parameters.keys()
    assert not any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    for option, row in taken.items():
        default = parameters[option].default
        caches = ("decode_attention", "attention_paged")
        causal_by_default = name in caches and option == "causal"
        assert default is (True if causal_by_default else row.default)
        assert parameters[option].annotation == row.type


def tensors_of(field: str) -> bool:
    return get_type_hints(Options)[field] in (torch.Tensor | None, Any)


@pytest.mark.parametrize("field", Options._fields)
def test_only_numbers_are_plain(field: str) -> None:
    """Tensors, which kernels read through pointers, are not plain; nor is a stride: a table."""
    given = Options()._replace(**{field: 4})
    if field not in ("mod_tensors", "score_mod_grad"):  # read by mask_mod and score_mod alone
        assert given.plain == (field != "stride" and not tensors_of(field))


# What the torch backend hands to torch's own attention, which has no argument for the rest.
AS_MASKS = {
    "key_padding_mask", "key_lengths", "query_offsets", "prefix_lengths", "q_documents",
    "k_documents", "attn_mask", "cu_seqlens_q", "cu_seqlens_k", "q_positions", "k_positions",
    "attn_bias", "mod_tensors", "query_offset", "left", "right", "causal", "keep_first", "stride",
    "mask_mod", "tree_mask", "tree_starts",
}  # fmt: skip
# Results are the same, or another field that weighs has to be there too.
WITHOUT_EFFECT = {
    "dropout_seed", "relative_query", "scale", "atomic_dq", "fp32_results", "first_head",
    "all_heads", "score_mod_grad", "batch_invariant",
}  # fmt: skip


def test_every_field_is_a_mask_or_weighs_or_changes_no_result() -> None:
    given = {field: Options()._replace(**{field: 4}) for field in Options._fields}
    weighing = {field for field, options in given.items() if options.weighs or options.biases}
    assert not weighing & (AS_MASKS | WITHOUT_EFFECT)
    assert weighing | AS_MASKS | WITHOUT_EFFECT == set(Options._fields)


@functools.cache
def statements(source: str) -> list[str]:
    """Each function, and each statement of modules and classes, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [x for x in body if not is_docstring(x)]
    classes = (x.body if isinstance(x, ast.ClassDef) else [x] for x in tree.body)
    return [ast.unparse(x) for body in classes for x in body]


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def places(source: str, option: str) -> list[str]:
    """Statements that name an option, or have it as a part of a name, such as sinks_ptr."""
    word = re.compile(rf"(?<![a-zA-Z0-9]){option}(?![a-zA-Z0-9])")
    return [x for x in statements(source) if word.search(x)]


# In how many places of how many files an option may be named at most, over all that is installed
# but the stubs, which are written from the table. The numbers may only fall.
MOST: dict[str, tuple[int, int]] = {
    "keep_first": (60, 29),
    "prefix_lengths": (23, 14),
    "softcap": (53, 36),
    "alibi_slopes": (32, 21),
    "sinks": (64, 43),
}


@pytest.mark.parametrize("option", MOST)
def test_an_option_stands_in_few_places(option: str) -> None:
    folders = (CHECKOUT / folder for folder in ("fastattn", "kernels", "bench"))
    files_of = (x for folder in folders for x in folder.rglob("*.py"))
    naming = {str(x): y for x in files_of if option in (y := x.read_text(encoding="utf-8"))}
    counts = {name: len(places(text, option)) for name, text in naming.items()}
    counts = {name: count for name, count in counts.items() if count}
    most, files = MOST[option]
    assert sum(counts.values()) <= most and len(counts) <= files, counts


# The lists beside the table: what each has, of the options of which call, and what it leaves out.
_FUNCTIONS = {"mask_mod", "score_mod", "score_mod_grad", "mod_tensors"}
EXAMPLES = option_examples(4, 2, 8, 8, 16, reach=3)
LISTS: dict[str, tuple[Iterable[str], str, set[str]]] = {
    # Functions are compiled at their first call, and a scale changes no kernel; others are rare.
    "warmup": (
        [flag.partition("=")[0] for flag in warmup._FLAGS],
        "attention",
        _FUNCTIONS
        | {"scale", "heads", "positions", "dropout_seed", "keep_first", "stride", "prefix_lengths"}
        | {"attn_mask", "attn_bias", "relative_bias", "relative_keys", "relative_query"}
        | {"query2", "key2"},
    ),
    # It has cases of its own, of one pass.
    "verify": (
        [x for example in EXAMPLES.values() for x in example],
        "attention",
        {"deterministic", "batch_invariant"},
    ),
    # `tests/functional` has those of caches.
    "verify of caches": (
        [x for name in caches._EXAMPLES for x in EXAMPLES[name]],
        "decode_attention",
        _FUNCTIONS - {"score_mod_grad"}
        | {"causal", "heads", "keep_first", "stride", "attn_mask", "attn_bias"}
        | {"batch_invariant"},
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_beside_the_table_has_every_option_that_it_does_not_leave_out(name: str) -> None:
    listed, call, left_out = LISTS[name]
    assert set(listed) & set(OPTIONS) == set(TAKEN_BY[call]) - left_out
    assert left_out <= set(TAKEN_BY[call])


if __name__ == "__main__":
    ARGUMENTS.write_text(typed_signatures(), encoding="utf-8")
    STUB.write_text(stub(), encoding="utf-8")
