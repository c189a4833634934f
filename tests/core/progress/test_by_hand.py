"""Updates that no optimizer of torch makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from retrograd.core.progress.steps import UpdatesByHand


def touch_nothing(net: nn.Linear) -> None:
    pass


def subtract(net: nn.Linear) -> None:
    with torch.no_grad():
        net.weight.sub_(0.1)


def subtract_past_autograd(net: nn.Linear) -> None:
    net.weight.data.sub_(0.1)


def zero(net: nn.Linear) -> None:
    net.zero_grad(set_to_none=False)


def clip(net: nn.Linear) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def drop(net: nn.Linear) -> None:
    net.zero_grad()


def replace(net: nn.Linear) -> None:
    net.weight.grad = torch.ones_like(net.weight)


def assign(net: nn.Linear) -> None:
    net.weight.data = net.weight.data - 0.1


@pytest.mark.parametrize("act", [touch_nothing, subtract, subtract_past_autograd, zero, clip, drop, replace, assign])
@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_whether_parameters_were_touched(act: Callable[[nn.Linear], None], keeps_gradients: bool) -> None:
    net = nn.Linear(70, 40)
    manual = UpdatesByHand(net.parameters())
    if keeps_gradients:
        net(torch.ones(1, 70)).sum().backward()
    manual.remember()
    act(net)
    unseen = not keeps_gradients and act in (zero, drop)
    assert manual.touched() == (act not in (touch_nothing, clip) and not unseen)
    manual.forget()
    assert not manual.touched()
    manual.remember()
    assert not manual.touched()


def test_nothing_is_touched_before_the_first_backward() -> None:
    net = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    manual = UpdatesByHand(())
    manual.add(net.parameters())
    assert not manual.touched()
    manual.remember()
    assert not manual.touched()
