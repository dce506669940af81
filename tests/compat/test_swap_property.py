"""After a swap anything may change: outputs and gradients stay those of the block as it is."""

import copy
import os
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_blocks import BLOCKS, LENGTHS, C, H
from nightly import gate_cases
from swapped_blocks import COPIES
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastattn.testing import assert_within_budget, worst_naive

pytestmark = [
    pytest.mark.usefixtures("one_thread", "served"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]

SEEDS = range(int(os.environ.get("FASTATTN_SWAP_SEEDS", "1")))
# Blocks of each kind, and calls of each block, before each of which but the first it is changed.
# Two thousand calls and more: FASTATTN_NIGHTLY=1 FASTATTN_SWAP_SEEDS=43 pytest FILE
CALLS = 5


class Multihead(nn.Module):
    """torch's layer, with weights or without."""

    def __init__(self, kind: type[nn.MultiheadAttention] = nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer, self.needs = kind(C, H, batch_first=True), False

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out, weights = self.layer(x, x, x, need_weights=self.needs, attn_mask=attn_mask)
        return out if weights is None else out * weights.square().sum()


class Subclass(nn.MultiheadAttention):
    """A forward of its own, around torch's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


KINDS: dict[str, Callable[[], nn.Module]] = {
    **BLOCKS,
    "multihead": Multihead,
    "multihead-subclass": lambda: Multihead(Subclass),
    "encoder": lambda: nn.TransformerEncoderLayer(C, H, C, 0.0, batch_first=True),
}
# What takes a mask calls it so.
MASKS = {
    "timm": "attn_mask",
    "timm-eager": "attn_mask",
    "torchtune": "mask",
    "diffusers": "attention_mask",
    "multihead": "attn_mask",
    "multihead-subclass": "attn_mask",
    "encoder": "src_mask",
}
# Attributes by name, and what may be drawn for them. Dropout drops all or nothing: kernels have
# other bits than torch.
ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "scale": (0.9, 0.1, 2.0, 1.0, 1),
    "slope": (0.9, -0.7, 0.0),
    "eps": (1e-3, 1.0),
    **dict.fromkeys(("window", "prefix"), (1, 2, 3, 4, 5, 6)),
    **dict.fromkeys(("n_head", "heads"), (1, 2, 8)),
    **dict.fromkeys(("p", "dropout", "attn_dropout"), (0.0, 1.0)),
    **dict.fromkeys(("fused_attn", "causal", "needs", "add_zero_attn"), (True, False)),
    "batch_first": (True, False),
}


def attributes(module: nn.Module, dice: random.Random) -> None:
    """Change a number or a flag of a part, or of what it holds."""
    # A part may have the name; of the two flags that torch's layer holds, its parts know one.
    changed = [
        (m, name)
        for m in module.modules()
        for name, value in vars(m).items()
        if name in ATTRIBUTES and isinstance(value, (int, float, type(None)))
        if not (name == "batch_first" and type(m) in LAYERS)
    ]
    if changed:
        holder, name = dice.choice(changed)
        setattr(holder, name, dice.choice(ATTRIBUTES[name]))


LAYERS = (nn.TransformerEncoderLayer,)


def tensors(module: nn.Module, dice: random.Random) -> None:
    """Change a parameter or a mask: in place, or by another one."""
    owners = [(m, n) for m in module.modules() for n in (*m._parameters, *m._buffers)]
    owner, name = dice.choice([(m, n) for m, n in owners if getattr(m, n) is not None])
    x = getattr(owner, name)
    in_place = dice.random() < 0.5
    if name in owner._buffers:
        # The diagonal stays visible.
        flipped = (torch.rand(x.shape) < 0.2) & ~torch.eye(x.shape[-1], dtype=torch.bool)
        new = torch.where(flipped, 1 - x, x)
    else:
        new = (x.detach() * dice.uniform(-1.5, 1.5)) if in_place else torch.randn(x.shape) / 4
        new = nn.Parameter(new.to(x.dtype))
    if in_place:
        x.data.copy_(new)
    else:
        setattr(owner, name, new)


class Times:
    """A hook of any kind that multiplies what it may change."""

    def __init__(self, factor: float, place: int) -> None:
        self.factor, self.place = factor, place

    def __call__(self, module: nn.Module, *arguments: Any) -> Any:
        def times(x: Any) -> Any:
            return self.factor * x if isinstance(x, Tensor) else x

        return tree_map(times, arguments[self.place])


_PLACES = {"forward": 1, "forward_pre": 0, "full_backward": 0, "full_backward_pre": 0}
HOOKS = {f"register_{name}_hook": place for name, place in _PLACES.items()}


def hooks(module: nn.Module, dice: random.Random) -> None:
    """Put a hook on a part that changes what it takes or gives, values or gradients."""
    part = dice.choice([*(m for m in module.modules() if not list(m.children())), module])
    name = dice.choice(list(HOOKS))
    getattr(part, name)(Times(dice.uniform(0.2, 2.0), HOOKS[name]))


def no_hooks(module: nn.Module, dice: random.Random) -> None:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for hooks in (getattr(part, kind) for part in module.modules() for kind in kinds):
        for key in [key for key, actual in hooks.items() if isinstance(actual, Times)]:
            del hooks[key]


def mode(module: nn.Module, dice: random.Random) -> None:
    dice.choice(list(module.modules())).train(dice.random() < 0.5)


def frozen(module: nn.Module, dice: random.Random) -> None:
    parameter = dice.choice(list(module.parameters()))
    parameter.requires_grad_(not parameter.requires_grad)


class LoRA(nn.Module):
    """PEFT: a layer around a linear one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def low_rank(module: nn.Module, dice: random.Random) -> None:
    """Put a layer around a linear one that is called, as PEFT does."""
    reading = (LoRA, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.ModuleList)
    owners = [m for m in module.modules() if not isinstance(m, reading)]
    linears = [(m, n) for m in owners for n, x in m.named_children() if type(x) is nn.Linear]
    if linears:
        owner, name = dice.choice(linears)
        setattr(owner, name, LoRA(getattr(owner, name)))


def _halved(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs) * 0.5


def functions(module: nn.Module, dice: random.Random) -> None:
    """Give a part, or the whole, a forward of its own."""
    # torch's layer in eval mode reads the weights of its parts, and calls none.
    parts = [m for m in module.modules() if isinstance(m, (nn.Linear, nn.Dropout, nn.LayerNorm))]
    part = module if isinstance(module, LAYERS) else dice.choice([*parts, module])
    part.forward = partial(_halved, part)


def copies(module: nn.Module, dice: random.Random) -> nn.Module:
    """Go on with a copy; what it shares with the original changes as before."""
    return dice.choice([*COPIES.values()])(module)


def nothing(module: nn.Module, dice: random.Random) -> None:
    """Change nothing but the call."""


CHANGES = (
    attributes, attributes, attributes, tensors, tensors, hooks, hooks, no_hooks, mode,
    frozen, low_rank, functions, copies, nothing,
)  # fmt: skip


def drawn_call(kind: str, dice: random.Random) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Input [B, T, C], a mask if the block takes one, and how the call is made."""
    T = LENGTHS.get(kind, dice.choice((1, 5, 5, 5, 9)))
    B = dice.choice((1, 2, 2, 3))
    x = torch.randn(B, T, C) if dice.random() < 0.7 else torch.randn(T, B, C).transpose(0, 1)
    options: dict[str, Any] = {}
    if kind in MASKS and dice.random() < 0.3:
        mask = torch.randn(T, T)
        if dice.random() < 0.5:
            mask = mask.masked_fill((mask > 0) & ~torch.eye(T, dtype=torch.bool), -torch.inf)
        options[MASKS[kind]] = mask
    dtype = torch.float32
    if dice.random() < 0.3:
        dtype = dice.choice((torch.bfloat16, torch.float16, torch.float64))
    how = {"dtype": dtype, "graph": dice.random() < 0.8, "needs": dice.random() < 0.8}
    return x, options, how


def results(
    module: nn.Module, x: Tensor, options: dict[str, Tensor], dtype: torch.dtype, how: Any
) -> dict[str, Tensor]:
    """Output, and gradients by name, of the input and of every parameter that has one."""
    module = module.to(dtype)
    x = x.detach().to(dtype).requires_grad_(how["needs"] and how["graph"])
    with torch.set_grad_enabled(how["graph"]):
        out = module(x, **{name: mask.to(dtype) for name, mask in options.items()})
    tensors = {"out": out}
    wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanted |= {"x": x} if x.requires_grad else {}
    if out.requires_grad:
        grads = torch.autograd.grad(out.square().sum(), list(wanted.values()), allow_unused=True)
        given = zip(wanted, grads, strict=True)
        tensors |= {name: grad for name, grad in given if grad is not None}
    return tensors


# Another kind of the gate has the same way of each.
NIGHTLY = ("timm", "books", "sam", "swin-v2", "x-transformers", "x-transformers-flash")


@pytest.mark.parametrize("kind", gate_cases([x for x in KINDS if x not in NIGHTLY], NIGHTLY))
def test_whatever_changes_after_a_swap(swap, kind):
    served = 0
    for seed in SEEDS:
        torch._dynamo.reset()
        dice = random.Random(f"{kind} {seed}")
        torch.manual_seed(dice.randrange(2**30))
        swapped = KINDS[kind]()
        # Changed alike; of one the attention is served, of the others it is torch's.
        blocks = [swapped, *(copy.deepcopy(swapped) for _ in range(2))]
        done = swap(swapped, eager=True)
        trail: list[Any] = []
        for place in range(CALLS):
            change, at = dice.choice(CHANGES) if place else nothing, dice.randrange(2**30)
            for i, block in enumerate(blocks):
                torch.manual_seed(at)
                blocks[i] = change(block.float(), random.Random(at)) or block
            swapped, plain, exact = blocks
            x, options, how = drawn_call(kind, dice)
            trail.append((change.__name__, at, tuple(x.shape), list(options), how))
            dtype = how["dtype"] = how["dtype"] if place else torch.float32
            options = {name: mask.to(dtype) for name, mask in options.items()}
            run = partial(results, x=x.to(dtype), options=options, dtype=dtype, how=how)
            try:
                run(plain)
            except RuntimeError as error:
                # A hook that torch does not allow here.
                with pytest.raises(RuntimeError, match=re.escape(str(error))):
                    run(swapped)
                break
            actual = run(swapped)
            # The numbers of the tested dtype, in fp64.
            ref = results(exact.to(dtype), x.to(dtype), options, torch.float64, how)
            naive = worst_naive(ref, partial(run, plain))
            assert actual.keys() == ref.keys(), f"seed {seed}: {trail}"
            for name in actual:
                what = f"seed {seed}: {trail}: {name}"
                assert_within_budget(what, actual[name], ref[name], naive[name])
        served += sum(calls.served for calls in done.calls.values())
        done.undo()
    assert served > 0, str(done)
