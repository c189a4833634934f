"""Rules on what modules are called with: values, and the gradient through this module alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograd.core.errors import CannotRewriteError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import add_one, assert_same, gradients, halve


def times_hundred(gradient: Tensor, state: SiteState) -> Tensor:
    return gradient * 100


class Residual(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return h * 7 + self.part(h)


class TwoUses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * x.sin() + x


@pytest.mark.parametrize("part", [nn.Linear(3, 3), TwoUses(), nn.Tanh(), nn.Identity(), nn.Sequential(nn.Linear(3, 3))])
def test_the_other_branch_is_untouched(part: nn.Module) -> None:
    torch.manual_seed(0)
    net, x = Residual(part), torch.randn(4, 3)
    name = "input" if isinstance(part, (nn.Linear, nn.Tanh, nn.Identity, nn.Sequential)) else "x"
    with rewrite(net, {f"part:input.{name}.grad": times_hundred}):
        net(x).square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = net.stem(x)
    through = h.view_as(h)
    through.register_hook(lambda gradient: gradient * 100)
    (h * 7 + net.part(through)).square().sum().backward()
    assert_same(found, gradients(net))


@pytest.mark.parametrize("part", [nn.ReLU(inplace=True), nn.ELU(inplace=True), nn.Hardtanh(inplace=True)])
def test_a_module_that_works_in_place(part: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), part, nn.Linear(4, 2))
    x = torch.randn(5, 3)
    with rewrite(net, {"1:input.input.grad": times_hundred, "0:output.grad": add_one}):
        net(x).square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    h = net[0](x)
    h.register_hook(lambda gradient: gradient + 1)
    through = h * 1.0
    through.register_hook(lambda gradient: gradient * 100)
    net[2](part(through)).square().sum().backward()
    assert_same(found, gradients(net))


def test_dropout_in_place() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5, inplace=True))
    x = torch.randn(5, 3)
    torch.manual_seed(1)
    with rewrite(net, {"1:input.input.grad": times_hundred}):
        net(x).square().sum().backward()
    found = gradients(net)
    net.zero_grad()
    torch.manual_seed(1)
    (through := net[0](x)).register_hook(lambda gradient: gradient * 100)
    F.dropout(through, 0.5).square().sum().backward()
    assert_same(found, gradients(net))


class Writes(nn.Module):
    """Reads its argument, writes into it, and reads it again."""

    def forward(self, x: Tensor) -> Tensor:
        before = x * 3
        x.mul_(2)
        return before + x


class WritesUnseen(nn.Module):
    """Writes where autograd does not see it."""

    def forward(self, x: Tensor) -> Tensor:
        result = x * 3
        with torch.no_grad():
            x.zero_()
        return result


def test_a_module_that_reads_before_it_writes_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), Writes())
    with rewrite(net, {"1:input.x.grad": times_hundred}), pytest.raises(CannotRewriteError, match=r"1:input.x"):
        net(torch.randn(2, 3))
    net(torch.randn(2, 3)).sum().backward()


def test_a_write_without_grad_does_not_make_the_rule_act_twice() -> None:
    net, x = WritesUnseen(), torch.ones(2, requires_grad=True)
    with rewrite(net, {"self:input.x.grad": times_hundred}):
        net(x * 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [300.0, 300.0]


def test_who_gets_the_argument_back_may_not_write_into_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    net = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    with rewrite(net, {"0:input.input.grad": times_hundred}):
        out = net(weight * 1.0)
        with pytest.raises(CannotRewriteError, match=r"0:input.input"):
            out.sum().backward()
        h = net[0](weight * 1.0)
        (h * 2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [200.0, 200.0]


def test_a_write_into_the_argument_after_the_call_is_harmless() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.doubles = Doubles()

        def forward(self, x: Tensor) -> Tensor:
            h = x * 1.0
            y = self.doubles(h)
            return y + h.mul_(5)

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    net, x = Net(), torch.ones(2, requires_grad=True)
    with rewrite(net, {"doubles:input.x.grad": times_hundred}):
        net(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [205.0, 205.0]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x)


def test_in_place_on_a_view_from_outside() -> None:
    """The argument is a view of a larger tensor: its node cannot be told from its base's, so it is refused."""
    net, x = Inner(), torch.randn(4, 3)
    weight = torch.ones(4, 3, requires_grad=True)
    with rewrite(net, {"self:input.x.grad": times_hundred}):
        h = x * weight
        with pytest.raises(CannotRewriteError, match=r"self:input.x"):
            net(h[:2])


class WithMemory(Rule):
    needs_value = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Tensor] = []

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        assert state.value is not None
        self._seen.append(state.value.clone())
        return value * state.value


def test_a_rule_never_sees_the_overwritten_argument() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    rule, x = WithMemory(), torch.randn(5, 3)
    before = net[0](x).detach()
    with rewrite(net, {"1:input.input.grad": rule}), pytest.raises(CannotRewriteError, match=r"1:input.input"):
        net(x)
    assert all(torch.equal(seen, before) for seen in rule._seen)


