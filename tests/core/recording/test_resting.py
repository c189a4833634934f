"""While a step is not recorded, modules have no hook that would do nothing; whatever happens, it comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.facts import Units
from retrograd.core.hooks.compiled import has_compiled_code
from retrograd.core.hooks.listeners import is_ours
from tests.explaining.facts.looking import facts_of


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    if has_compiled_code():
        torch.compiler.reset()


class Spy(nn.Module):
    """Counts our hooks on its parts when it is called, and does what it is told to between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.seen: list[int] = []
        self.between: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(count_hooks(self))
        x = self.first(x)
        self.between()
        return self.second(x)


def count_hooks(model: Spy) -> int:
    return sum(is_ours(hook) for part in (model.first, model.second) for hook in part._forward_hooks.values())


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_hooks_rest_in_steps_that_are_not_recorded() -> None:
    model = Spy()
    with rg.record(model, schedule=lambda step: step % 4 == 0) as recording:
        train(model, 9)
        assert count_hooks(model) == 2
    assert model.seen == [2, 2, 0, 0, 2, 0, 0, 0, 2]  # all stay in the first two calls
    for site in ("first:output", "second:output.grad"):
        assert recording.history[site].steps.tolist() == [0, 4, 8]
    assert count_hooks(model) == 0


def test_hooks_rest_for_the_whole_of_a_gap_that_is_known() -> None:
    model, between = Spy(), list[tuple[int, int]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, schedule=rg.every(4)) as recording:
        for _ in range(14):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            optimizer.step()
            between.append((count_hooks(model), len(model.first.weight._backward_hooks or ())))
            model.first(torch.ones(2, 3))  # a part by itself begins a recorded step, too
    assert model.seen == [2, 2, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 2, 0]
    assert between[3:9] == [(2, 1), (2, 1), (0, 0), (0, 0), (2, 1), (2, 1)]
    for site in ("first:output", "second:output.grad", "first:weight.grad"):
        assert recording.history[site].select(phase=None).steps.tolist()[:4] == [0, 4, 8, 12]
    assert count_hooks(model) == 0
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_hooks_come_back_where_steps_have_other_numbers_than_was_expected() -> None:
    model = Spy()
    with rg.record(model, schedule=rg.every(4)) as recording:
        for step in (0, 1, 2, 3, 5, 6, 9, 12, 13):
            recording.begin_step(step)
            train(model, 1)
            model.seen.append(count_hooks(model))
    within, between = model.seen[::2], model.seen[1::2]
    assert within == [2, 2, 0, 0, 0, 0, 0, 2, 0]
    assert between == [2, 2, 0, 2, 2, 0, 2, 2, 0]  # at 5 and at 9 it was not known that they come
    assert recording.history["first:output"].steps.tolist() == [0, 12]


def test_what_is_recorded_is_what_a_hook_by_hand_finds() -> None:
    model, found = Spy(), []
    model.first.register_forward_hook(
        lambda module, args, output: found.append(output.detach().double())
    )  # ours stays beside it
    with rg.record(model, schedule=lambda step: step % 3 == 0) as recording:
        train(model, 7)
    assert model.seen == [2, 2, 1, 2, 1, 1, 2]  # ours stays beside a hook of the program's
    expected = [float(found[step].square().mean().sqrt()) for step in (0, 3, 6)]
    assert recording.history["first:output"].rms.tolist() == pytest.approx(expected, rel=1e-6)


def test_hooks_come_back_after_an_exception() -> None:
    model = Spy()

    def fail() -> None:
        raise RuntimeError("in the middle")

    with rg.record(model, schedule=lambda step: False):
        train(model, 3)
        model.between = fail
        with pytest.raises(RuntimeError, match="in the middle"):
            train(model, 1)
        assert (model.seen[-1], count_hooks(model)) == (0, 2)


def test_hooks_come_back_after_ctrl_c() -> None:
    model = Spy()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with rg.record(model, schedule=lambda step: step in (0, 6)) as recording:
        train(model, 4)
        model.between = interrupt
        with pytest.raises(KeyboardInterrupt):  # after which torch calls no hook
            train(model, 1)
        model.between = lambda: None
        train(model, 3)
    assert recording.history["first:output"].steps.tolist() == [0, 6]
    assert count_hooks(model) == 0


def test_a_part_that_is_called_by_itself_begins_the_next_step() -> None:
    model = Spy()
    with rg.record(model, schedule=lambda step: step in (0, 5)) as recording:
        train(model, 5)
        train(model.first, 1)
    assert recording.history["first:output"].steps.tolist() == [0, 5]
    assert recording.history["second:output"].steps.tolist() == [0]


