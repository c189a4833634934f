import itertools

import numpy as np
import pytest

from retrograd.core.errors import NoSuchSiteError, StatisticError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment
from tests.core.history.made import SITES, make_batch


def make_history(batches: list, **rest: object) -> History:
    history = History(**rest)
    history.add_sites(SITES)
    for batch in batches:
        history.add_rows(batch)
    return history


def make_varied() -> History:
    """Elements of 100 step + 10 micro + backward, of training and of evaluation."""
    batches = []
    for step, micro, backward in itertools.product(range(3), range(2), range(2)):
        values = {1: np.array([100.0 * step + 10 * micro + backward])}
        if backward == 0:
            values[0] = values[1]
        batches.append(make_batch(Moment(step, micro, backward), values))
    batches.append(make_batch(Moment(1, 0, -1, "eval"), {0: np.array([7.0])}))
    return make_history(batches)


def test_selecting() -> None:
    history = make_varied()
    gradient, value = history["a:output.grad"], history["a:output"]
    assert gradient.mean.tolist() == [5, 105, 205]
    assert gradient.select(backward=1).mean.tolist() == [6, 106, 206]
    assert gradient.select(micro=1).mean.tolist() == [10, 110, 210]
    assert gradient.select(micro=1, backward=None).mean.tolist() == [10.5, 110.5, 210.5]
    assert gradient.select(micro=1).select(backward=1).mean.tolist() == [11, 111, 211]
    assert len(gradient.select(rank=1)) == 0
    assert value.mean.tolist() == [5, 105, 205]
    assert value.select(backward=1).mean.tolist() == [5, 105, 205]
    assert value.select(phase="eval").steps.tolist() == [1]
    assert value.select(phase=None).count.tolist() == [2, 3, 2]
    with pytest.raises(ValueError, match="give one of train"):
        value.select(phase="training")


def test_rows_are_unmerged() -> None:
    rows = make_varied()["a:output.grad"].select(backward=None).rows
    assert rows["step"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert rows["backward"].tolist() == [0, 1] * 6
    assert set(rows["phase"]) == {"train"}
    assert len({len(column) for column in rows.values()}) == 1


def test_the_value_is_of_the_very_same_calls() -> None:
    batches = [
        make_batch(Moment(0, 0, 0), {0: np.array([1.0]), 1: np.array([10.0])}),
        make_batch(Moment(0, 1, 0), {0: np.array([2.0])}),  # no backward in this micro-batch
        make_batch(Moment(0, 0, -1, "eval"), {0: np.array([3.0])}),
        make_batch(Moment(1, 0, 0), {0: np.array([4.0])}),
        make_batch(Moment(2, 0, 0), {0: np.array([5.0]), 1: np.array([50.0])}),
    ]
    history = make_history(batches)
    paired = history["a:output.grad"].value
    assert paired.site == "a:output"
    assert paired.steps.tolist() == [0, 2]
    assert paired.mean.tolist() == [1, 5]
    assert history["a:output.grad"].select(micro=1).value.steps.tolist() == []
    with pytest.raises(NoSuchSiteError, match="'b:weight'"):
        _ = history["b:weight.update"].value


def test_a_series_stays_as_it_was() -> None:
    history = make_history([make_batch(Moment(0, 0, 0), {1: np.ones(2)})])
    before = history["a:output.grad"]
    history.add_rows(make_batch(Moment(1, 0, 0), {1: np.ones(2)}))
    after = history["a:output.grad"]
    assert (len(before), len(after)) == (1, 2)
    assert before.rms.tolist() == [1.0]


def test_users_statistics() -> None:
    batches = [
        make_batch(Moment(0, micro, 0), {0: np.ones(1)}, custom={"entropy": ([0], [value])})
        for micro, value in enumerate([1.0, 4.0])
    ]
    series = make_history(batches)["a:output"]
    assert series.statistic("entropy").tolist() == [2.5]
    assert series.statistic("rms").tolist() == [1.0]
    with pytest.raises(StatisticError, match=r"no statistic 'entropi'.*\n.*entropy"):
        series.statistic("entropi")


def test_short_representations() -> None:
    history = make_varied()
    assert repr(history["a:output.grad"]) == "Series('a:output.grad': 3 steps 0…2, rms … 7.07, 105, 205)"
    assert "no steps" in repr(history["b:output"])
    assert repr(history).startswith("History(2 sites, steps 0…2, 19 rows")
    assert "no steps yet" in repr(History())


def test_statistics_explain_themselves() -> None:
    assert type(make_varied()["a:output"]).rms.__doc__
