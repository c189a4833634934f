"""Every detector on records that hold next to nothing: it may say that it cannot tell, and must not fail."""

from collections.abc import Callable

import numpy as np
import pytest

from retrograd.core.history.history import History
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.explain import explain_record
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.by_hand import Elements, make_record, spread


def whole(step: int, factor: float = 1.0) -> Elements:
    """All kinds of sites."""
    names = ("0:output", "1:output", "2:output", "2:output.grad", "1:output.grad", "0:output.grad")
    parameters = ("0:weight.grad", "0:bias.grad", "2:weight.grad", "0:weight.update", "2:weight.update")
    return {name: factor * spread(1.0 + step) for name in (*names, *parameters)}


def one_step() -> Record:
    return make_record([0], whole, [0.7], weights=lambda step: {"0:weight": 1.0})


def resumed() -> Record:
    return make_record([700], whole, [0.7])


def all_nan() -> Record:
    return make_record(range(60), lambda step: whole(step, np.nan), [np.nan] * 60)


def nan_from_a_step_on() -> Record:
    losses = [0.7 if step < 20 else np.nan for step in range(60)]
    return make_record(range(60), lambda step: whole(step, 1.0 if step < 20 else np.nan), losses)


def all_zero() -> Record:
    return make_record(range(60), lambda step: whole(step, 0.0), [0.0] * 60)


def without_losses() -> Record:
    return make_record(range(60), whole)


def values_alone() -> Record:
    return make_record(range(60), lambda step: {"0:output": spread(1.0)}, [0.7] * 60)


def foreign_names() -> Record:
    return make_record(
        range(30), lambda step: {"watch/loss.grad": spread(1.0), "a b#3:output.x": spread(1.0)}, [0.7] * 30, modules={}
    )


def few_of_many_steps() -> Record:
    return make_record(range(0, 10**6, 10**5), whole, [0.7] * 10, weights=lambda step: {"0:weight": 1.0})


def nothing() -> Record:
    return Record(History())


MAKERS = [
    one_step, resumed, all_nan, nan_from_a_step_on, all_zero, without_losses, values_alone, foreign_names,
    few_of_many_steps, nothing,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS)
def test_no_detector_fails(make: Callable[[], Record]) -> None:
    found = explain_record(make(), DETECTORS)
    assert not [each for each in found.not_checked if "it failed" in each.reason]
    assert all(each.message and each.as_json() for each in found)


@pytest.mark.parametrize("make", [one_step, resumed, values_alone, foreign_names, nothing])
def test_next_to_nothing_is_no_fault(make: Callable[[], Record]) -> None:
    assert not explain_record(make())
