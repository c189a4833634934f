"""What kind of forward rows come from, and what becomes of many forwards of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from retrograd.core.limits import LIMITS
from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row


def make_net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.train()
    optimizer.zero_grad()
    net(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def test_validation_in_the_middle_of_accumulation() -> None:
    net, optimizer = make_net()
    with collect(net) as seen:
        for _ in range(2):
            net(torch.randn(5, 3)).sum().backward()
            with torch.no_grad():
                net(torch.randn(5, 3))
        optimizer.step()
    assert [(row.step, row.micro, row.phase) for row in seen.all("0:output")] == [
        (0, 0, "train"),
        (0, 1, "train"),
        (0, 0, "no_grad"),
    ]
    assert seen.one("0:output", phase="no_grad").calls == 2


def test_a_forward_that_waits_for_no_backward() -> None:
    net, _ = make_net()
    with collect(net) as seen:
        net(torch.randn(5, 3))
    assert {row.phase for row in seen.rows} == {"forward"}


def test_no_grad_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling from a model that is not trained at all."""
    monkeypatch.setattr(LIMITS, "pending_seconds", float("inf"))  # on a busy machine it takes long
    net, _ = make_net()
    with collect(net) as seen, torch.inference_mode():
        for _ in range(250):
            net(torch.randn(2, 3))
    row = seen.one("0:output")
    assert (row.step, row.phase, row.calls) == (0, "inference", 250)


def test_only_scheduled_steps_are_recorded() -> None:
    net, optimizer = make_net()
    with collect(net, schedule=lambda step: step in (1, 4)) as seen:
        for _ in range(6):
            train(net, optimizer)
            with torch.no_grad():
                net(torch.randn(2, 3))
    assert {row.step for row in seen.rows if row.phase == "train"} == {1, 4}
    # What follows step 0 comes before step 1.
    assert {row.step for row in seen.rows if row.phase == "no_grad"} == {1, 4}
    assert [(event.moment.step, event.value) for event in seen.events_of("update")] == [(1, 2), (4, 5)]
    assert [event.moment.step for event in seen.events_of("loss")] == [1, 4]
    for site in ("0:output", "0:output.grad", "0:weight.grad", "0:weight.update"):
        assert [row.step for row in seen.all(site, phase="train")] == [1, 4]


