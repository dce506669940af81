"""The way from operators to kernels, for type checkers: any step that became Any fails."""

from typing import TYPE_CHECKING

from torch import Tensor

import fastattn.kernels as kernels
from fastattn import dispatch
from fastattn.kernels.launch.launches import Launch
from fastattn.ops import attention_ops, call
from fastattn.options import Options

if TYPE_CHECKING:
    from typing_extensions import assert_type

Pair = tuple[Tensor, Tensor]


def steps(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    assert_type(dispatch.HOPPER.kernels.forward(q, k, v, options), Pair)
    assert_type(attention_ops.attend(q, k, v, options), Pair)
    assert_type(attention_ops.attention_forward(q, k, v, options), Pair)
    assert_type(attention_ops.attention_forward.direct(q, k, v, options), Pair)
    attention_ops.attention_forward(q, k, options)  # type: ignore
    assert_type(call.by_shipped_shapes(kernels.forward.launch_forward, q, k, v, options), Pair)
    assert_type(kernels.forward.launch_forward(q, k, v, options), Pair)
    launch = kernels.decode.kernel_launch((q,), options, kernels.tiles.TileConfig(16, 16), split())
    assert_type(launch, Launch)


def split() -> kernels.decode_splits.KeySplit:
    return kernels.decode_splits.KeySplit(0, 1, None)
