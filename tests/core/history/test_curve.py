"""Numbers over steps: entries by place and by step, and what numpy and pandas make of them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import CallError, NoSuchNameError, NoSuchStepError
from retrograd.core.history.curve import Curve

STEPS = np.array([0, 5, 10, 15])
VALUES = np.array([4.0, 3.0, np.nan, 1.0])
CURVE = Curve(STEPS, VALUES)
EMPTY = Curve(STEPS[:0], VALUES[:0])


def test_entries_are_found_by_place_and_by_step() -> None:
    assert (CURVE[0], CURVE[-1], CURVE.last, CURVE[np.int64(1)]) == (4.0, 1.0, 1.0, 3.0)
    assert (CURVE.at(5), CURVE.at(15)) == (3.0, 1.0)
    assert np.isnan(CURVE.at(10))
    assert isinstance(CURVE[0], float)


@pytest.mark.parametrize(
    "index", [slice(-2, None), slice(None, None, 2), [0, 3], np.array([True, False, False, True]), slice(9, 12)]
)
def test_a_part_is_a_curve_of_these_steps(index: slice) -> None:
    part = CURVE[index]
    assert isinstance(part, Curve)
    assert np.array_equal(part.steps, STEPS[index])
    assert np.array_equal(part.values, VALUES[index], equal_nan=True)


def test_it_unpacks_to_steps_and_values() -> None:
    steps, values = CURVE
    assert steps is STEPS
    assert values is VALUES
    assert len(CURVE) == 4


@pytest.mark.parametrize(("curve", "words"), [(CURVE, "steps 0 to 15"), (EMPTY, "record some steps")])
def test_a_step_that_is_not_there_says_which_are(curve: Curve, words: str) -> None:
    for kind in (IndexError, KeyError):
        with pytest.raises(kind) as error:
            curve[4]
        assert words in str(error.value)
    with pytest.raises(NoSuchStepError, match="step 7"):
        curve.at(7)


def test_numpy_takes_it_for_its_values() -> None:
    other = Curve(STEPS, VALUES + 1)
    assert np.array_equal(other - CURVE, [1, 1, np.nan, 1], equal_nan=True)
    assert np.array_equal(np.log(CURVE), np.log(VALUES), equal_nan=True)
    assert np.array_equal(CURVE > 2, [True, True, False, False])
    assert np.nanmin(CURVE) == 1.0
    assert np.asarray(CURVE) is VALUES
    assert np.array(CURVE) is not VALUES
    assert np.asarray(CURVE, np.float32).dtype == np.float32
    with pytest.raises(CallError, match="different steps"):
        CURVE - CURVE[:2]


def test_pandas_has_the_step_as_index() -> None:
    pytest.importorskip("pandas")
    series = CURVE.to_pandas()
    assert list(series.index) == list(STEPS)
    assert series.index.name == "step"
    assert series[5] == 3.0


def test_its_repr_is_short() -> None:
    assert repr(CURVE) == "Curve(4 steps 0…15: … 3, nan, 1)"
    assert repr(EMPTY) == "Curve(no steps)"


def test_it_is_copied_and_pickled() -> None:
    for again in (copy.deepcopy(CURVE), pickle.loads(pickle.dumps(CURVE))):
        assert np.array_equal(again.values, VALUES, equal_nan=True)


def test_a_series_finds_its_steps_alike() -> None:
    model = nn.Linear(2, 1)
    with rg.record(model, every=3) as recording:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    series = recording.history["self:weight.grad"]
    assert [entry.step for entry in series] == [0, 3, 6]
    assert repr(series.at(3)) == repr(series[1])
    assert repr(series[1]) == "<step 3: rms 1, mean 1, std 0, abs_max 1, l2 1.41, 2 elements>"
    assert list(series[[0, 2]].steps) == [0, 6]
    for ask in (lambda: series[3], lambda: series.at(1)):
        with pytest.raises(NoSuchStepError, match="steps 0 to 6"):
            ask()


def test_a_scalar_that_is_not_there_names_the_nearest() -> None:
    history = rg.History()
    with pytest.raises(NoSuchNameError, match="none"):
        history.scalars["x"]
    assert "x" not in history.scalars
    assert history.scalars.get("x") is None
