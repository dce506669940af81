"""`fastattn.swap`: what changes after a swap counts, in the block and in what it holds."""

import copy

import pytest
import torch
from attention_blocks import BLOCKS, C, Timm
from naive_layers import Block
from nightly import gate_cases
from swapped_blocks import COPIES, assert_equal, tokens, total
from torch import Tensor, nn

pytestmark = [
    pytest.mark.usefixtures("one_thread", "served", "no_graphs_before"),
    # torch.compile asks whatever a graph takes for its .grad.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def test_dropout_changed_after_the_swap(swap):
    for fused in (True, False):
        model = Timm(fused)
        done = swap(model, eager=True)
        model(tokens())
        model.attn_drop.p = 0.5
        assert not torch.equal(model(tokens()), model(tokens()))
        model.eval()
        assert torch.equal(model(tokens()), model(tokens()))
        assert done.calls[""].passed == 0, str(done)
        assert done.calls[""].served >= 5
        done.undo()


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
def test_hooks_of_parts(swap, when):
    model, x = BLOCKS["timm-eager"](), tokens()
    plain, seen = copy.deepcopy(model), []
    if when != "before":
        done = swap(model, eager=True)
    if when == "after a call":
        model(x)
    model.attn_drop.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    if when == "before":
        done = swap(model, eager=True)
    assert torch.equal(model(x), plain(x))
    assert seen == [(2, 4, 7, 7)]
    assert "a hook, or a forward of its own, is on a part of it" in str(done)
    model.attn_drop.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    assert not torch.equal(model(x), plain(x))
    model.attn_drop._forward_hooks.clear()
    before = total(done)
    model(x)
    assert total(done) == before + 1


class Holding(Block):
    """Scores by functions of its class, of a part's class and of the class of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.held = nn.Identity(), Held()

    def scores(self, scores: Tensor) -> Tensor:
        return self.held.apply(self.part(scores))


class Held:
    def apply(self, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("place", [(Holding, "scores"), (nn.Identity, "forward"), (Held, "apply")])
def test_functions_of_classes_that_change(swap, monkeypatch, place):
    model = Holding()
    plain = copy.deepcopy(model)
    done = swap(model, eager=True)
    assert_equal(model, plain, tokens())
    monkeypatch.setattr(*place, lambda self, scores: 3 * scores)
    assert_equal(model, plain, tokens())
    assert total(done) == 2, str(done)


KINDS = [(kind, how) for kind in ("timm-eager", "diffusers", "timm") for how in COPIES]


@pytest.mark.parametrize(("kind", "how"), gate_cases(KINDS[:7], KINDS[7:]))
def test_copies_have_their_own_parts(swap, kind, how):
    model = BLOCKS[kind]()
    done = swap(model, eager=True)
    model(tokens())
    twin = COPIES[how](model)
    twin._modules = dict(twin._modules)
    part = "to_q" if kind == "diffusers" else "qkv"
    setattr(twin, part, nn.Linear(C, getattr(model, part).out_features))
    plain = copy.deepcopy(BLOCKS[kind]())
    plain.load_state_dict(twin.state_dict(), strict=False)
    setattr(plain, part, getattr(twin, part))
    before = total(done)
    assert_equal(twin, plain, tokens())
    # Those that share their attributes share the counts.
    assert total(done) == before + (how in ("copy", "replica"))
