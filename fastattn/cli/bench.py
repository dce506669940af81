"""`fastattn bench`: training steps of the reference GPT, with each attention backend."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "bench",
        help="time training steps of a GPT with each attention backend",
        description="Time training steps of a GPT on random tokens with each attention backend. "
        "The default is GPT-2 small's shape on a GPU and a small one on a CPU.",
    )
    parser.set_defaults(command=_bench)
    add = parser.add_argument
    add("--layers", type=int, help="number of layers (default: 12; CPU: 2)")
    add("--heads", type=int, help="query heads (default: 12; CPU: 4)")
    add("--kv-heads", type=int, help="key/value heads (default: --heads)")
    add("--embed-dim", type=int, help="width of the model (default: 768; CPU: 128)")
    add("--context", type=int, help="tokens of a sequence (default: 1024; CPU: 128)")
    add("--batch", type=int, help="sequences per step (default: 16; CPU: 4)")
    add("--vocab-size", type=int, help="size of the vocabulary (default: 50304; CPU: 256)")
    add("--steps", type=int, default=10, help="timed steps (default: 10)")
    backends = ("auto", "triton", "hopper", "torch")
    text = "backends to time (default: auto triton torch; CPU: triton torch)"
    add("--backends", nargs="+", choices=backends, help=text)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", default="auto", choices=dtypes, help="dtype of activations (default: auto)")


def _bench(arguments: argparse.Namespace) -> int:
    """Exit status: 0 if a backend was timed, else 1."""
    import torch

    from ..models.gpt import GPTConfig
    from ..training.step_timing import BACKENDS, time_training_steps
    from ..training.train_config import TrainConfig, resolve_device, resolve_dtype

    device = resolve_device(arguments.device)
    small = device.type == "cpu"

    def default(value: int | None, on_gpu: int, on_cpu: int) -> int:
        return value if value is not None else on_cpu if small else on_gpu

    config = GPTConfig(
        vocab_size=default(arguments.vocab_size, 50304, 256),
        context_length=default(arguments.context, 1024, 128),
        num_layers=default(arguments.layers, 12, 2),
        num_heads=default(arguments.heads, 12, 4),
        num_kv_heads=arguments.kv_heads,
        embed_dim=default(arguments.embed_dim, 768, 128),
    )
    dtype = resolve_dtype(TrainConfig(dtype=arguments.dtype).dtype, device)
    batch = default(arguments.batch, 16, 4)
    names = f"{'ms/step':>10}{'tokens/s':>12}{'TFLOP/s':>10}{'MFU':>8}{'MiB':>10}"
    _write("backend", names)
    timed = 0
    # On a CPU auto takes torch.
    for backend in arguments.backends or BACKENDS[small:]:
        try:
            timing = time_training_steps(
                config,
                batch_size=batch,
                backend=backend,
                device=device,
                dtype=dtype,
                steps=arguments.steps,
            )
        except torch.OutOfMemoryError:
            _write(backend, " out of memory")
        except ValueError as error:
            if backend not in str(error):
                raise
            _write(backend, f" {error}")
        else:
            timed += 1
            mfu = "" if timing.mfu is None else f"{timing.mfu:.1%}"
            peak = "" if timing.peak_mib is None else f"{timing.peak_mib:,.0f}"
            figures = f"{timing.step_ms:10.2f}{timing.tokens_per_second:12,.0f}"
            _write(backend, f"{figures}{timing.model_tflops:10.3g}{mfu:>8}{peak:>10}")
    return 0 if timed else 1


def _write(backend: str, figures: str) -> None:
    """Print a row at once: the next one may take a minute."""
    sys.stdout.write(f"{backend:8}{figures}\n")
    sys.stdout.flush()