def test_a_model_that_trains_itself_is_recorded_from_the_middle_of_its_forward_on() -> None:
    model = Spy()
    inner = torch.optim.SGD(model.first.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(3):
            inner.zero_grad()
            model.first(torch.ones(2, 3)).sum().backward()
            inner.step()

    def record(rests: bool) -> list[int]:
        with rg.record(model, schedule=lambda step: step >= 5) as recording:
            if not rests:
                model.first.register_forward_hook(lambda module, args, output: None)
            model.between = lambda: None
            train(model, 4)
            model.between = steps
            train(model, 1)
        return recording.history["first:output"].select(phase=None, backward=None).steps.tolist()

    resting = record(True)
    assert resting == record(False)
    assert resting


def test_nothing_rests_where_another_recording_may_want_it() -> None:
    model = Spy()
    with rg.record(model, schedule=lambda step: False), rg.record(model) as other:
        train(model, 4)
        assert model.seen == [2, 2, 2, 2]
    assert len(other.history["second:output"].steps) == 4


def test_a_hook_that_the_program_sets_meanwhile_runs_behind_ours() -> None:
    model = Spy()

    def set_hook() -> None:
        model.second.register_forward_hook(lambda module, args, output: output * 0 + 7)
        model.between = lambda: None

    with rg.record(model, schedule=lambda step: step in (0, 6)) as recording:
        train(model, 4)
        model.between = set_hook
        train(model, 3)
    assert model.seen[-3:] == [0, 1, 2]
    assert 7 not in recording.history["second:output"].mean


@pytest.mark.parametrize("schedule", [1, 4, lambda step: step % 4 == 0], ids=["all", "gaps", "function"])
def test_a_hook_on_a_weight_that_is_set_meanwhile_runs_behind_ours(schedule: Any) -> None:
    torch.manual_seed(0)
    model = Spy()
    with rg.record(model, schedule=schedule) as recording:
        train(model, 6)
        model.second.weight.register_hook(lambda gradient: gradient * 0)
        train(model, 7)
    assert (recording.history["second:weight.grad"].select(phase=None).l2 > 0).all()
    assert model.second.weight.grad is not None
    assert not model.second.weight.grad.any()


@pytest.mark.parametrize("attaches", [True, False])
def test_a_recording_that_begins_or_ends_meanwhile(attaches: bool) -> None:
    model = Spy()
    recording = rg.record(model, schedule=lambda step: False)
    recording.__enter__()
    train(model, 3)
    others: list[Any] = []
    model.between = (lambda: others.append(rg.record(model).__enter__())) if attaches else recording.close
    train(model, 1)
    assert (model.seen[-1], count_hooks(model)) == (0, 2 * attaches)
    model.between = lambda: None
    for each in (*others, recording):
        each.close()
    assert count_hooks(model) == 0


def test_hooks_for_facts_rest_between_looks_though_each_step_is_recorded() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    seen: list[tuple[int, int]] = []

    class Seeing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((len(model[0]._forward_hooks), len(model[1]._forward_hooks)))
            return x

    model.append(Seeing())
    with rg.record(model, sites="0:output") as recording:
        train(model, 45)
    looks = [step for step, (_, units) in enumerate(seen) if units]
    assert {first for first, _ in seen} == {1}
    assert looks[:3] == [0, 1, 2]  # what a unit does is read at these
    assert 4 < len(looks) < 20
    assert len(recording.history["0:output"].steps) == 45
    units = [fact.moment.step for fact in facts_of(recording, Units)]
    assert units
    assert set(units) <= set(looks)
    assert not model[1]._forward_hooks


@pytest.mark.parametrize("every", [1, 16])
def test_what_is_compiled_meanwhile_is_compiled_once(every: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    compiled = 0

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, sites="0:output", schedule=rg.every(every)):
        train(model, 5)
        quick = torch.compile(model, backend=count)
        for _ in range(40):
            optimizer.zero_grad()
            quick(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert compiled == 1
    torch.compiler.reset()


def test_nothing_rests_beside_compiled_code() -> None:
    model = Spy()
    twice = torch.compile(lambda: torch.ones(2) * 2, backend="eager")
    model.between = twice
    with rg.record(model, schedule=lambda step: False):
        train(model, 4)
    assert model.seen == [2, 2, 2, 2]
    torch.compiler.reset()
