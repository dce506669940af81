"""Inputs, the error budget and checks against the oracle, for tests and benchmarks."""

from .budget import assert_within_budget as assert_within_budget
from .budget import error_budget as error_budget
from .compare import assert_matches_reference as assert_matches_reference
from .inputs import make_qkv as make_qkv
from .orders import worst_naive as worst_naive

__all__ = [
    "assert_matches_reference",
    "assert_within_budget",
    "error_budget",
    "make_qkv",
    "worst_naive",
]
