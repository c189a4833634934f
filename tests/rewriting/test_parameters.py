"""Rules on parameters: their values while a module runs, and what each pass finds for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import CannotRewriteError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import add_one, assert_same, gradients, halve, make_net


def test_values_while_the_module_runs() -> None:
    net, x = make_net(), torch.randn(5, 3)
    before = {name: each.clone() for name, each in net.named_parameters()}
    with rewrite(net, {"0:weight": halve, "2:bias": lambda value, state: None}):
        out = net(x)
        out.square().sum().backward()
        assert net[0].weight is dict(net.named_parameters())["0.weight"]
    found = gradients(net)
    net.zero_grad()
    h = F.linear(x, net[0].weight * 0.5, net[0].bias)
    expected = net[1:](h)
    assert torch.equal(out, expected)
    expected.square().sum().backward()
    assert_same(found, gradients(net))
    assert_same(dict(net.named_parameters()), before)  # type: ignore[arg-type]


class Keeps(Rule):
    """Remembers gradients as they are: in its state, on itself, and as what it returns."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self._last: list[Tensor] = []

    def __call__(self, value: Tensor, state: SiteState) -> Tensor | None:
        if self.way == "given":
            state.put("g", value)
            return None
        changed = value * 3
        if self.way == "state":
            state.put("g", changed)
        elif self.way == "itself":
            self._last.append(changed)
        else:
            self._last.append(changed)
            return changed.view_as(changed)
        return changed

    def kept(self) -> Tensor:
        return self._last[0] if self._last else next(iter(self._states.values())).get("g")


@pytest.mark.parametrize("way", ["given", "state", "itself", "view"])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_rule_remembers_is_never_written_into(way: str, sparse: bool) -> None:
    net = nn.EmbeddingBag(5, 3, sparse=sparse, mode="sum")
    index, rule = torch.tensor([[1, 1, 2]]), Keeps(way)
    if sparse and way == "view":
        pytest.skip("sparse tensors have no views")
    with rewrite(net, {"self:weight.grad": rule}):
        net(index).sum().backward()
        kept = rule.kept().clone().coalesce() if sparse else rule.kept().clone()
        assert net.weight.grad is not None
        if sparse:
            net.weight.grad.mul_(100)
            assert torch.equal(rule.kept().coalesce().to_dense(), kept.to_dense())
        else:
            net.weight.grad.zero_()
            assert torch.equal(rule.kept(), kept)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embedding(index))


def test_tied_parameters_are_rewritten_where_they_are_named() -> None:
    net, index = Tied(), torch.tensor([1, 3])
    with rewrite(net, {"head:weight": halve}):
        out = net(index)
    torch.testing.assert_close(out, F.linear(net.embedding(index), net.head.weight * 0.5), rtol=0, atol=0)


def test_parameters_that_thaw() -> None:
    net, x = make_net(), torch.randn(5, 3)
    net[0].requires_grad_(requires_grad=False)
    with rewrite(net, {"*:weight.grad": halve}):
        net(x).sum().backward()
        assert net[0].weight.grad is None
        net.zero_grad()
        net[0].requires_grad_(requires_grad=True)
        net(x).sum().backward()
        found = gradients(net)
        net.zero_grad()
    net(x).sum().backward()
    expected = {name: each * 0.5 if name.endswith("weight") else each for name, each in gradients(net).items()}
    assert_same(found, expected)


def test_a_replaced_parameter_has_the_rule() -> None:
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"2:weight.grad": halve}):
        old, net[2].weight = net[2].weight, nn.Parameter(torch.ones(4, 4))
        net(x).sum().backward()
    assert not old._backward_hooks
    assert not net[2].weight._backward_hooks
    assert net[2].weight.grad is not None
    found = net[2].weight.grad.clone()
    net.zero_grad()
    net(x).sum().backward()
    assert torch.equal(found, net[2].weight.grad * 0.5)


