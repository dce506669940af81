"""`Operator`: one function, launched directly or through torch.library."""

import inspect
import pkgutil
import warnings
from importlib import import_module

import pytest
import torch
import triton
from torch import Tensor

import fastattn
import fastattn.ops
from fastattn.functional import call_memo
from fastattn.kernels import forward
from fastattn.kernels.launch import launches, tiles
from fastattn.ops.call import Operator, operator
from fastattn.ops.flops import nothing
from fastattn.options import TENSORS, Options
from fastattn.testing import assert_within_budget, make_qkv

launched: list[tuple] = []


@operator(nothing)
def toy_scaled(
    bias: Tensor | None, x: Tensor, steps: int, dtype: torch.dtype, options: Options
) -> tuple[Tensor, Tensor]:
    launched.append((x, options))
    return x.to(dtype) * options.scale * steps, x.new_empty(0)


@toy_scaled.op.register_fake
def _(bias, x, steps, dtype, *options):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(0)


@operator(nothing)
def toy_sum(x: Tensor, lengths: Tensor | None) -> Tensor:
    return x.sum()


@pytest.fixture(autouse=True)
def nothing_launched():
    launched.clear()


def test_schema_follows_the_annotations():
    schema = str(torch.ops.fastattn.toy_scaled.default._schema)
    assert schema.startswith("fastattn::toy_scaled(Tensor? bias, Tensor x, SymInt steps, ")
    assert "ScalarType dtype, Tensor? key_padding_mask" in schema
    assert schema.endswith(" -> (Tensor, Tensor)")
    assert str(torch.ops.fastattn.toy_sum.default._schema) == (
        "fastattn::toy_sum(Tensor x, Tensor? lengths) -> Tensor"
    )


def test_options_are_contiguous_either_way():
    x = torch.randn(3)
    columns = torch.ones(5, 2, dtype=torch.bool).T
    for call in (toy_scaled, torch.compile(toy_scaled, backend="eager")):
        call(None, x, 1, torch.float32, Options(key_padding_mask=columns))
    masks = [given.key_padding_mask for _, given in launched]
    assert [mask.is_contiguous() for mask in masks] == [True, True]
    assert not columns.is_contiguous()


def operators() -> dict[str, Operator]:
    """Every operator of the package."""
    files = [
        import_module(f"fastattn.ops.{x.name}") for x in pkgutil.iter_modules(fastattn.ops.__path__)
    ]
    return {name: x for file in files for name, x in vars(file).items() if isinstance(x, Operator)}


def negated() -> Tensor:
    """2.0, in memory as -2.0."""
    return torch._neg_view(torch.full((2, 2), -2.0))


@pytest.mark.parametrize("way", ["direct", "__call__"])
@pytest.mark.parametrize("name", operators())
def test_no_kernel_gets_a_negative_bit(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, given = operators()[name], []
    parameters = inspect.signature(operator._launch).parameters
    monkeypatch.setattr(operator, "_launch", lambda *arguments: given.append(arguments))
    options = Options(**{name: negated() for name in TENSORS}, mod_tensors=(negated(), negated()))
    kinds = {name: parameter.annotation for name, parameter in parameters.items()}
    arguments = {
        name: negated() if kind in (Tensor, Tensor | None) else options if kind is Options else None
        for name, kind in kinds.items()
    }
    for written in operator._written:
        with pytest.raises(ValueError, match=f"{written} is written in place"):
            getattr(operator, way)(*arguments.values())
        arguments[written] = torch.full((2, 2), 2.0)
    getattr(operator, way)(*arguments.values())
    tensors = [x for x in given[0] if isinstance(x, Tensor)]
    if Options in kinds.values():
        tensors += [getattr(given[0][-1], name) for name in TENSORS] + [*given[0][-1].mod_tensors]
    assert tensors and all(torch.equal(x, torch.full((2, 2), 2.0)) for x in tensors)
    assert not any(x.is_neg() for x in tensors)


class Refusing:
    """A kernel that its compiler takes after some attempts; refused has their stages."""

    def __init__(self, kernel, times: int) -> None:
        self.kernel, self.times, self.refused = kernel, times, []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps: int, num_stages: int):
            if len(self.refused) < self.times:
                self.refused.append(num_stages)
                raise triton.TritonError("out of\nregisters")
            return self.kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages)

        return launch


@pytest.fixture
def own_tiles():
    call_memo.forget()
    launches.forget()
    yield
    tiles.forget_smaller()
    call_memo.forget()
    launches.forget()


def test_a_tile_that_does_not_compile_gives_way_to_smaller_ones(
    own_tiles, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    q, k, v = (x.detach() for x in make_qkv(T_q=70, D=16, device=device))
    expected = fastattn.attention(q, k, v, backend="triton")
    call_memo.forget()
    launches.forget()
    monkeypatch.setattr(tiles, "tile_of", lambda *row: tiles.TileConfig(64, 32, 4, 2))
    refusing = Refusing(forward.attention_forward_kernel, 3)
    monkeypatch.setattr(forward, "attention_forward_kernel", refusing)
    with pytest.warns(UserWarning, match="uses smaller, slower tiles .*out of registers") as told:
        o = fastattn.attention(q, k, v, backend="triton")
    assert_within_budget("o", o, expected.double(), expected)
    assert len(told) == 2
    assert refusing.refused == [2, 2, 1]  # the launch to keep, then the operator's
    assert tiles.lookup("forward", 4, 16) == tiles.TileConfig(32, 32, 4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastattn.attention(q, k, v, backend="triton")


def test_a_kernel_that_no_tile_compiles_says_so(
    own_tiles, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    refusing = Refusing(forward.attention_forward_kernel, 100)
    monkeypatch.setattr(tiles, "tile_of", lambda *row: tiles.TileConfig(64, 32, 4, 2))
    monkeypatch.setattr(forward, "attention_forward_kernel", refusing)
    q, k, v = (x.detach() for x in make_qkv(T_q=70, D=16, device=device))
    with pytest.warns(UserWarning), pytest.raises(triton.TritonError, match="registers"):
        fastattn.attention(q, k, v, backend="triton")
