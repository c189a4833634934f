"""Small models, and plain torch hooks set by hand: what rules are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from retrograd.rewriting.rules.rule import SiteState

Change = Callable[[Tensor], Tensor]


def halve(value: Tensor, state: SiteState) -> Tensor:
    return value * 0.5


def add_one(value: Tensor, state: SiteState) -> Tensor:
    return value + 1


def leave(value: Tensor, state: SiteState) -> None:
    return None


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients that there are, by name."""
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys()
    wrong = [name for name in found if not same_bits(found[name], expected[name])]
    assert not wrong, {name: (found[name], expected[name]) for name in wrong}


def same_bits(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype is other.dtype
        and torch.equal(one.nan_to_num(), other.nan_to_num())
        and bool((one.isnan() == other.isnan()).all())
    )


@contextmanager
def hooked_outputs(changes: Mapping[nn.Module, Change]) -> Iterator[None]:
    """The gradient of what each module returns is changed by a bare hook on the tensor."""

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(changes[module])

    handles = [module.register_forward_hook(hook) for module in changes]
    yield
    for handle in handles:
        handle.remove()


class Changed(torch.autograd.Function):
    """The identity, whose backward multiplies by a function of the gradient; differentiable twice."""

    @staticmethod
    def forward(ctx: object, x: Tensor, change: Change) -> Tensor:
        ctx.change = change  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(gradient), None  # type: ignore[attr-defined]
