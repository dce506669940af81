"""Eager attention in many spellings, each drawn as the text of a function."""

import math  # noqa: F401  of the drawn text, as torch, nn and F
import random
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: F401
from attention_blocks import C, H
from torch import Tensor, nn

# Indices of the dims of plain scores, and of what is added to them.
PLAIN = "bhij"
DIMS = {"ahead": "ij", "padding": "j", "bias": "hij", "factor": "hij"}
# Lines of each step: x are scores s or weights w, j is their dim of keys, y a mask, bias or number.
LINES = {
    "cast": ("{x} = {x}.contiguous()", "{x} = {x}.to(v.dtype)", "{x} = {x}.type_as(q)"),
    "unread": (
        "{x}.detach()", "{x}.float()", "assert [*{x}.shape] == [*{x}.size()]",
        "assert {x}.size({j}) * 2 == 14", "{x}.flatten().sum",
    ),
    "mT": ("{x} = {x}.mT", "{x} = {x}.transpose(-1, -2)"),
    "moved": ("{x} = {x}.permute({dims})", "{x} = torch.permute({x}, dims={dims})"),
    "turned": ("{x} = {x}.transpose({a}, {b})", "{x} = torch.swapaxes({x}, {a}, {b})"),
    "scaled": (
        "s = s * {y}", "s = {y} * s", "s = s / {y}", "s = torch.mul(s, {y})", "s *= {y}",
        "s = s.div({y})", "s.mul_({y})",
    ),
    "biased": ("s = s + {y}", "s = {y} + s", "s += {y}", "s = torch.sub(s, {y})", "s.add_({y})"),
    "less": ("s = s - {y} * 1e9", "s = s + -1e9 * {y}"),
    "hidden": (
        "s = s.masked_fill({y}, {low})", "s = s.masked_fill_({y}, {low})",
        "s.masked_fill_({y}, {low})",
        "s = torch.masked_fill(s, mask={y}, value={low})", "s = s.where(~{y}, {low})",
        "s = torch.where({y}, torch.tensor({low}, dtype=s.dtype), s)",
        "s = torch.where(~{y}, s, torch.tensor(-1e9).to(s))",
        "s = torch.where({y}.logical_not(), s, torch.full((), {low}, dtype=s.dtype))",
    ),
    "lowered": (
        "s = s - s.amax({j}, keepdim=True)", "s = s - torch.amax(s, dim={j}, keepdim=True)",
        "s = s - s.max({j}, keepdim=True)[0].detach()",
    ),
    "softmax": (
        "w = s.softmax({j})", "w = F.softmax(s, dim={j})", "w = torch.softmax(s, {j})",
        "w = nn.functional.softmax(s, {j}, dtype=s.dtype)",
    ),
    "zeroed": (
        "w = w.masked_fill({y}, 0)", "w = w * ~{y}", "w = ~{y} * w", "w = w * (~{y}).to(w)",
        "w = torch.where({y}, 0.0, w)", "w = w.where(~{y}, 0)",
    ),
    "numbers": (
        "w = torch.nan_to_num(w)", "w = w.nan_to_num(0.0)", "w = w.masked_fill(w.isnan(), 0)",
        "w = torch.where(w.isnan(), 0.0, w)", "w = torch.where(torch.isnan(w), 0, w)",
    ),
    "dropped": (
        "w = F.dropout(w, 0.0)", "w = F.dropout(w, 0.5, training=False)",
        "w = torch.dropout(w, 0.3, False)",
    ),
}  # fmt: skip
PRODUCTS = {
    PLAIN: (
        "q @ k.mT", "torch.matmul(q, k.transpose(-2, -1))", "q.matmul(k.permute(0, 1, 3, 2))",
        "torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(*q.shape[:2], *ahead.shape)",
    ),
    "bhji": ("k @ q.mT", "torch.matmul(k, q.swapaxes(2, 3))"),
    "hbij": ("q.transpose(0, 1) @ k.permute(1, 0, 3, 2)",),
    "bijh": (),
    "ijbh": (),
}  # fmt: skip
OUTPUTS = {
    PLAIN: ("w @ v", "torch.matmul(w, v)"),
    "bhji": ("(v.mT @ w).mT", "w.mT @ v"),
    "hbij": ("(w @ v.transpose(0, 1)).transpose(0, 1)",),
}


