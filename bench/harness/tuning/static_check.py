"""What compilers make of the rows of a tuning table, tile by tile: a line for each kernel of a row.

For people who look for loops that spill, that wait for their loads, or that take many instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...testing.compiling.cross_compile import TARGETS, CompiledFacts
from .ahead import Compilation
from .choices import KERNEL_OF, tile_choice
from .entries import TableEntry
from .static_sweep import full_block, full_block_loop


def check(target: str, entries: Iterable[TableEntry], compilation: Compilation) -> Iterator[str]:
    """Yield a line for each of a row's kernels and masks, as soon as it is compiled: see `line`.

    Masks are "causal" and "full", in rows for windows each with one. Of dV and dK apart, dV comes
    first.
    """
    shared = TARGETS[target].shared_bytes
    choices = {entry: tile_choice(entry, target, shared) for entry in entries}
    for choice in choices.values():
        compilation.submit(choice, choice.shipped)
    for entry, choice in choices.items():
        facts = compilation.facts(choice, choice.shipped)
        if facts is None:
            yield f"{entry.name}: does not compile"
            continue
        for case, of_case in zip(choice.cases, facts, strict=True):
            for fact in of_case:
                if fact.name == KERNEL_OF[entry.kernel]:
                    mask = "causal" if case.causal else "full"
                    yield f"{entry.name} {choice.shipped.name} {mask}: {line(entry, target, fact)}"


def line(entry: TableEntry, target: str, fact: CompiledFacts) -> str:
    """Registers, shared memory and spills; of the loop over full blocks what `speed` models.

    "loads" are those that a warp waits for: on NVIDIA GPUs others go past its registers.
    """
    words = [f"{fact.registers} registers", f"{fact.shared_bytes // 1024} KB"]
    if not fact.fits_shared_memory:
        words.append("does not fit")
    if fact.spills:
        words.append(f"spills {fact.spill_store_bytes} bytes")
    words.append("+".join(sorted(fact.mma)) or "no matrix instructions")
    if fact.loops:
        loop, clocks = full_block_loop(fact), full_block(entry, entry.shipped(target), fact)
        in_loops = sum(each.spills for each in fact.loops)
        words += [f"{in_loops} spilled in loops"] * (in_loops > 0)
        words += [
            f"{loop.total} instructions",
            f"{loop.count('LDG', 'global_load', 'buffer_load')} loads",
            f"{clocks.bound:.3f} clocks",
            f"{clocks.tensor:.3f} of products",
        ]
    return ", ".join(words)
