"""Autograd's check for writes in place is back: what it raises for, we raise for, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retrograd.core.errors import OverwrittenError
from retrograd.memory.policies.policy import AsIs, Policy
from retrograd.memory.saved.keeping import keep_saved
from tests.memory.saved.test_exactness import Elsewhere

POLICIES: dict[str, Callable[[], Policy]] = {"keep": AsIs, "copies": Elsewhere}


def saved_input(x: Tensor) -> Tensor:
    y = x * 1.0
    z = y.square()
    y.add_(1.0)
    return z.sum()


def saved_output(x: Tensor) -> Tensor:
    y = x.exp()
    y.mul_(2.0)
    return y.sum()


def leaf(x: Tensor) -> Tensor:
    y = x * x
    with torch.no_grad():
        x.add_(1.0)
    return y.sum()


def through_a_view(x: Tensor) -> Tensor:
    y = x * 1.0
    z = y.square()
    y[0].zero_()
    return z.sum() + y.sum()


def through_a_detached_alias(x: Tensor) -> Tensor:
    y = x * 1.0
    z = y.square()
    y.detach().zero_()
    return z.sum()


def first_of_two(x: Tensor) -> Tensor:
    """Saved, written to, saved again: the first is stale, the second is not."""
    y = x * 1.0
    z = y.square()
    y.add_(1.0)
    return z.sum() + y.square().sum()


def saved_again_beside_a_stale_branch(x: Tensor) -> Tensor:
    y = x * 1.0
    stale = y.square()
    y.add_(1.0)
    loss = y.square().sum()
    loss.beside = stale  # type: ignore[attr-defined]  # its graph lives, and no backward pass runs it
    return loss


def saved_after_the_write(x: Tensor) -> Tensor:
    y = x * 1.0
    y.add_(1.0)
    return y.square().sum()


def relu_in_place(x: Tensor) -> Tensor:
    return torch.relu_(x * 2.0).square().sum()


def uses_past_the_write_only(x: Tensor) -> Tensor:
    y = x * 1.0
    y.square()  # a branch that no backward pass runs
    y.add_(1.0)
    return y.sum()


def through_data(x: Tensor) -> Tensor:
    """No counter counts it, and autograd says nothing."""
    y = x * 1.0
    z = y.square()
    y.data.add_(0.0)
    return z.sum()


CASES = [
    saved_input, saved_output, leaf, through_a_view, through_a_detached_alias, first_of_two,
    saved_again_beside_a_stale_branch, saved_after_the_write, relu_in_place, uses_past_the_write_only, through_data,
]  # fmt: skip


def outcome(case: Callable[[Tensor], Tensor], policy: Policy | None) -> Tensor | str:
    torch.manual_seed(0)
    x = torch.randn(5, 4, requires_grad=True)
    with nullcontext() if policy is None else keep_saved(None, policy):
        loss = case(x)
    refusal = RuntimeError if policy is None else OverwrittenError
    try:
        loss.backward()
    except refusal:
        return "raises"
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_it_raises_when_plain_autograd_does(case: Callable[[Tensor], Tensor], kind: str) -> None:
    expected, found = outcome(case, None), outcome(case, POLICIES[kind]())
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_the_cases_are_of_both_kinds() -> None:
    kinds = [isinstance(outcome(case, None), Tensor) for case in CASES]
    assert 4 <= sum(kinds) <= len(kinds) - 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.act = torch.nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        y += 1.0  # where it is written to
        return y


@pytest.mark.parametrize("kind", POLICIES)
def test_the_error_names_where_it_was_saved_and_what_wrote(kind: str) -> None:
    model = Model()
    with keep_saved(model, POLICIES[kind](), watch_writes=True):
        loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(OverwrittenError) as raised:
        loss.backward()
    message = str(raised.value)
    assert "[3, 4]" in message
    assert "act (Tanh)" in message
    assert "at version 0 and is at version 1" in message
    with Path(__file__).open() as file:
        line = next(number for number, text in enumerate(file, 1) if "# where it is written to" in text)
    assert f"__iadd__ at {__file__}:{line}" in message or f"add_ at {__file__}:{line}" in message


def test_without_the_watch_it_says_how_to_find_the_writer() -> None:
    model = Model()
    with keep_saved(model, AsIs()):
        loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(OverwrittenError, match=r"act \(Tanh\)(.|\n)*watch_writes=True"):
        loss.backward()


def test_memory_that_two_counters_count() -> None:
    """The gates of an LSTM come from ``unsafe_chunk``: one storage, a counter each."""

    def forward(x: Tensor) -> Tensor:
        gates = [part.sigmoid_() for part in (x * 1.0).unsafe_chunk(4, dim=1)]
        return (gates[0] * gates[1] * gates[2] * gates[3]).sum()

    def run(policy: Policy | None) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        with nullcontext() if policy is None else keep_saved(None, policy):
            loss = forward(x)
        loss.backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(run(Elsewhere()), run(None))