class Drawing:
    """Lines of a function of q, k, v [B, H, T, D], two masks of what is hidden, bias and factor."""

    def __init__(self, seed: int) -> None:
        self.dice, self.lines, self.x = random.Random(seed), list[str](), "s"
        self.hides: list[str] = []
        self.order = order = self.dice.choice([PLAIN, PLAIN, *PRODUCTS])
        by_letters = f"'bhid,bhjd->{order}', q, k", f"'bhjd,bhid->{order}', k, q"
        texts = *PRODUCTS[order], *(f"torch.einsum({x})" for x in by_letters)
        self.lines.append(f"s = {self.dice.choice(texts)}")
        # Scores that were viewed keep their order; a factor comes before what is added.
        self.fixed = "bmm" in self.lines[0]
        self.steps("moved", "scaled", "cast")
        self.steps("biased", *["hidden"] * 3, "lowered", "moved", "halved", "unread")
        self.line("softmax")
        self.x = "w"
        self.zeroed()
        self.steps("moved", "moved", "cast", "dropped", "unread")
        order = self.order
        texts = (
            *OUTPUTS.get(order, ()), f"torch.einsum('{order},bhjd->bhid', w, v)",
            f"torch.einsum('bhjd,{order}->ibhd', v, w).permute(1, 2, 0, 3)",
        )  # fmt: skip
        self.lines.append(f"return {self.dice.choice(texts)}")

    def steps(self, *names: str) -> None:
        for name in self.dice.sample(names, self.dice.randint(0, min(3, len(names)))):
            getattr(self, name, partial(self.line, name))()

    def line(self, name: str, **fields: object) -> None:
        j = self.order.index("j")
        fields |= {"x": self.x, "j": self.dice.choice((j, j - 4))}
        self.lines.append(self.dice.choice(LINES[name]).format(**fields))

    def laid(self, name: str) -> str:
        """A mask, bias or factor, in the order of the scores."""
        if self.order == PLAIN:
            return name
        leading = ", ".join(["None"] * (4 - len(DIMS[name])))
        return f"{name}[{leading}].permute({[PLAIN.index(x) for x in self.order]})"

    def moved(self) -> None:
        how, dims = self.dice.choice(("mT", "turned", "moved")), [0, 1, 3, 2]
        a, b = self.dice.sample(range(4), 2)
        if how == "turned":
            dims = list(range(4))
            dims[a], dims[b] = b, a
        elif how == "moved":
            self.dice.shuffle(dims)
        if not self.fixed and self.dice.random() < 0.5:
            where = {"a": self.dice.choice((a, a - 4)), "b": self.dice.choice((b, b - 4))}
            named = tuple(self.dice.choice((x, x - 4)) for x in dims)
            self.line(how, dims=named, **where)
            self.order = "".join(self.order[i] for i in dims)

    def scaled(self) -> None:
        of_heads = () if self.fixed else (self.laid("factor"),)
        self.line("scaled", y=self.dice.choice(("0.5", "2", *of_heads)))

    def halved(self) -> None:
        self.line("scaled", y=0.5)

    def biased(self) -> None:
        self.line("biased", y=self.laid("bias"))

    def hidden(self) -> None:
        mask = self.dice.choice(("ahead", "padding"))
        low = self.dice.choice(("-math.inf", "-1e9", "torch.finfo(q.dtype).min"))
        if self.dice.random() < 0.3:
            self.line("less", y=self.laid(mask))
        else:
            self.line("hidden", y=self.laid(mask), low=low)
            self.hides.append(mask if self.order == PLAIN else "")

    def zeroed(self) -> None:
        if self.dice.random() < 0.2:
            return
        # By the one mask, not moved: swap says of all else that it is another.
        if len(self.hides) == 1 and self.order == PLAIN and self.hides[0]:
            self.line("zeroed", y=self.hides[0])
        else:
            self.line("numbers")


class Drawn(nn.Module):
    """A layer whose attention is a drawn form. blind: a mask of -inf leaves a query no key."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        lines = ["def form(q, k, v, ahead, padding, bias, factor):", *Drawing(seed).lines]
        self.text, space = "\n    ".join(lines), dict[str, Callable[..., Tensor]]()
        exec(self.text, globals(), space)
        self.form, self.qkv = space["form"], nn.Linear(C, 3 * C)
        self.blind = "1e9" not in self.text and "finfo" not in self.text
        self.bias = nn.Parameter(torch.randn(H, 7, 7))
        self.factor = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        T = x.shape[1]
        ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
        ahead[3] = ahead[3] | self.blind
        padding = torch.arange(T) < 2 * self.blind
        o = self.form(q, k, v, ahead, padding, self.bias, self.factor)
        return o.transpose(1, 2).flatten(2)
