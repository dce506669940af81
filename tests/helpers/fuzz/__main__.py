"""Command line: cases for some seconds, or one case again."""

import argparse
import os
import random
import signal
import sys
import traceback
import warnings


def main() -> int:
    """Run cases; the exit status is 1 if one was wrong."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to draw cases")
    parser.add_argument("--cases", type=int, help="how many, in place of a time")
    parser.add_argument("--seed", type=int, help="the first case; alone: that case and no other")
    parser.add_argument(
        "--backend", default="", help="torch, triton or hopper; default: both others"
    )
    parser.add_argument("--call", default="", help="cases of this function alone, or layer")
    given = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["FASTATTN_TUNED"] = "0"

    import torch

    from .cases import drawn
    from .layers import drawn_layer
    from .shrink import check_any, smallest

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "attention takes .B, H, T, D.")  # said of legal calls too
    warnings.filterwarnings("ignore", "`torch.jit.script")  # by torch's forward mode
    torch.set_num_threads(1)
    backends = [given.backend] if given.backend else ["torch", "triton"]
    first = random.SystemRandom().randrange(1 << 40) if given.seed is None else given.seed
    count = given.cases
    if given.seed is not None and count is None:
        count = len(backends)
    over: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: over.append(number))
    if count is None:
        signal.setitimer(signal.ITIMER_REAL, given.seconds)
    made = wrong = 0
    seed = first
    while made < count if count is not None else not over:
        cases = [drawn(seed, backend) for backend in backends]
        layers = [drawn_layer(seed, backend) for backend in backends if backend != "hopper"]
        cases = [x for x in cases if given.call in ("", x.call)]
        for case in [*cases, *(x for x in layers if given.call in ("", "layer"))]:
            made += 1
            try:
                check_any(case)
            except Exception:
                wrong += 1
                say(f"\nseed {seed}: make fuzz SEED={seed} BACKEND={case.backend}\n{case}")
                case = smallest(case)
                say(f"the smallest that was found to fail:\n{case}")
                try:
                    check_any(case)
                except Exception:
                    say("".join(traceback.format_exc().splitlines(True)[-6:]))
            if made % 500 == 0:
                say(f"{made} calls, {wrong} wrong, seeds {first} to {seed}")
        seed += 1
    say(f"{made} calls by {', '.join(backends)}, {wrong} wrong, seeds {first} to {seed - 1}")
    return 1 if wrong else 0


def say(text: str) -> None:
    """A line, at once: hours pass between two."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