def test_a_schedule_that_raises_records_nothing_more() -> None:
    net, optimizer = make_net()
    with collect(net, schedule=lambda step: 1 // (2 - step) > -1) as seen, pytest.warns(UserWarning, match="schedule"):
        for _ in range(4):
            train(net, optimizer)
    assert {row.step for row in seen.rows} == {0, 1}
    assert seen.facts["faults"] == {"schedule": 1}


def test_closing_in_the_middle_hands_over_what_is_there() -> None:
    net, _ = make_net()
    with collect(net) as seen:
        out = net(torch.randn(5, 3))
    out.sum().backward()  # the hooks that are left do nothing
    assert {(row.phase, row.backward) for row in seen.rows} == {("forward", -1)}
    assert seen.status == "finished"


def test_the_status_tells_how_it_ended() -> None:
    net, _ = make_net()
    with pytest.raises(ZeroDivisionError), collect(net) as seen:
        raise ZeroDivisionError
    assert seen.status == "failed"


def _values_and_gradients(net: nn.Module, batches: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What ``net.0`` returns for each batch, and its gradient in the sum of squares, by plain autograd."""
    found = []
    for batch in batches:
        hidden = net[0](batch)  # type: ignore[index]
        (gradient,) = torch.autograd.grad(net[2](net[1](hidden)).square().sum(), hidden)  # type: ignore[index]
        found.append((hidden.detach(), gradient))
    return found


def _evaluate_dropped(net: nn.Module, batch: torch.Tensor, kept: list[torch.Tensor]) -> None:
    net(batch).argmax(1)


def _evaluate_held(net: nn.Module, batch: torch.Tensor, kept: list[torch.Tensor]) -> None:
    kept[:] = [net(batch)]


def _evaluate_held_for_good(net: nn.Module, batch: torch.Tensor, kept: list[torch.Tensor]) -> None:
    kept.append(net(batch).square().mean())


EVALUATIONS = [_evaluate_dropped, _evaluate_held, _evaluate_held_for_good]


@pytest.mark.parametrize("sites", [None, "*:output", "*:output.grad", ["*:output", "*:weight.grad"]], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train mode", "eval mode"])
@pytest.mark.parametrize("evaluate", EVALUATIONS)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_an_evaluation_with_grad_displaces_nothing(
    count: int, evaluate: Callable[..., None], training: bool, sites: Any
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    batches = [torch.randn(5, 3) for _ in range(6)]
    expected = _values_and_gradients(net, batches)
    probe = torch.randn(7, 3)
    kept: list[torch.Tensor] = []
    with collect(net, sites=sites) as seen:
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            net(batch).square().sum().backward()
            optimizer.step()
            if step % 2:
                net.train(training)
                for _ in range(count):
                    evaluate(net, probe, kept)
                net.train()
    values, gradients = seen.all("0:output", phase="train"), seen.all("0:output.grad")
    if sites != "*:output.grad":
        assert len(values) == 6
        for row, (value, _) in zip(values, expected, strict=True):
            assert_row(row, value)
        evaluations = [row for row in seen.rows if row.site == "0:output" and row.phase != "train"]
        assert {row.phase for row in evaluations} == {"forward" if training else "eval"}
        assert {row.step for row in evaluations} == {2, 4, 6}
        assert sum(row.calls for row in evaluations if row.step < 6) == 2 * count
        assert {row.site for row in seen.rows if row.step < 6 and "#" in row.site} == set()
    if sites in (None, "*:output.grad"):
        assert len(gradients) == 6
        for row, (_, gradient) in zip(gradients, expected, strict=True):
            assert_row(row, gradient)
    steps = [event.moment.step for event in seen.events_of("loss")]
    assert steps == list(range(6))
    assert not [name for name in seen.names if "#" in name] or evaluate is not _evaluate_dropped


@pytest.mark.parametrize("training", [True, False], ids=["train mode", "eval mode"])
def test_an_evaluation_between_a_forward_and_its_backward(training: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batches = [torch.randn(5, 3) for _ in range(3)]
    expected = _values_and_gradients(net, batches)
    with collect(net) as seen:
        for batch in batches:
            out = net(batch)
            net.train(training)
            net(torch.randn(7, 3)).argmax(1)
            net.train()
            out.square().sum().backward()
    for row, gradient, (value, of_value) in zip(
        seen.all("0:output", phase="train"), seen.all("0:output.grad"), expected, strict=True
    ):
        assert_row(row, value)
        assert_row(gradient, of_value)
    assert [row.phase for row in seen.rows if row.count == 28] == ["forward" if training else "eval"] * 6


def test_two_forwards_that_are_trained_together_are_calls() -> None:
    """Also when their passes come one after the other, and when an evaluation lies between."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    batches = [torch.randn(5, 3) for _ in range(2)]
    expected = _values_and_gradients(net, batches)
    for backward in ("joint", "first to last", "last to first"):
        with collect(net) as seen:
            first = net(batches[0]).square().sum()
            net(torch.randn(9, 3)).argmax(1)
            second = net(batches[1]).square().sum()
            if backward == "joint":
                (first + second).backward()
            else:
                for loss in (first, second) if backward == "first to last" else (second, first):
                    loss.backward()
        for name, (value, gradient) in zip(("0", "0#2"), expected, strict=True):
            assert_row(seen.one(f"{name}:output", phase="train"), value)
            assert_row(seen.one(f"{name}:output.grad"), gradient)
        assert [row.site for row in seen.rows if row.count == 36] == ["0:output", "1:output"]


def test_kept_tensors_and_own_statistics_of_an_evaluation_are_its_own() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def largest(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.max()

    with collect(net, tensors="0:output*", statistics=[largest]) as seen:
        held = net(torch.randn(7, 3))
        batch = torch.randn(5, 3)
        net(batch).square().sum().backward()
    ((value, gradient),) = _values_and_gradients(net, [batch])
    (kept,) = seen.kept("0:output", phase="train")
    assert torch.equal(kept.tensor, value)
    (kept,) = seen.kept("0:output.grad")
    assert torch.equal(kept.tensor, gradient)
    (kept,) = seen.kept("0:output", phase="forward")
    assert kept.tensor.shape == (7, 4)
    assert seen.one("0:output", phase="train").largest == pytest.approx(value.max().item())
    assert seen.one("0:output", phase="forward").largest == pytest.approx(kept.tensor.max().item())
    assert seen.one("2:output", phase="forward").largest == pytest.approx(held.max().item())
    assert not [name for name in seen.names if "#" in name]


def test_a_teacher_that_runs_with_grad_is_an_evaluation() -> None:
    torch.manual_seed(0)
    net, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
    with collect({"net": net, "teacher": teacher}) as seen:
        for _ in range(3):
            x = torch.randn(5, 3)
            wanted = teacher(x).detach()
            (net(x) - wanted).square().sum().backward()
    assert {row.phase for row in seen.rows if row.site == "teacher:output"} == {"forward"}
    assert {row.phase for row in seen.rows if row.site == "net:output"} == {"train"}
