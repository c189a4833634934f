"""Rules on tensors that are watched by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.errors import RetrogradWarning, SiteSyntaxError
from retrograd.rewriting.rewriting import rewrite
from tests.core.recording.collector import collect
from tests.rewriting.models import add_one, halve, leave


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = rg.watch("h", self.linear(x))
        return h * 2


def test_value_and_gradient() -> None:
    net, x = Net(), torch.randn(2, 3)
    with rewrite(net, {"watch/h": add_one, "watch/h.grad": halve}):
        out = net(x)
        out.square().sum().backward()
    assert net.linear.weight.grad is not None
    found = net.linear.weight.grad.clone()
    net.zero_grad()
    h = net.linear(x)
    h.register_hook(lambda gradient: gradient * 0.5)
    expected = (h + 1) * 2
    assert torch.equal(out, expected)
    expected.square().sum().backward()
    assert torch.equal(found, net.linear.weight.grad)


def test_the_same_object_comes_back_where_nothing_is_changed() -> None:
    net = Net()
    nest = {"a": torch.ones(2), "b": [torch.ones(3), 4]}
    with rewrite(net, {"watch/n:a": leave, "watch/n:b.0": leave}):
        assert rg.watch("n", nest) is nest
        assert rg.watch("other", nest) is nest
    with rewrite(net, {"watch/n:a": add_one}):
        changed = rg.watch("n", nest)
        assert changed is not nest
        assert changed["b"] is nest["b"]
        assert torch.equal(changed["a"], torch.full((2,), 2.0))
    assert torch.equal(nest["a"], torch.ones(2))  # type: ignore[arg-type]
    assert rg.watch("n", nest) is nest


def test_a_leaf_keeps_the_gradient_of_its_other_uses() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with rewrite(nn.Identity(), {"watch/leaf.grad": lambda gradient, state: gradient * 100}):
        (rg.watch("leaf", leaf) * 2 + leaf * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [203.0, 203.0]


def test_calls_are_numbered() -> None:
    seen: list[int] = []

    def note(value: Tensor, state: rg.rules.SiteState) -> None:  # type: ignore[name-defined]
        seen.append(state.call)

    net = nn.Linear(3, 3)
    with rewrite(net, {"watch/h": note, "watch/h#2": add_one}):
        for _ in range(2):
            out = net(torch.ones(1, 3))
            first, second = rg.watch("h", out), rg.watch("h", out)
            assert first is out
            assert torch.equal(second, out + 1)
            (first + second).sum().backward()
    assert seen == [1, 2, 1, 2]


def test_what_is_recorded_is_what_the_rule_made() -> None:
    net, x = Net(), torch.randn(2, 3)
    with (
        collect(net, sites=["watch/h", "watch/h.grad"]) as seen,
        rewrite(net, {"watch/h": add_one, "watch/h.grad": halve}),
    ):
        net(x).sum().backward()
    expected = net.linear(x) + 1
    assert seen.one("watch/h").max == pytest.approx(expected.max().item())
    assert seen.one("watch/h.grad").max == 1.0


def test_a_name_that_is_none() -> None:
    with rewrite(nn.Linear(2, 2), {"watch/h": halve}), pytest.raises(SiteSyntaxError):
        rg.watch("a:b", torch.ones(2))


def test_a_name_that_never_comes_is_told() -> None:
    net = nn.Linear(2, 2)
    with pytest.warns(RetrogradWarning, match="watch/nothing"), rewrite(net, {"watch/nothing.grad": halve}):
        net(torch.ones(1, 2))