def test_a_module_that_is_parametrized_later() -> None:
    """The parameter lies elsewhere then: its gradient is still its own, and its value is not what the module uses."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with rewrite(net, {"self:weight.grad": halve}):
        register_parametrization(net, "weight", Doubled())
        net(x).sum().backward()
    found = net.parametrizations.weight.original.grad  # type: ignore[union-attr]
    torch.testing.assert_close(found, x.sum(0).expand(2, 3))  # twice for the parametrization, half for the rule
    other = nn.Linear(3, 2)
    with rewrite(other, {"self:weight": halve}):
        register_parametrization(other, "weight", Doubled())
        with pytest.raises(CannotRewriteError, match="no longer a parameter"):
            other(x)


def test_a_module_inside_itself_keeps_the_value_until_its_own_end() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, depth: int) -> Tensor:
            inner = self(depth - 1) if depth else torch.zeros(1)
            return inner + self.weight

    net = Recursive()
    with rewrite(net, {"self:weight": lambda value, state: value * 10}):
        assert net(3).item() == 40.0
    assert net(3).item() == 4.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_call_that_is_left_gives_the_parameter_back(error: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.fails = True

        def forward(self) -> Tensor:
            if self.fails:
                raise error
            return self.weight * 1.0

    net = Net()
    with rewrite(net, {"self:weight": lambda value, state: value * 10}):
        with pytest.raises(error):
            net()
        net.fails = False
        assert net().item() == 10.0
        net.fails = True
        with pytest.raises(error):
            net()
    assert net.weight is net._parameters["weight"]


def test_removed_in_the_middle_of_a_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self) -> Tensor:
            rewriting.remove()
            return self.weight * 1.0

    net = Net()
    rewriting = rewrite(net, {"self:weight": lambda value, state: value * 10})
    assert net().item() == 1.0
    assert "weight" not in vars(net)


def test_a_rule_on_the_second_parameter_that_raises_gives_the_first_back() -> None:
    def fail(value: Tensor, state: SiteState) -> Tensor:
        raise ZeroDivisionError

    net = nn.Linear(2, 2)
    with rewrite(net, {"self:weight": halve, "self:bias": fail}), pytest.raises(RuleError, match="self:bias"):
        net(torch.ones(1, 2))
    assert net.weight is net._parameters["weight"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_values_are_put_in_place_when_a_part_is_computed_again(reentrant: bool) -> None:
    net, x = make_net(), torch.randn(5, 3, requires_grad=True)
    with rewrite(net, {"0:weight": halve, "2:weight": lambda value, state: value**2}):
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
        found = gradients(net)
        net.zero_grad()
        net(x).sum().backward()
    assert_same(found, gradients(net))


def test_values_inside_a_checkpoint_wrapper() -> None:
    plain, wrapped, x = make_net(), make_net(), torch.randn(5, 3)
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    for net in (plain, wrapped):
        with rewrite(net, {"0:weight": lambda value, state: value**2, "0:input.input": add_one}):
            net(x).sum().backward()
    assert_same(
        {name.replace("._checkpoint_wrapped_module", ""): each for name, each in gradients(wrapped).items()},
        gradients(plain),
    )


def test_what_cannot_be_rewritten_says_so() -> None:
    with pytest.raises(CannotRewriteError, match="LSTM"):
        rewrite(nn.LSTM(2, 2), {"self:weight_ih_l0": halve})
    with pytest.raises(CannotRewriteError, match="optimizer"):
        rewrite(nn.Linear(2, 2), {"self:weight.update": halve})


def test_two_rewritings_of_one_value() -> None:
    """The one set later has what the other has made of it, and the parameter has the gradient through both."""
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"0:weight": add_one}), rewrite(net, {"0:weight": halve}):
        net(x).square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = nn.functional.linear(x, (net[0].weight + 1) * 0.5, net[0].bias)
    net[1:](h).square().sum().backward()
    assert_same(found, gradients(net))
    assert "weight" not in vars(net[0])
