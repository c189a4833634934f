"""Rules are told the very steps that are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim import SGD

import retrograd as rg
from retrograd.rewriting.rules.rule import Rule, SiteState

X = torch.ones(2, 4)


class Spy(Rule):
    """Notes the step that it is told of at each gradient of a site."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, value: torch.Tensor, state: SiteState) -> torch.Tensor:
        self.steps.append(state.step)
        return value


Train = Callable[[nn.Module, nn.Module], Iterator[None]]
"""Trains two models; yields before each backward pass."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    loss = model(X).sum()
    yield
    loss.backward()
    optimizer.step()


def one_that_is_replaced(a: nn.Module, b: nn.Module) -> Iterator[None]:
    for _ in range(2):
        optimizer = SGD(a.parameters(), lr=0.1)
        for _ in range(3):
            yield from train(a, optimizer)


def one_after_the_other(a: nn.Module, b: nn.Module) -> Iterator[None]:
    for model in (a, b):
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            yield from train(model, optimizer)


def apart(a: nn.Module, b: nn.Module) -> Iterator[None]:
    pairs = [(model, SGD(model.parameters(), lr=0.1)) for model in (a, b)]
    for _ in range(3):
        for model, optimizer in pairs:
            yield from train(model, optimizer)


def beside_a_stranger(a: nn.Module, b: nn.Module) -> Iterator[None]:
    optimizer, free = SGD(a.parameters(), lr=0.1), torch.ones(3, requires_grad=True)
    stranger = SGD([free], lr=0.1)
    for _ in range(3):
        for _ in range(2):
            free.sum().backward()
            stranger.step()
        yield from train(a, optimizer)


def accumulating(a: nn.Module, b: nn.Module) -> Iterator[None]:
    optimizer = SGD(a.parameters(), lr=0.1)
    for _ in range(3):
        a(X).sum().backward()
        yield
        yield from train(a, optimizer)


STEPS = {
    one_that_is_replaced: [0, 1, 2, 3, 4, 5],
    one_after_the_other: [0, 1, 2, 3, 4, 5],
    apart: [0, 1, 2, 3, 4, 5],
    beside_a_stranger: [0, 1, 2],
    accumulating: [0, 0, 1, 1, 2, 2],
}


def test_without_a_model_every_update_counts() -> None:
    spy = Spy()
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    with rg.rewrite(None, {"watch/scaled": spy}):
        for _ in range(3):
            rg.watch("scaled", weight * 2).sum().backward()
            optimizer.step()
    assert spy.steps == [0, 1, 2]


@pytest.mark.parametrize("program", STEPS, ids=lambda each: each.__name__)
def test_rules_are_told_the_steps_that_are_recorded(program: Train) -> None:
    models = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    spy = Spy()
    with rg.record(models) as recording, rg.rewrite(models, {"*:output.grad": spy}):
        for _ in program(models["a"], models["b"]):
            pass
    recorded = [event.moment.step for event in recording.history.events if event.kind == "loss"]
    assert spy.steps == STEPS[program]
    assert recorded == STEPS[program]


def test_of_two_that_take_turns_each_turn_is_a_step() -> None:
    """As in a GAN, where the critic is updated before the generator whose values it sees."""
    generator, critic, spy = nn.Linear(4, 4), nn.Linear(4, 4), Spy()
    of_generator, of_critic = SGD(generator.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    models = {"generator": generator, "critic": critic}
    with rg.record(models) as recording, rg.rewrite(models, {"critic:output.grad": spy}):
        for _ in range(6):
            fake = generator(X)
            critic(fake.detach()).sum().backward()
            of_critic.step()
            critic(fake).mean().backward()
            of_generator.step()
    told = [event.moment.step for event in recording.history.events if event.kind == "update"]
    assert spy.steps == told == [0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5]
