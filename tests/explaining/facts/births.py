"""Programs in which a number that is not finite is made, each at the line that says ``# born``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BAD_STEP = 5
"""The step at which each goes wrong."""


@dataclass(frozen=True)
class Program:
    """What goes wrong, and what must be found of it."""

    model: Callable[[], nn.Module]
    train: Callable[[nn.Module], None]
    born: str
    operation: str
    reason: str
    module: str
    source: Any


def train(
    net: nn.Module,
    loss_of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    spoil: Callable[[torch.Tensor, int], torch.Tensor] = lambda x, step: x,
) -> None:
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=1e-5)
    for step in range(8):
        x, y = torch.randn(6, 4), torch.rand(6, 3)
        optimizer.zero_grad()
        loss = loss_of(net(spoil(x, step)), y, step)
        loss.backward()
        optimizer.step()


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(x).tanh())


def mse(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return F.mse_loss(out, y)


def log_of_zero(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    p = out.softmax(-1) * (0.0 if step == BAD_STEP else 1.0)
    return -(y * p.log()).mean()  # born


def log_of_negative(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    shifted = out.square() + (-100 if step == BAD_STEP else 1)
    return torch.log(shifted).mean()  # born


def square_root(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    shifted = out.square() + (-100 if step == BAD_STEP else 1)
    return shifted.sqrt().mean()  # born


def zero_by_zero(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    mask = torch.zeros(6, 3) if step == BAD_STEP else torch.ones(6, 3)
    return (out.square() * mask).sum() / mask.sum()  # born


def mean_over_none(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    known = torch.full((6,), step != BAD_STEP)
    each = F.cross_entropy(out, y.argmax(-1), reduction="none")
    return (each * known).sum() / known.sum()  # born


def power(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    scale = out.abs() * (0.0 if step == BAD_STEP else 1.0)
    return (1 + scale.pow(-0.5)).mean()  # born


def exponential(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    scaled = out + (200.0 if step == BAD_STEP else 0.0)
    return torch.exp(scaled).mean()  # born


def of_one(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    part = out[:1] if step == BAD_STEP else out[:]
    return (part.std(0) + 1).mean()  # born


def ignored(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    target = y.argmax(-1)
    if step == BAD_STEP:
        target = torch.full_like(target, -100)
    return F.cross_entropy(out, target)  # born


def sum_of_none(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    target = y.argmax(-1)
    if step == BAD_STEP:
        target = torch.full_like(target, -100)
    total = F.cross_entropy(out, target, reduction="sum")  # 0, and the sum of none is
    return total / (target >= 0).sum()  # born


def sum_by_place(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    target = y.argmax(-1)
    if step == BAD_STEP:
        target = torch.full_like(target, -100)
    total = F.cross_entropy(out, target, None, None, -100, None, "sum")
    return total / (target >= 0).sum()  # born


def arc(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    cosine = out.tanh() * (1.0 if step != BAD_STEP else 1000.0)
    return torch.acos(cosine).mean()  # born


def half(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    small = (out + 1).half()
    return (small * (1000.0 if step != BAD_STEP else 60000.0) * 2).float().abs().mean()  # born


def trap(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    x = out * (0.0 if step == BAD_STEP else 1.0)
    rooted = x.abs().sqrt()  # born
    return torch.where(x != 0, rooted, torch.zeros(())).mean() + out.square().mean()


def norm_by_hand(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    x = out * (0.0 if step == BAD_STEP else 1.0)
    return x.square().sum(-1).sqrt().mean() + out.square().mean()  # born


def broken_power(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    x = out * (0.0 if step == BAD_STEP else 1.0)
    return x.abs().pow(0.5).mean() + out.square().mean()  # born


class Attention(nn.Module):
    """Its mask hides all keys of some rows at one step."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.step = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).T
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        if self.step == BAD_STEP:
            mask[2] = False
        self.step += 1
        scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ x  # born


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.att, self.head = Attention(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.att(x))


class Input(Simple):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(x).tanh())  # born


def spoil(x: torch.Tensor, step: int) -> torch.Tensor:
    if step == BAD_STEP:
        x[0, 0] = torch.nan
    return x


def train_and_divide(net: nn.Module) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01, eps=0.0)
    for step in range(8):
        loss = F.mse_loss(net(torch.randn(6, 4)), torch.rand(6, 3))
        optimizer.zero_grad()
        loss.backward()
        if step == BAD_STEP:
            for each in optimizer.state.values():
                each["square_avg"].zero_()
            net.fc.weight.grad[0] = 0  # type: ignore[union-attr, index]
        optimizer.step()  # born


