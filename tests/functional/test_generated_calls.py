"""Generated calls of every public function, and every two options together, against the oracle."""

import itertools
import os
import sys
from dataclasses import replace
from types import FunctionType

import pytest
import torch
from fuzz.cases import DERIVED, OFTEN, TAKES, Case, drawn, further_cases, pair_cases
from fuzz.judges import JUDGES, check
from fuzz.tensors import inputs
from fuzz.values import VALUES, drawn_options

import fastattn
from fastattn import options
from fastattn.options import OPTIONS
from fastattn.testing.calls import CALLS

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))
# Backends by how many tests there are, and calls in each.
BUDGET = {"torch": (8, 96), "triton": (8, 12), "hopper": (2, 1)}
PAIRS = {backend: pair_cases(backend, 6) for backend in ("torch", "triton")}
# Functions that compute no attention, and those that a test of their own compares with another.
ELSEWHERE = {
    "alibi_slopes", "append_paged", "block_indices", "decode_selected", "document_ids",
    "dropout_keep_mask", "explain", "explain_decode", "explain_fp8", "explain_paged",
    "explain_selected",
    "indexer_loss", "moba_attention", "native_sparse_attention", "pack_values", "patch_sdpa",
    "select_blocks", "select_tokens", "shared_pages", "swap", "t5_relative_bias",
    "unpatch_sdpa", "view_of_tensors", "warmup", "tune", "verify",
}  # fmt: skip
# By the name of the case that calls them.
CALLED_WITHIN = {
    "attention_block_forward": "attention_block", "attention_block_backward": "attention_block",
    "attention_weights": "attention_statistics", "quantize_fp8": "attention_fp8",
}  # fmt: skip


def test_every_option_and_every_function_is_generated() -> None:
    assert VALUES.keys() == OPTIONS.keys()
    exported = {name: getattr(fastattn, name) for name in fastattn.__all__}
    functions = {name for name, x in exported.items() if isinstance(x, FunctionType)}
    generated = {name for name in functions if CALLED_WITHIN.get(name, name) in TAKES}
    assert functions - generated == ELSEWHERE & functions
    assert functions.intersection(options.CALLS) <= OFTEN.keys()


@pytest.mark.parametrize("name", sorted(TAKES.keys() - JUDGES.keys()))
def test_options_that_a_call_is_said_not_to_take_are_refused(name: str) -> None:
    call, left_out = CALLS[name], OPTIONS.keys() - CALLS[name].takes
    case = replace(drawn(4, "torch"), call=name, B=1, dtype=torch.float32, options=tuple(left_out))
    given = call.make(case.random("arguments"), *inputs(case)).arguments
    for option, x in drawn_options(case, 1).items():
        with pytest.raises((TypeError, ValueError)):
            call.function(**given, **{option: x})
            pytest.fail(f"{option} is taken")


@pytest.mark.parametrize(
    ("backend", "turn"),
    [(backend, turn) for backend, (turns, _) in BUDGET.items() for turn in range(turns)],
)
def test_generated_calls(backend: str, turn: int, one_thread: None, device: str) -> None:
    if device != "cpu":
        pytest.skip("calls are drawn on a CPU, for the interpreter and the emulator")
    count = BUDGET[backend][1]
    for seed in range(FIRST + turn * count, FIRST + (turn + 1) * count):
        sys.stdout.write(f"make fuzz SEED={seed} BACKEND={backend}\n")
        check(drawn(seed, backend))


@pytest.mark.parametrize("backend", PAIRS)
def test_every_pair_of_options_is_in_a_case(backend: str) -> None:
    met = {pair for case in PAIRS[backend] for pair in itertools.combinations(case.options, 2)}
    missing = set(itertools.combinations(OPTIONS, 2)) - met
    apart = itertools.product(("query2", "key2"), ("relative_keys", "relative_query"))
    by_place = ("dropout", "documents", "key_padding_mask", "positions")
    variant = {(name, "batch_invariant") for name in by_place}
    assert missing == {("query_offset", "positions"), *apart, *variant}


@pytest.mark.parametrize(
    "case",
    [case for cases in PAIRS.values() for case in cases],
    ids=lambda case: f"{case.backend}-{'+'.join(case.options)}",
)
def test_options_that_meet(case: Case, one_thread: None, device: str) -> None:
    check(replace(case, device=device))


@pytest.mark.parametrize("trait", ["max", *sorted(DERIVED)])
@pytest.mark.parametrize("backend", PAIRS)
def test_further_results_of_options_that_meet(
    backend: str, trait: str, one_thread: None, device: str
) -> None:
    for case in further_cases(backend, trait):
        sys.stdout.write(f"{case}\n")
        check(replace(case, device=device))