def test_leaves_views_and_integers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, index: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return self.table(index) * x + y * x

    net = Net()
    index, leaf = torch.tensor([1, 2]), torch.randn(2, 3, requires_grad=True)
    other = torch.randn(4, 3, requires_grad=True)
    rules = {"self:input.index": lambda v, s: v + 1, "self:input.x.grad": times_hundred, "self:input.y.grad": halve}
    with rewrite(net, rules):
        (net(index, leaf, other[:2]).sum() + leaf.sum()).backward()
    table = net.table.weight.detach()
    torch.testing.assert_close(leaf.grad, 100 * (table[2:4] + other.detach()[:2]) + 1)
    expected = torch.zeros(4, 3)
    expected[:2] = leaf.detach() * 0.5
    torch.testing.assert_close(other.grad, expected)
    assert net.table.weight.grad is not None
    assert net.table.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [2, 3]


def test_one_tensor_for_two_arguments() -> None:
    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 + b * 3

    net, x = Net(), torch.ones(2, requires_grad=True)
    with rewrite(net, {"self:input.b.grad": times_hundred}):
        net(x, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [302.0, 302.0]
    x.grad = None
    with rewrite(net, {"self:input.a.grad": times_hundred, "self:input.b": add_one}):
        out = net(x, x)
        out.sum().backward()
    assert out.tolist() == [8.0, 8.0]
    assert x.grad.tolist() == [203.0, 203.0]


class Anything(nn.Module):
    def forward(self, first: Tensor, /, *rest: Tensor, scale: Tensor | None = None, **more: Any) -> Tensor:
        total = first + sum(rest)
        for each in more.values():
            total = total + (each["t"] if isinstance(each, dict) else each)
        return total if scale is None else total * scale


def test_keyword_arguments_and_the_rest() -> None:
    net = Anything()
    ones = [torch.ones(2, requires_grad=True) for _ in range(6)]
    rules = {
        "self:input.first": add_one,
        "self:input.rest.1.grad": times_hundred,
        "self:input.scale": add_one,
        "self:input.extra.t.grad": halve,
        "self:input.plain.grad": lambda g, s: g * 10,
    }
    with rewrite(net, rules):
        out = net(ones[0], ones[1], ones[2], scale=ones[3], extra={"t": ones[4], "k": 3}, plain=ones[5])
        out.sum().backward()
    assert out.tolist() == [12.0, 12.0]
    assert [each.grad.tolist()[0] for each in ones] == [2.0, 2.0, 200.0, 6.0, 1.0, 20.0]  # type: ignore[union-attr]


def test_arguments_that_have_no_rules_are_the_same_objects() -> None:
    seen: dict[str, Any] = {}

    class Net(nn.Module):
        def forward(self, x: Tensor, options: dict[str, Any], *rest: Any, flag: Any = None) -> Tensor:
            seen.update(options=options, rest=rest, flag=flag, x=x)
            return x

    net, x, options, flag = Net(), torch.ones(2), {"a": torch.ones(1)}, object()
    with rewrite(net, {"self:input.x": add_one}):
        net(x, options, 1, options, flag=flag)
    assert seen["options"] is options
    assert seen["rest"][1] is options
    assert seen["flag"] is flag
    assert torch.equal(x, torch.ones(2))


def test_a_wrong_call_raises_as_ever() -> None:
    net = nn.Linear(3, 3)
    with rewrite(net, {"self:input.input": add_one}):
        with pytest.raises(TypeError):
            net()
        with pytest.raises(TypeError):
            net(torch.ones(3), input=torch.ones(3))
        with pytest.raises(TypeError):
            net(torch.ones(3), nonsense=2)
        assert net(torch.ones(1, 3)).shape == (1, 3)


def test_input_and_output_of_a_module_that_returns_its_input() -> None:
    net = nn.Identity()
    x = torch.ones(2, requires_grad=True)
    with rewrite(net, {"self:input.*.grad": lambda g, s: g * 2, "self:output.grad": lambda g, s: g * 5}):
        (net(x * 1.0) * 1.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [10.0, 10.0]


def test_the_input_of_a_module_that_keeps_no_gradient() -> None:
    net = nn.Linear(3, 3)
    with torch.no_grad(), rewrite(net, {"self:input.input": add_one, "self:input.input.grad": halve}):
        x = torch.ones(1, 3)
        assert torch.equal(net(x), net.forward(x + 1))


def test_rule_error_in_an_input_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def fail(value: Tensor, state: SiteState) -> Tensor:
        raise ZeroDivisionError

    with rewrite(net, {"1:input.input": fail}), pytest.raises(RuleError, match=r"1:input"):
        net(torch.ones(1, 3))
    net(torch.ones(1, 3)).sum().backward()