def train_in_half(net: nn.Module) -> None:
    """ε of 1e-8 is 0 in float16, and a gradient of 0 is divided by it."""
    torch.manual_seed(0)
    net.half()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4)
    for step in range(8):
        optimizer.zero_grad()
        net(torch.randn(6, 4).half()).float().square().mean().backward()
        for each in net.parameters():
            each.grad = torch.ones_like(each) if step != BAD_STEP else torch.zeros_like(each)
        if step == BAD_STEP:
            for state in optimizer.state.values():
                state["square_avg"].zero_()
        optimizer.step()  # born


def program(loss_of: Any, born: str, operation: str, reason: str) -> Program:
    return Program(Simple, lambda net: train(net, loss_of), born, operation, reason, "", loss_of)


PROGRAMS = {
    "log of 0": program(log_of_zero, "forward", "log", "log of 0"),
    "log of a negative number": program(log_of_negative, "forward", "log", "log of a number below 0"),
    "sqrt of a negative number": program(square_root, "forward", "sqrt", "sqrt of a negative number"),
    "0 / 0": program(zero_by_zero, "forward", "div", "0 / 0"),
    "mean over none": program(mean_over_none, "forward", "div", "0 / 0"),
    "0 to a negative power": program(power, "forward", "pow", "0 to a negative power"),
    "exp overflow": program(exponential, "forward", "exp", "too large for float32"),
    "std of one": program(of_one, "forward", "std", "std of one element"),
    "all ignored": program(ignored, "forward", "cross_entropy", "every target is ignored"),
    "a sum over none": program(sum_of_none, "forward", "div", "0 / 0"),
    "a sum over none, by place": program(sum_by_place, "forward", "div", "0 / 0"),
    "acos beyond 1": program(arc, "forward", "acos", "beyond ±1"),
    "half overflow": program(half, "forward", "mul", "overflow of float16"),
    "softmax of a row of −inf": Program(
        Attending, lambda net: train(net, mse), "forward", "softmax", "a row that is all −inf", "att", Attention
    ),
    "input": Program(
        Input, lambda net: train(net, mse, None, spoil), "input", "linear", "was not finite before", "fc", Input
    ),
    "where trap": program(trap, "backward", "sqrt", "the derivative of sqrt is infinite at 0"),
    "norm by hand": program(norm_by_hand, "backward", "sqrt", "the derivative of sqrt is infinite at 0"),
    "fractional power": program(broken_power, "backward", "pow", "the derivative of a power below 1 is infinite at 0"),
    "update": Program(
        Simple, train_and_divide, "update", "RMSprop.step", "0 / 0 in RMSprop, whose eps is 0", "fc:weight",
        train_and_divide,
    ),
    "update in half": Program(
        Simple, train_in_half, "update", "RMSprop.step", "0 / 0 in RMSprop, whose eps of 1e-08 is 0 in float16",
        "fc:weight", train_in_half,
    ),
}  # fmt: skip


# ---- healthy ----


class MaskedAttention(nn.Module):
    """Masks of −inf of many kinds, none of which hides a whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("bias", torch.triu(torch.full((6, 6), float("-inf")), 1))
        self.att = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ x.T
        first = (scores + self.bias).softmax(-1) @ x
        hidden = scores.masked_fill(torch.eye(6, dtype=torch.bool), -torch.inf)
        second = hidden.logsumexp(-1, keepdim=True) + torch.finfo(x.dtype).min * torch.zeros(6, 1)
        third = torch.where(hidden > -torch.inf, hidden, 0).sum(-1, keepdim=True)
        best = torch.full((6,), -torch.inf).maximum(hidden.amax(-1))[:, None]
        fourth, _ = self.att(x[None], x[None], x[None], attn_mask=self.bias)
        return self.head(first + second + third + best + fourth[0])


def safe_log(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """A log of 0 that nobody uses, with the trap closed."""
    p = out.softmax(-1) * (y > 0.5)
    entropy = torch.where(p > 0, p * torch.where(p > 0, p, torch.ones(())).log(), torch.zeros(()))
    unused = p.detach().log()
    return entropy.mean() + F.mse_loss(out, y) + 0 * unused.isinf().sum()


def masked_gradient(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """The derivative of the power is infinite, and that of the spread of equal numbers zero: nothing comes of it."""
    x = out * (0.0 if step == BAD_STEP else 1.0)
    return x.std(0).pow(0.5).mean() + out.square().mean()
