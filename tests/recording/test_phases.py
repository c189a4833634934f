"""What kind of forward rows come from, and what becomes of many forwards of one kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.recording.collector import collect
from tests.recording.oracle import assert_row, listen


def make_net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.train()
    optimizer.zero_grad()
    net(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("context", "phase"),
    [(torch.no_grad, "no_grad"), (torch.inference_mode, "inference"), (torch.enable_grad, "eval")],
)
def test_an_evaluation_is_one_record_a_step(context: type, phase: str) -> None:
    net, optimizer = make_net()
    values = []
    with collect(net) as seen:
        for _ in range(2):
            train(net, optimizer)
            net.eval()
            with listen(net) as oracle, context():
                for size in (4, 4, 2):
                    net(torch.randn(size, 3))
            values.append(oracle.values)
    for step in range(2):
        for path in ("0", "1", "2", "3", "self"):
            assert_row(seen.one(f"{path}:output", phase=phase, step=step + 1), *values[step][path])
            assert seen.one(f"{path}:output", phase="train", step=step).calls == 1
    assert not [row for row in seen.rows if "#" in row.site]
    assert not [row for row in seen.rows if row.phase == phase and row.backward >= 0]


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


def test_a_teachers_forward_between_forward_and_backward() -> None:
    net, optimizer = make_net()
    with collect(net) as seen:
        for _ in range(2):
            x = torch.randn(5, 3)
            with listen(net) as oracle:
                student = net(x)
                with torch.no_grad():
                    teacher = net(x * 2)
                (student - teacher).square().sum().backward()
            optimizer.step()
    for path in ("0", "3", "self"):
        assert_row(seen.one(f"{path}:output", step=1, phase="train"), oracle.values[path][0])
        assert_row(seen.one(f"{path}:output", step=1, phase="no_grad"), oracle.values[path][1])
        assert_row(seen.one(f"{path}:output.grad", step=1, phase="train"), oracle.gradients[path][0][0])


def test_parts_without_grad_belong_to_the_forward_that_they_are_in() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            with torch.inference_mode():
                self.teacher(x)
            return (self.student(x) - target).square().mean()

    net = Distilled()
    with collect(net) as seen:
        net(torch.randn(4, 3)).backward()
    assert {row.phase for row in seen.rows} == {"train"}
    assert seen.one("teacher#2:output").count == 8
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert "no gradient came" in reasons["teacher:output.grad"]


def test_a_forward_that_waits_for_no_backward() -> None:
    net, _ = make_net()
    with collect(net) as seen:
        net(torch.randn(5, 3))
    assert {row.phase for row in seen.rows} == {"forward"}


def test_training_with_the_model_in_eval_mode_is_training() -> None:
    net, optimizer = make_net()
    net.eval()
    with collect(net) as seen:
        for _ in range(2):
            net(torch.randn(5, 3)).sum().backward()
            optimizer.step()
    assert {(row.step, row.phase) for row in seen.rows} == {(0, "train"), (1, "train")}


def test_no_grad_as_a_whole() -> None:
    """Sampling from a model that is not trained at all."""
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
