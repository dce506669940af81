"""Time calls on a CPU beside torch's own, in turns, on one thread.

python bench/compare_cpu.py                  # a table
python bench/compare_cpu.py --out F.json     # and its file, for bench/results/cpu
python bench/compare_cpu.py alibi lse        # rows with one of these words
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn import attention
from fastattn.bench.results.tables import cpu_table
from fastattn.bench.time.environment import collect, cpu_name
from fastattn.testing.option_examples import option_examples

Call = Callable[..., Any]
B, H, H_K, D = 2, 8, 2, 64
_ROUNDS, _SECONDS = 15, 0.01


def race(ours: Call, theirs: Call) -> dict[str, float]:
    """Least microseconds of a call of each, and the median of the ratios of neighbouring samples.

    Of the process's own time, which other processes disturb less than a clock.
    """
    calls, counts = (ours, theirs), []
    for call in calls:
        call()
        begin = time.process_time()
        call()
        counts.append(max(1, round(_SECONDS / max(1e-6, time.process_time() - begin))))
    samples: list[list[float]] = [[], []]
    for n in range(_ROUNDS):
        for i in (0, 1) if n % 2 else (1, 0):
            begin = time.process_time()
            for _ in range(counts[i]):
                calls[i]()
            samples[i].append(1e6 * (time.process_time() - begin) / counts[i])
    ratios = [x / y for x, y in zip(*samples, strict=True)]
    us, torch_us = map(min, samples)
    return {"us": us, "torch_us": torch_us, "ratio": statistics.median(ratios)}


def dense(T: int, dtype: torch.dtype) -> Iterator[tuple[str, int, Call, Call]]:
    """(name, H_k, ours, torch's) of calls of q, k and v."""
    i = torch.arange(T)
    lower, lengths = (i[:, None] >= i), torch.tensor([T, T // 2 + 1])
    shown = i < lengths[:, None]
    bias, alibi = (
        torch.randn(1, H, T, T).to(dtype),
        option_examples(H, H, T, T, D, reach=1)["alibi"],
    )
    (slopes,) = alibi.values()
    ramp = (-(i[:, None] - i).abs() * slopes[:, None, None]).masked_fill(~lower, -torch.inf)
    causal: Call = partial(attention, causal=True)
    sdpa, by_flag = F.scaled_dot_product_attention, {"is_causal": True}

    def masked(mask: Tensor) -> Call:
        return partial(sdpa, attn_mask=mask)

    both = masked(lower & shown[:, None, None, :])
    yield "all keys", H, attention, sdpa
    yield "causal", H, causal, partial(sdpa, **by_flag)
    yield "causal, GQA", H_K, causal, partial(sdpa, **by_flag, enable_gqa=True)
    yield "attn_bias", H, partial(attention, attn_bias=bias), masked(bias)
    yield "causal, key_lengths", H, partial(causal, key_lengths=lengths), both
    yield "causal, key_padding_mask", H, partial(causal, key_padding_mask=shown), both
    yield "window", H, partial(causal, window=32), masked(lower & (i[:, None] - i < 32))
    yield "causal, ALiBi", H, partial(causal, **alibi), masked(ramp.to(dtype)[None])
    yield (
        "causal, dropout",
        H,
        partial(causal, dropout=0.1),
        partial(sdpa, **by_flag, dropout_p=0.1),
    )
    seed = torch.tensor([1, 2])
    seeded = partial(causal, dropout=0.1, dropout_seed=seed)
    yield "causal, dropout by a seed", H, seeded, partial(sdpa, **by_flag, dropout_p=0.1)
    column, hidden = torch.randn(H), torch.zeros(T, T).masked_fill(~lower, -torch.inf).to(dtype)
    eager = partial(by_formula, hidden=hidden)
    yield "causal, softcap", H, partial(causal, softcap=20.0), partial(eager, cap=20.0)
    yield "causal, sinks", H, partial(causal, sinks=column), partial(eager, column=column.to(dtype))


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, cap: float = 0.0, column: Tensor | None = None
) -> Tensor:
    """Attention as models write it out that torch's function cannot serve."""
    x = q @ k.mT * D**-0.5
    x = (torch.tanh(x / cap) * cap if cap else x) + hidden
    if column is not None:
        x = torch.cat((x, column[:, None, None].expand(*x.shape[:-1], 1)), -1)
    return x.softmax(-1)[..., : k.shape[2]] @ v


def dense_rows() -> Iterator[tuple[str, Call, Call]]:
    """Rows of `dense`, forward, and forward and backward."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for T in (32, 64, 512, 2048):
            for name, heads, ours, theirs in dense(T, dtype):
                if (T == 32 or dtype == torch.float16) and name != "causal":
                    continue
                written_out = getattr(theirs, "func", None) is by_formula
                if T > 512 and not (dtype == torch.float32 and (written_out or name == "window")):
                    continue
                shapes = (H, heads, heads)
                q, k, v = (torch.randn(B, x, T, D).to(dtype).requires_grad_() for x in shapes)
                do, kind = torch.randn_like(q), str(dtype).removeprefix("torch.")
                given = [x.detach() for x in (q, k, v)]
                yield (
                    f"{name}; T {T}; {kind}; forward",
                    *(partial(x, *given) for x in (ours, theirs)),
                )
                steps = (partial(step, x, (q, k, v), do) for x in (ours, theirs))
                yield f"{name}; T {T}; {kind}; both", *steps
                if name == "causal":
                    with_lse = partial(ours, *given, return_lse=True)
                    yield (
                        f"{name}, return_lse; T {T}; {kind}; forward",
                        with_lse,
                        partial(theirs, *given),
                    )


def step(call: Call, leaves: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a call."""
    return torch.autograd.grad(call(*leaves), leaves, do)


class Plain(nn.Module):
    """Causal self-attention by torch's function, to compare `CausalGQAttention` with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, H_K * width // H, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows, T, width = x.shape
        heads = (f(x).view(rows, T, -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o(o.transpose(1, 2).reshape(rows, T, width))


def layer_rows() -> Iterator[tuple[str, Call, Call]]:
    """Layers of width 512, forward, and forward and backward."""
    width = H * D
    pair = (fastattn.CausalGQAttention(width, H, H_K), Plain(width))
    kinds = (fastattn.MultiheadAttention, nn.MultiheadAttention)
    heads = tuple(kind(width, H, batch_first=True) for kind in kinds)
    heads[1].load_state_dict(heads[0].state_dict())
    for rows, T in ((1, 16), (4, 256)):
        x = torch.randn(rows, T, width)
        weighed: list[tuple[str, tuple[nn.Module, ...], Call]] = [
            ("CausalGQAttention", pair, lambda layer, x: layer(x)),
            ("MultiheadAttention", heads, lambda layer, x: layer(x, x, x, need_weights=False)[0]),
            ("MultiheadAttention, need_weights", heads, lambda layer, x: layer(x, x, x)[0]),
        ]
        for name, layers, call in weighed:
            forwards = [torch.no_grad()(partial(call, layer, x)) for layer in layers]
            yield f"{name}; {rows} x {T}; float32; forward", *forwards
            both = [partial(layer_step, call, layer, x) for layer in layers]
            yield f"{name}; {rows} x {T}; float32; both", *both


def layer_step(call: Call, layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a layer's parameters."""
    return torch.autograd.grad(call(layer, x).sum(), list(layer.parameters()))


@torch.no_grad()
def decode_rows() -> Iterator[tuple[str, Call, Call]]:
    """A step over a cache beside torch's function, and with torch.cat of the new token."""
    dtypes, sizes = (torch.float32, torch.bfloat16), ((1, 8, 2, 128), (8, 8, 8, 512))
    for dtype, (rows, heads, kv_heads, T) in itertools.product(dtypes, sizes):
        k, v = torch.randn(2, rows, kv_heads, T, D).to(dtype)
        q, new = (torch.randn(rows, x, 1, D).to(dtype) for x in (heads, kv_heads))
        cache = fastattn.KVCache(rows, kv_heads, max_length=T + 1, head_dim=D, dtype=dtype)
        cache.append(k, v)
        read = partial(F.scaled_dot_product_attention, q, enable_gqa=heads != kv_heads)
        kind = str(dtype).removeprefix("torch.")
        name = f"{rows} rows, {heads}:{kv_heads} heads, {T} keys; {kind}"
        ours = torch.no_grad()(partial(fastattn.decode_attention, q, cache))
        yield f"decode; {name}; forward", ours, torch.no_grad()(partial(read, k, v))

        def appended(q: Tensor = q, cache: Any = cache, new: Tensor = new, T: int = T) -> Tensor:
            cache.truncate(T)
            cache.append(new, new)
            return fastattn.decode_attention(q, cache)

        def joined(read: Call = read, k: Tensor = k, v: Tensor = v, new: Tensor = new) -> Tensor:
            return read(torch.cat((k, new), 2), torch.cat((v, new), 2))

        steps = map(torch.no_grad(), (appended, joined))
        yield f"truncate, append, decode; {name}; forward", *steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="rows with one of these in their name; all")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, ours, theirs in (*dense_rows(), *layer_rows(), *decode_rows()):
        if not arguments.words or any(word in name for word in arguments.words):
            rows.append({"name": name, **{x: round(y, 3) for x, y in race(ours, theirs).items()}})
            sys.stderr.write(f"{rows[-1]}\n")
    report = {
        "started": str(date.today()),
        "command": "python bench/compare_cpu.py",
        "cpu": cpu_name(),
        "environment": collect(),
        "rows": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{cpu_table(report)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
