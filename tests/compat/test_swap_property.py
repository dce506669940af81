"""After a swap anything may change: outputs and gradients stay those of the block as it is."""

import copy
import itertools
import os
import pickle
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attention_blocks import BLOCKS, LENGTHS, C, H, LoRA
from nightly import gate_cases
from torch import Tensor, nn

from fastattn.testing import assert_within_budget, worst_naive

pytestmark = [
    pytest.mark.usefixtures("one_thread", "served"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]

# Blocks of each kind, and calls of each block, before each of which but the first it is changed.
# Two thousand calls and more: FASTATTN_NIGHTLY=1 FASTATTN_SWAP_SEEDS=43 pytest FILE
SEEDS = range(int(os.environ.get("FASTATTN_SWAP_SEEDS", "1")))
CALLS = 3


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
_scale = partial(random.Random.choice, seq=[0.9, 0.1, 2.0, 1.0, 1])
_all_or_nothing = partial(random.Random.choice, seq=[0.0, 1.0])
_heads = partial(random.Random.choice, seq=[1, 2, 8])
_flag = partial(random.Random.choice, seq=[True, False])
ATTRIBUTES: dict[str, Callable[[random.Random], Any]] = {
    "scale": _scale,
    "slope": partial(random.Random.choice, seq=[0.9, -0.7, 0.0]),
    "eps": partial(random.Random.choice, seq=[1e-3, 1.0]),
    "window": partial(random.Random.randint, a=1, b=6),
    "prefix": partial(random.Random.randint, a=1, b=6),
    "n_head": _heads,
    "heads": _heads,
    "p": _all_or_nothing,
    "dropout": _all_or_nothing,
    "attn_dropout": _all_or_nothing,
    **dict.fromkeys(("fused_attn", "causal", "needs", "add_zero_attn", "batch_first"), _flag),
}


def attributes(module: nn.Module, dice: random.Random) -> None:
    """Change a number or a flag of a part, or of what it holds."""
    changed = [(m, name) for m in module.modules() for name in vars(m) if _is_changed(m, name)]
    if changed:
        holder, name = dice.choice(changed)
        setattr(holder, name, ATTRIBUTES[name](dice))


def _is_changed(holder: Any, name: str) -> bool:
    # A part may have the name; of the two flags that torch's layer holds, its parts know one.
    value = vars(holder)[name]
    plain = isinstance(value, (int, float, type(None)))
    return name in ATTRIBUTES and plain and not (name == "batch_first" and type(holder) in LAYERS)


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
        changed = arguments[self.place]
        if isinstance(changed, Tensor):
            return self.factor * changed
        first, *rest = changed
        return (None if first is None else self.factor * first, *rest)


HOOKS = {
    "register_forward_hook": 1,
    "register_forward_pre_hook": 0,
    "register_full_backward_hook": 0,
    "register_full_backward_pre_hook": 0,
}


def hooks(module: nn.Module, dice: random.Random) -> None:
    """Put a hook on a part that changes what it takes or gives, values or gradients."""
    part = dice.choice([*(m for m in module.modules() if not list(m.children())), module])
    name = dice.choice(list(HOOKS))
    getattr(part, name)(Times(dice.uniform(0.2, 2.0), HOOKS[name]))


def no_hooks(module: nn.Module, dice: random.Random) -> None:
    for part, kind in itertools.product(
        module.modules(),
        ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    ):
        there = getattr(part, kind)
        for key in [key for key, actual in there.items() if isinstance(actual, Times)]:
            del there[key]


def mode(module: nn.Module, dice: random.Random) -> None:
    dice.choice(list(module.modules())).train(dice.random() < 0.5)


def frozen(module: nn.Module, dice: random.Random) -> None:
    parameter = dice.choice(list(module.parameters()))
    parameter.requires_grad_(not parameter.requires_grad)


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
    how = dice.choice((copy.copy, copy.deepcopy, _pickled, _replica))
    return how(module)


def _pickled(module: nn.Module) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(module))
    return twin


def _replica(module: nn.Module) -> nn.Module:
    twin: Any = module._replicate_for_data_parallel()
    twin._parameters = dict(module._parameters)
    return twin


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


@pytest.mark.parametrize(
    "kind", gate_cases([kind for kind in KINDS if kind not in NIGHTLY], NIGHTLY)
)
def test_whatever_changes_after_a_swap(swap, kind):
    served = 0
    for seed in SEEDS:
        torch._dynamo.reset()
        dice = random.Random(f"{kind} {seed}")
        torch.manual_seed(dice.randrange(2**30))
        swapped = KINDS[kind]()
        # Changed alike; of one the attention is served, of the others it is torch's.
        plain, exact = copy.deepcopy(swapped), copy.deepcopy(swapped)
        done = swap(swapped, eager=True)
        trail: list[Any] = []
        for place in range(CALLS):
            change, at = dice.choice(CHANGES) if place else nothing, dice.randrange(2**30)
            blocks = []
            for block in (swapped, plain, exact):
                torch.manual_seed(at)
                changed = change(block.float(), random.Random(at))
                blocks.append(block if changed is None else changed)
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
            plain, exact = plain.to(dtype), exact.to(dtype)
            ref = results(exact, x.to(dtype), options, torch.float64, how)
            naive = worst_naive(ref, partial(run, plain))
            assert actual.keys() == ref.keys(), f"seed {seed}: {trail}"
            for name in actual:
                what = f"seed {seed}: {trail}: {name}"
                assert_within_budget(what, actual[name], ref[name], naive[name])
        served += sum(calls.served for calls in done.calls.values())
        done.undo()
    assert served > 0, str(done)
