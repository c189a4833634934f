import struct

import numpy as np
import pytest
from hypothesis import given, settings

from retrograd.core.history.rows import decode_batches
from retrograd.core.history.sink import PHASES, Moment, RowBatch
from retrograd.core.statistics.row import BINS
from tests.core.history.made import SITES, count_exponents, make_batch
from tests.core.history.strategies import many_batches

GRADIENTS = np.array([site.endswith(".grad") for site in SITES])
FIELDS = struct.Struct("<2i6q6d2i")


@settings(deadline=None)
@given(many_batches)
def test_decoding_agrees_with_struct(batches: list[RowBatch]) -> None:
    columns = decode_batches(batches, GRADIENTS)
    place = start = 0
    for batch in batches:
        counts = np.frombuffer(batch.bins, np.int64)
        used = 0
        for number, calls, order, count, *fields in FIELDS.iter_unpack(batch.rows):
            nan, pos, neg, zeros, total, m2, abs_sum, low, high, reference, _, length = fields
            is_gradient = SITES[number].endswith(".grad")
            scale = batch.scale if is_gradient else 1.0
            assert columns["site"][place] == number
            assert columns["step"][place] == batch.moment.step
            assert columns["micro"][place] == batch.moment.micro
            assert columns["backward"][place] == (batch.moment.backward if is_gradient else -1)
            assert PHASES[columns["phase"][place]] == batch.moment.phase
            assert columns["scale"][place] == scale
            for name, value in zip(
                ("calls", "order", "count", "nan", "pos_inf", "neg_inf", "zeros"),
                (calls, order, count, nan, pos, neg, zeros),
                strict=True,
            ):
                assert columns[name][place] == value
            expected = np.array([total, abs_sum, low, high, m2 / scale]) / scale
            found = [columns[name][place] for name in ("sum", "abs_sum", "min", "max", "m2")]
            np.testing.assert_allclose(found[:-1], expected[:-1], rtol=1e-15 if scale != 3.0 else 1e-14)
            np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-14, atol=0)
            assert columns["reference"][place] == reference
            stretch = columns["bins"][start : start + columns["bin_count"][place]]
            assert stretch.sum() == counts[used : used + length].sum()
            start += len(stretch)
            used += length
            place += 1
    assert place == len(columns["step"])
    assert start == len(columns["bins"])


@pytest.mark.parametrize("log_scale", [-3, 0, 1, 16, 200, 300])
def test_a_power_of_two_is_divided_out_exactly(log_scale: int) -> None:
    generator = np.random.default_rng(0)
    gradient = generator.standard_normal(50) * np.exp2(generator.integers(-100, 100, 50))
    scaled = np.ldexp(gradient, log_scale)
    columns = decode_batches([make_batch(Moment(0, 0, 0), {1: scaled}, scale=2.0**log_scale)], GRADIENTS)
    plain = decode_batches([make_batch(Moment(0, 0, 0), {1: gradient})], GRADIENTS)
    for name in ("sum", "m2", "abs_sum", "min", "max"):
        assert columns[name] == plain[name]
    assert columns["scale"] == 2.0**log_scale
    bins = np.zeros(BINS, np.int64)
    bins[columns["first_bin"][0] :][: columns["bin_count"][0]] = columns["bins"]
    moved = np.clip(np.arange(BINS) - log_scale, 0, BINS - 1)
    expected = np.zeros(BINS, np.int64)
    np.add.at(expected, moved, count_exponents(scaled))
    np.testing.assert_array_equal(bins, expected)


def test_values_and_updates_are_not_scaled() -> None:
    ones = np.ones(3)
    columns = decode_batches([make_batch(Moment(0, 0, 0), {0: ones, 1: ones, 4: ones}, scale=4.0)], GRADIENTS)
    np.testing.assert_array_equal(columns["sum"], [3.0, 0.75, 3.0])
    np.testing.assert_array_equal(columns["backward"], [-1, 0, -1])
    np.testing.assert_array_equal(columns["scale"], [1.0, 4.0, 1.0])


def test_users_statistics_find_their_rows() -> None:
    first = make_batch(Moment(0), {0: np.ones(1), 2: np.ones(1)}, custom={"x": ([2, 0], [20.0, 10.0])})
    second = make_batch(Moment(1), {0: np.ones(1), 1: np.ones(1)}, custom={"y": ([0, 0], [1.0, 3.0])})
    columns = decode_batches([first, second], GRADIENTS)
    np.testing.assert_array_equal(columns["x"], [10.0, 20.0, np.nan, np.nan])
    np.testing.assert_array_equal(columns["y"], [np.nan, np.nan, 2.0, np.nan])


@pytest.mark.parametrize("rows", [{}, {0: np.ones(1)}])
def test_a_users_statistic_without_its_row_is_refused(rows: dict[int, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="'x' has values for rows that are not in its batch"):
        decode_batches([make_batch(Moment(0), rows, custom={"x": ([3], [1.0])})], GRADIENTS)


def test_no_batches() -> None:
    columns = decode_batches([], GRADIENTS)
    assert all(len(column) == 0 for column in columns.values())
