"""What is packed comes back, as exactly as promised."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from retrograd.core.views.page.frame import pack_floats, round_mantissa, significant_digits
from tests.core.views.unpacking import unpack_floats

singles = arrays(np.float32, array_shapes(max_dims=3, max_side=6), elements=st.floats(width=32))


@given(singles)
def test_single_precision_survives_bit_for_bit(values: np.ndarray) -> None:
    np.testing.assert_array_equal(unpack_floats(pack_floats(values)), values.ravel())


@given(arrays(np.float32, 8, elements=st.floats(width=32, allow_subnormal=False)), st.integers(7, 22))
def test_rounding_keeps_the_promised_digits_and_what_is_not_finite(values: np.ndarray, bits: int) -> None:
    rounded = round_mantissa(values, bits)
    finite = np.isfinite(values) & (np.abs(values) < 1e38)  # the very largest may round to infinity
    error = np.abs(rounded[finite].astype(np.float64) - values[finite])
    assert np.all(error <= np.abs(values[finite].astype(np.float64)) * 2.0 ** -(bits + 1))
    np.testing.assert_array_equal(rounded[~np.isfinite(values)], values[~np.isfinite(values)])
    assert 10.0 ** -significant_digits(bits) >= 2.0 ** -(bits + 1)


def test_numbers_beyond_single_precision_become_infinite_or_zero() -> None:
    assert unpack_floats(pack_floats(np.array([1e300, -1e300, 1e-300]))).tolist() == [np.inf, -np.inf, 0.0]


def test_equal_numbers_give_equal_text() -> None:
    assert pack_floats(np.arange(5.0)) == pack_floats(np.arange(5.0))
