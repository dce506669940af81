"""`Operator`: one function, launched directly or through torch.library."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fastattn.ops.call import Operator
from fastattn.options import Options

launched: list[tuple] = []


@Operator
def toy_scaled(
    bias: Tensor | None, x: Tensor, steps: int, dtype: torch.dtype, options: Options
) -> tuple[Tensor, Tensor]:
    launched.append((x, options))
    return x.to(dtype) * options.scale * steps, x.new_empty(0)


@toy_scaled.op.register_fake
def _(bias, x, steps, dtype, *options):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(0)


@Operator
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


def test_operator_and_function_do_the_same():
    x, options = torch.randn(3), Options(scale=0.5, softcap=3.0, query_offset=7)
    direct = toy_scaled.direct(None, x, 2, torch.float64, options)
    by_op = toy_scaled.by_op(None, x, 2, torch.float64, options)
    assert torch.equal(direct[0], by_op[0])
    assert torch.equal(direct[0], x.double())
    assert [given for _, given in launched] == [options, options]


def test_a_traced_call_takes_the_operator():
    x = torch.randn(3)
    toy_scaled(None, x, 2, torch.float64, Options())
    assert launched[0][0] is x
    with FakeTensorMode() as mode:
        found, _ = toy_scaled(None, mode.from_tensor(x), 2, torch.float64, Options())
    assert found.dtype == torch.float64
    assert len(launched) == 1


def test_options_are_contiguous_either_way():
    x = torch.randn(3)
    columns = torch.ones(5, 2, dtype=torch.bool).T
    for call in (toy_scaled, torch.compile(toy_scaled, backend="eager")):
        call(None, x, 1, torch.float32, Options(key_padding_mask=columns))
    masks = [given.key_padding_mask for _, given in launched]
    assert [mask.is_contiguous() for mask in masks] == [True, True]
    assert not columns.is_contiguous()


def test_launches_happen_on_the_device_of_the_first_tensor_that_must_be_given(monkeypatch):
    entered = []
    original = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or original(x))
    x = torch.randn(3)
    toy_scaled(torch.randn(2), x, 1, torch.float32, Options())
    assert [y is x for y in entered] == [True]
