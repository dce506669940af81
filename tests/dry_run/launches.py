"""Every family of launchers, through Triton's own driver, on a GPU that is not there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import calls
import posing
import torch
from calls import SMALL, dense, named, ones, packed, paged, random, train, zeros
from posing import stage

import fastattn
from fastattn import QuantizedKVCache
from fastattn.kernels.hopper.tile_table import backward_config
from fastattn.kernels.launch import tiles
from fastattn.tracing import record_cuda_graph


def shapes(name: str, call: Callable[[int, int], object]) -> None:
    """`call` with a batch size and a length, then with others of both."""
    others = ((2, 77), (3, 64), (1, 1))
    stage.play(name, lambda: call(2, 64), [partial(call, *other) for other in others])


def attention_calls() -> None:
    with tiles.forced(**SMALL):
        shapes("plain", lambda B, T: train(B, T, causal=True))
        assert posing.count_of("descriptors") > 0, "nothing was loaded by TMA"
        shapes(
            "masks and dropout",
            lambda B, T: train(B, T, causal=True, window=16, key_lengths=ones(B), dropout=0.1),
        )
        # Rows of a bias that start at multiples of 16 bytes come by TMA, others by pointers.
        stage.play("scores", lambda: scored(2, 64), [lambda: scored(2, 77), lambda: scored(3, 96)])
        stage.play("a row of scores", lambda: scored(2, 1), [lambda: scored(1, 1)])
        shapes("relative bias", lambda B, T: train(B, T, causal=True, relative_bias=zeros(4, 33)))
        shapes("one pass", lambda B, T: train(B, T, causal=True, deterministic=False))
        stage.play("packed", lambda: packed(10, 54), [lambda: packed(1, 0, 130)])
        stage.play("a Python function in a graph", recorded_function)
        stage.play("many rows", lambda: calls.many_rows(70000))
        shapes("selected", partial(named, "selected_attention", causal=True))
        stage.play(
            "chosen",
            lambda: calls.chosen(2, 64),
            [lambda: calls.chosen(3, 77), lambda: calls.chosen(1, 130)],
        )


def scored(B: int, T: int) -> None:
    train(
        B, T, attn_bias=zeros(B, 4, T, T + -T % 8)[..., :T], score_mod=calls.far_keys,
        score_mod_grad=calls.far_keys_grad, mod_tensors=(torch.ones(4, device="cuda"),),
    )  # fmt: skip


def recorded_function() -> None:
    ids = ones(64)
    record_cuda_graph(lambda: train(2, 64, mask_mod=lambda b, h, q, k: ids[q] == ids[k]))


def hopper_calls() -> None:
    on_hopper: dict[str, Any] = {"causal": True, "backend": "hopper"}
    shapes("Hopper", partial(train, **on_hopper))
    config = backward_config("one_pass", 64, False, False)._replace(DQ_BY_TMA=False)
    with tiles.forced(hopper_one_pass=config):
        shapes(
            "Hopper, dQ added by the threads",
            partial(train, **on_hopper, deterministic=False),
        )
    shapes("Hopper fp8", partial(named, "attention_fp8", **on_hopper))
    shapes("Hopper packed fp8", partial(named, "attention_varlen_fp8", **on_hopper))


def cache_calls() -> None:
    def rooms(name: str, call: Callable[[int, int], object]) -> None:
        # With much room keys are split among programs, which is compiled apart.
        for room, others in ((64, ((3, 64), (1, 80))), (4096, ((3, 4096), (1, 2048)))):
            again = [partial(call, *other) for other in others]
            stage.play(f"{name} of {room}", partial(call, 2, room), again)

    with tiles.forced(**SMALL):
        rooms("dense cache", dense)
        assert posing.count_of("early") > 0, "parts of keys are merged after a gap"
        rooms("int8 cache", lambda B, room: dense(B, room, QuantizedKVCache, quantize="int8"))
        rooms("fp8 cache", lambda B, room: dense(B, room, QuantizedKVCache, quantize="fp8"))
        rooms("ring", lambda B, room: dense(B, room, window=8, keep_first=2, steps=70))
        stage.play(
            "paged cache", lambda: paged(2, 16), [lambda: paged(2, 32), lambda: paged(1, 16)]
        )
        shapes("rotary append", calls.rotated)
        shapes("merge", calls.merged)
        shapes(
            "statistics",
            lambda B, T: fastattn.attention_statistics(
                random(B, 4, T, 64), random(B, 2, T, 64), causal=True
            ),
        )
    shapes("fp8", partial(named, "attention_fp8", backend="triton"))
