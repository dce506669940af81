"""Attention in any spelling is served by `fastattn.swap`, with the same results."""

import copy
import os
import sys

import pytest
import torch
from attention_blocks import FORMS, Formed
from attention_forms import Drawn
from swapped_blocks import assert_equal, results, tokens, total

pytestmark = pytest.mark.usefixtures("one_thread", "served", "no_graphs_before")

FIRST = int(os.environ.get("FASTATTN_FUZZ_SEED", "0"))


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_formula(swap, form):
    model = Formed(FORMS[form])
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens())
    assert total(done) == 1, str(done)
    model(tokens())  # captured without gradients, too
    with torch.profiler.profile(acc_events=True) as profile:
        model(tokens())
    # What is served is not computed besides.
    assert sum(event.name == "aten::_softmax" for event in profile.events()) == 1


@pytest.mark.parametrize("turn", range(4))
def test_drawn_forms(swap, turn):
    for seed in range(FIRST + 20 * turn, FIRST + 20 * (turn + 1)):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = Drawn(seed)
        sys.stdout.write(f"seed {seed}: {model.text}\n")
        plain = copy.deepcopy(model)
        if not all(x.isfinite().all() for x in results(plain, tokens())):
            model.blind = plain.blind = False  # torch's formula gives NaN
        done = swap(model, eager=True)
        assert_equal(model, plain, tokens())
        assert total(done) == 1, str(done)
        done.undo()
