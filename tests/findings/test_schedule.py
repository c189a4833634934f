import math
from collections.abc import Sequence

import numpy as np

from retrograd.findings.detectors.schedule import (
    count_waves,
)
from retrograd.findings.record import Record
from retrograd.history.facts import OptimizerMade
from retrograd.history.sink import Moment
from tests.findings.by_hand import ask
from tests.findings.programs import make_call, make_optimizer, make_program


def _scheduled(rates: Sequence[float], kind: str = "StepLR", losses: Sequence[float] = (), every: int = 1) -> Record:
    """A program with these learning rates, whose scheduler is stepped behind each update, or every n-th."""
    calls = []
    for step, rate in enumerate(rates):
        calls += [make_call(step, "backward", {}), make_call(step, "step", {"lr": [rate]})]
        if step % every == every - 1:
            calls.append(make_call(step + 1, "scheduler.step", {"about": kind}))
    calls.sort(key=lambda call: call.step)
    return make_program(calls, losses or [1.0] * len(rates))


FALLING = [0.1 * 0.05 ** (step // 10) for step in range(100)]
COSINE = [0.05 * (1 + math.cos(math.pi * step / 100)) for step in range(100)]
WAVES = [0.05 * (1 + math.cos(math.pi * step / 8)) for step in range(100)]


def test_a_scheduler_of_epochs_that_is_stepped_with_every_update() -> None:
    [found] = ask("scheduler-per-step", _scheduled(FALLING))
    assert (found.severity, found.line) == ("warning", "train.py:15")
    assert "from 0.1 to 0.00025 after 20 of 100 updates by StepLR, which is stepped once per update" in found.message
    assert not ask("lr-zero", _scheduled(FALLING))


def test_a_cosine_in_epochs_goes_up_and_down() -> None:
    [found] = ask("scheduler-per-step", _scheduled(WAVES, "CosineAnnealingLR"))
    assert "6 times between" in found.message
    assert not ask("scheduler-per-step", _scheduled(WAVES, "CosineAnnealingWarmRestarts"))


def test_schedules_that_are_as_they_should_be() -> None:
    learned = [10.0 * 0.8**step for step in range(100)]
    for record in (
        _scheduled(COSINE, "CosineAnnealingLR"),
        _scheduled(FALLING, losses=learned),
        _scheduled([0.1] * 100),
    ):
        assert not ask("scheduler-per-step", record)
        assert not ask("lr-zero", record)


def test_a_learning_rate_of_zero() -> None:
    [found] = ask("lr-zero", _scheduled([0.0] * 20, "LambdaLR"))
    assert (found.severity, found.line) == ("critical", "train.py:15")
    assert "is 0 at all 20 updates (LambdaLR)" in found.message


def test_a_learning_rate_that_falls_to_next_to_nothing() -> None:
    [found] = ask("lr-zero", _scheduled(FALLING, "LambdaLR"))
    assert found.step == 20
    [found] = ask("lr-zero", _scheduled(FALLING, every=10))
    assert "which is stepped once per update" not in found.message


def test_a_warm_up_from_zero() -> None:
    assert not ask("lr-zero", _scheduled([0.0, 0.05, *[0.1] * 20]))


def test_waves_are_counted_by_hand() -> None:
    assert count_waves(np.array([1.0, 0.0, 1.0, 0.0, 1.0])) == 2
    assert count_waves(np.array(COSINE)) == 0


def test_a_scheduler_ahead_of_the_optimizer() -> None:
    calls = [make_call(0, name, {}) for name in ("scheduler.step", "forward", "backward", "step")]
    [found] = ask("scheduler-before-step", make_program(calls))
    assert (found.severity, found.line) == ("warning", "train.py:15")
    behind = [make_call(0, name, {}) for name in ("forward", "backward", "step", "scheduler.step")]
    assert not ask("scheduler-before-step", make_program(behind))
    assert not ask("scheduler-before-step", make_program(behind[:3]))


def test_a_learning_rate_that_jumps() -> None:
    jump = [0.01] * 20 + [1.0] * 20
    [found] = ask("lr-jump", _scheduled(jump, losses=[0.5] * 20 + [5.0] * 20))
    assert found.step == 20
    assert "from 0.01 to 1 at step 20, and the loss goes from 0.5 to 5" in found.message


def test_rises_that_do_no_harm() -> None:
    jump = [0.01] * 20 + [1.0] * 20
    assert not ask("lr-jump", _scheduled(jump, losses=[0.5] * 40))
    restart = [0.1, *[0.001] * 19, *[0.1] * 20]
    assert not ask("lr-jump", _scheduled(restart, losses=[0.5] * 20 + [5.0] * 20))
    warm_up = [0.0, 0.001, 0.1, *[1.0] * 37]
    assert not ask("lr-jump", _scheduled(warm_up, losses=[0.5] * 3 + [5.0] * 37))


def test_a_scheduler_ahead_of_each_epoch() -> None:
    epochs = [("step", "step", "scheduler.step")] * 4 + [("step", "step")]
    calls = [make_call(0, name, {}) for epoch in epochs for name in epoch]
    kept = make_program([make_optimizer(initial_lr=0.1), *calls])  # none before the first update either, it seems
    kept.status = "finished"
    assert not ask("scheduler-before-step", kept)
    record = make_program([make_optimizer(initial_lr=0.2), *calls])
    record.status = "finished"
    [found] = ask("scheduler-before-step", record)
    assert "before the updates of its epoch" in found.message
    behind = make_program([make_call(0, name, {}) for name in ("step", "step", "scheduler.step") * 5])
    behind.status = "finished"
    assert not ask("scheduler-before-step", behind)
    record.status = "stopped"
    assert not ask("scheduler-before-step", record)


def test_a_group_that_does_not_learn() -> None:
    calls = [make_call(step, "step", {"lr": [0.0, 0.1]}) for step in range(5)]
    groups = ({"lr": 0.0, "parameters": ["0:weight", "0:bias"]}, {"lr": 0.1, "parameters": ["1:weight"]})
    made = OptimizerMade(name="SGD#1", line="train.py:5", groups=groups, moment=Moment(0))
    [found] = ask("lr-zero", make_program([made, *calls]))
    assert (found.severity, found.site, found.line) == ("warning", "0:weight", "train.py:5")
    assert "of 0:weight and 0:bias is 0 at all 5 updates" in found.message
    warm = [make_call(step, "step", {"lr": [0.0 if step < 2 else 0.1, 0.1]}) for step in range(5)]
    assert not ask("lr-zero", make_program([made, *warm]))


def test_a_learning_rate_of_zero_for_all_the_rest() -> None:
    learned = [10.0 * 0.8**step for step in range(100)]
    [found] = ask("lr-zero", _scheduled([0.1] * 30 + [0.0] * 70, losses=learned))
    assert found.step == 30
    assert not ask("lr-zero", _scheduled([0.1] * 90 + [0.0] * 10, losses=learned))
