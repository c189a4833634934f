"""A pass that fails since something was written to in place: both lines, against the lines of this file."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from retrograd.following.tracing.tracer import trace


def saved_input() -> Tensor:
    y = torch.randn(3, requires_grad=True) * 1.0
    z = y.square()  # saves
    y.add_(1.0)  # writes
    return z.sum()


def saved_output() -> Tensor:
    y = torch.randn(3, requires_grad=True).exp()  # saves
    y *= 2.0  # writes
    return y.sum()


def a_leaf() -> Tensor:
    x = torch.randn(3, requires_grad=True)
    y = x * x  # saves
    with torch.no_grad():
        x.add_(1.0)  # writes
    return y.sum()


def through_a_view() -> Tensor:
    y = torch.randn(3, requires_grad=True) * 1.0
    z = y.square()  # saves
    y[0] = 0.0  # writes
    return z.sum() + y.sum()


def by_out() -> Tensor:
    y = torch.randn(3, requires_grad=True) * 1.0
    z = y.square()  # saves
    torch.add(torch.ones(3), 1.0, out=y.detach())  # writes
    return z.sum()


def by_an_activation() -> Tensor:
    y = nn.Linear(3, 3)(torch.randn(2, 3)).sigmoid()  # saves
    return nn.ReLU(inplace=True)(y).sum()  # writes


def by_an_optimizer() -> Tensor:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.randn(2, 3)).square().sum()  # saves
    loss.backward(retain_graph=True)
    optimizer.step()  # writes
    return loss


CASES = [saved_input, saved_output, a_leaf, through_a_view, by_out, by_an_activation, by_an_optimizer]


def line_of(case: Callable[[], Tensor], mark: str) -> str:
    lines, first = inspect.getsourcelines(case)
    return f"{__file__}:{first + next(number for number, text in enumerate(lines) if f'# {mark}' in text)}"


@pytest.mark.parametrize("case", CASES)
def test_both_lines_are_told(case: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        case().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised, trace() as seen:
        case().backward()
    assert str(raised.value) == str(plain.value)
    assert seen.failure is not None
    told = seen.failure.overwritten
    assert told is not None
    assert told.line == line_of(case, "saves")
    assert [write.line for write in told.writes] == [line_of(case, "writes")]
    assert f"is at version {told.now}; expected version {told.then}" in str(plain.value)
    assert told.sentence() in "\n".join(raised.value.__notes__)


def test_an_optimizer_that_writes_is_named_with_the_parameter() -> None:
    with pytest.raises(RuntimeError), trace() as seen:
        by_an_optimizer().backward()
    assert seen.failure is not None
    told = seen.failure.overwritten
    assert told is not None
    assert (told.parameter, told.writes[0].writer) == ("2:weight", "Adam.step")
    assert "after the last backward()" in told.repair()


def test_without_origins_it_tells_what_was_saved() -> None:
    with pytest.raises(RuntimeError), trace(origins=False) as seen:
        saved_output().backward()
    assert seen.failure is not None
    told = seen.failure.overwritten
    assert told is not None
    assert (told.node, told.saved, told.then, told.now, told.writes) == ("ExpBackward0", "result", 0, 1, ())


def test_another_failure_is_none_of_it() -> None:
    loss = torch.ones(3, requires_grad=True).exp().sum()
    with trace():
        loss.backward()
    with pytest.raises(RuntimeError, match="second time"), trace() as seen:
        loss.backward()
    assert seen.failure is None or seen.failure.overwritten is None
