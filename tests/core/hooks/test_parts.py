from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from retrograd.core.hooks.parts import (
    children_of,
    gradient_of,
    has_other_weights,
    is_complete,
    modules_of,
    own_parameters,
    parameters_of,
)


def make() -> nn.Module:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Linear(2, 2, bias=False)))
    net[1].register_module("none", None)
    return net


@pytest.mark.parametrize("scripted", [False, True])
def test_the_parts_are_those_that_torch_finds(*, scripted: bool) -> None:
    net = torch.jit.script(make()) if scripted else make()
    assert list(map(id, modules_of(net))) == list(map(id, net.modules()))
    assert list(map(id, children_of(net))) == list(map(id, net.children()))
    assert list(map(id, parameters_of(net))) == list(map(id, net.parameters()))
    assert not own_parameters(net)
    assert is_complete(net)


def test_a_module_that_is_being_made_has_none() -> None:
    class Early(nn.Module):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    early = Early.__new__(Early)
    assert not is_complete(early)
    assert list(modules_of(early)) == [early]
    assert not list(parameters_of(early))


def test_weights_that_functional_call_lends_are_seen() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[bool] = []
    net[0].register_forward_pre_hook(lambda *_: seen.append(has_other_weights(net)))
    x = torch.ones(1, 2)
    weights = {name: each.detach().clone() for name, each in net.named_parameters()}
    torch.func.functional_call(net, weights, (x,))
    torch.func.grad(lambda weights: torch.func.functional_call(net, weights, (x,)).sum())(weights)
    net(x)
    assert seen == [True, True, False]


def test_the_gradient_of_what_is_no_leaf_is_not_asked_for() -> None:
    """Torch warns who asks for it."""
    leaf = torch.ones(2, requires_grad=True)
    inner = leaf * 2
    inner.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradient_of(inner) is None
        assert gradient_of(leaf) is leaf.grad
