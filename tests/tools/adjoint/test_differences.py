"""Slopes from finite differences, held against functions whose derivative is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.tools.adjoint.comparison import measure_slope

STEPS = (1e-4, 1e-6, 1e-2, 1e-8)
NOISE = 2e-16


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(-2, 2))
def test_polynomials(coefficients: list[float], place: float) -> None:
    polynomial = np.polynomial.Polynomial(coefficients)
    wanted = float(polynomial.deriv()(place))
    size = float(np.abs(coefficients).sum())
    slope = measure_slope(lambda t: float(polynomial(place + t)), STEPS, 1e-7, size, NOISE)
    assert not slope.is_kinked
    assert slope.value == pytest.approx(wanted, abs=1e-6 * max(size, abs(wanted)) + slope.error)


@pytest.mark.parametrize("place", [0.3, 2.0, -40.0])
def test_smooth_functions_are_exact_and_the_error_says_so(place: float) -> None:
    slope = measure_slope(lambda t: math.sin(place + t), STEPS, 1e-7, 1.0, NOISE)
    assert abs(slope.value - math.cos(place)) < 1e-10
    assert abs(slope.value - math.cos(place)) <= slope.error < 1e-7


@pytest.mark.parametrize("left", [0.0, -1.0, 3.0])
def test_a_kink(left: float) -> None:
    slope = measure_slope(lambda t: (t if t > 0 else left * t) + math.sin(3 * t), STEPS, 1e-7, 1.0, NOISE)
    assert slope.is_kinked


def test_a_kink_close_by_is_stepped_under() -> None:
    slope = measure_slope(lambda t: abs(t - 3e-5), STEPS, 1e-7, 1.0, NOISE)
    assert slope.value == pytest.approx(-1, abs=1e-6)
    assert not slope.is_kinked


def test_values_that_are_rounded_ask_for_larger_steps() -> None:
    slope = measure_slope(lambda t: float(np.float32(np.sin(1 + t))), STEPS, 1e-7, 1.0, NOISE)
    assert slope.value == pytest.approx(math.cos(1), abs=1e-4)
    assert abs(slope.value - math.cos(1)) <= slope.error < 1e-3


def test_a_constant() -> None:
    slope = measure_slope(lambda t: 7.0, STEPS, 1e-7, 1.0, NOISE)
    assert slope.value == 0
    assert slope.error < 1e-10


def test_a_slope_that_is_lost_in_rounding_is_said_to_be_unknown() -> None:
    slope = measure_slope(lambda t: 1.0 + 1e-14 * t, STEPS, 1e-7, 1e-14, NOISE)
    assert slope.error > 1e-13


def test_a_function_that_ends() -> None:
    slope = measure_slope(lambda t: math.sqrt(t) if t >= 0 else math.nan, STEPS, 1e-7, 1.0, NOISE)
    assert math.isnan(slope.value)
    assert slope.error == math.inf
