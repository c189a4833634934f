from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograd.core.history.data_facts import LossParts

from .looking import facts_while, line_of

STEPS = 5


def train(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> tuple[list[LossParts], list[Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    weights = []

    def run() -> None:
        torch.manual_seed(1)
        for _ in range(STEPS):
            loss = loss_of(net, torch.randn(8, 4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            weights.append(net.weight.detach().clone())

    return facts_while(run, net, LossParts), weights


kept: list[tuple[float, float, float]] = []


def two_terms(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    first, second = out.square().mean(), out.abs().sum()
    loss = first + 0.25 * second
    kept.append((first.item(), second.item(), loss.item()))
    return loss


def test_terms_are_what_the_program_had() -> None:
    kept.clear()
    facts, _ = train(two_terms)
    assert [fact.step for fact in facts] == [0, 1, 2, 4]
    for fact in facts:
        first, second, loss = kept[fact.step]
        assert fact.value == pytest.approx(loss) == pytest.approx(fact.sum_of(fact.loss))
        found = [value for value in fact.values if any(np.isclose(value, each) for each in (first, second))]
        assert len(found) == 2
        assert fact.line == line_of("loss = first", two_terms)
        assert fact.called == line_of("loss.backward()", train)


def by_sample(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    first, second = out.square(), 0.5 * out.abs()
    loss = (first + second).mean()
    kept.append((first.sum().item(), second.sum().item(), loss.item()))
    return loss


def test_sums_of_what_is_added_before_it_is_reduced() -> None:
    kept.clear()
    facts, _ = train(by_sample)
    first, second, loss = kept[0]
    assert facts[0].value == pytest.approx(loss)
    assert all(any(np.isclose(value, each) for value in facts[0].values) for each in (first, second))


def with_itself(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - net(x)).exp().mean() + net(x).mean()


def with_another(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - net(-x)).exp().mean() + net(x).mean()


def with_a_copy(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) - net(x).detach()).exp().mean() + net(x).mean()


@pytest.mark.parametrize(("loss", "is_equal"), [(with_itself, True), (with_another, False), (with_a_copy, False)])
def test_what_is_held_against_itself(loss: Callable[[nn.Module, Tensor], Tensor], is_equal: bool) -> None:
    facts, _ = train(loss)
    assert len(facts) >= 2
    assert all(bool(fact.equal) == is_equal for fact in facts)


def single(net: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(net(x), x[:, :3])


def test_a_loss_of_one_term_is_not_looked_at_again() -> None:
    facts, _ = train(single)
    assert [fact.step for fact in facts] == [0, 1]


def test_weights_are_as_without_it() -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(1)
    _, recorded = train(two_terms)
    torch.manual_seed(1)
    for step in range(STEPS):
        loss = two_terms(net, torch.randn(8, 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.equal(net.weight, recorded[step])
