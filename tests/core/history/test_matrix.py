import numpy as np
import pytest
from hypothesis import given, settings

from retrograd.core.errors import NoSuchSiteError, StatisticError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment, RowBatch
from retrograd.core.statistics.row import STATISTICS
from tests.core.history.made import SITES, make_batch, make_steps
from tests.core.history.strategies import many_batches
from tests.core.history.test_series import make_history


@settings(deadline=None)
@given(many_batches)
def test_a_line_is_the_series_of_its_site(batches: list[RowBatch]) -> None:
    history = make_history(batches)
    for statistic in STATISTICS:
        matrix = history.matrix(statistic, SITES)
        assert matrix.values.shape == (len(SITES), len(matrix.steps))
        for site, line in zip(matrix.sites, matrix.values, strict=True):
            series = history[site]
            expected = np.full(len(matrix.steps), np.nan)
            expected[np.searchsorted(matrix.steps, series.steps)] = series.statistic(statistic)
            np.testing.assert_allclose(line, expected, rtol=1e-12)


def test_choosing_sites_and_phase() -> None:
    history = make_history([*make_steps(range(3)), make_batch(Moment(9, 0, -1, "eval"), {2: np.full(2, 5.0)})])
    chosen = history.matrix("mean", ["b:output", "a:output", "b:output"])
    assert chosen.steps.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(chosen.values[0], history["b:output"].mean)
    np.testing.assert_array_equal(chosen.values[1], history["a:output"].mean)
    np.testing.assert_array_equal(chosen.values[0], chosen.values[2])
    assert history.matrix("mean", phase="eval").steps.tolist() == [9]
    assert history.matrix("mean", phase=None).steps.tolist() == [0, 1, 2, 9]
    assert history.matrix("mean", []).values.shape == (0, 0)


def test_steps_far_apart() -> None:
    history = make_history(make_steps([0, 10**12, 5]))
    assert history.matrix("rms").steps.tolist() == [0, 5, 10**12]


def test_nothing_recorded_yet() -> None:
    assert History().matrix("rms").values.shape == (0, 0)
    assert make_history([]).matrix("rms").values.shape == (len(SITES), 0)


def test_what_is_not_there() -> None:
    history = make_history(make_steps([0]))
    with pytest.raises(StatisticError, match="'kurtosis'"):
        history.matrix("kurtosis")
    with pytest.raises(NoSuchSiteError, match="'a:output'"):
        history.matrix("rms", ["a:ouput"])


def test_many_rows() -> None:
    one = make_batch(Moment(0, 0, 0), {number: np.arange(4.0) for number in range(50)})
    history = History()
    history.add_sites([f"layers.{number}:output" for number in range(50)])
    for step in range(10_000):
        history.add_rows(RowBatch(Moment(step, 0, 0), one.rows, one.bins))
    matrix = history.matrix("rms")
    assert matrix.values.shape == (50, 10_000)
    np.testing.assert_array_equal(matrix.values, np.sqrt(14 / 4))
    assert len(history["layers.49:output"]) == 10_000
