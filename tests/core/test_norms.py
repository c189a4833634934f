"""Held against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrograd.core.norms import join_norms, norm

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [*TYPES, *NARROW], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (2, 3, 4)], ids=str)
def test_it_is_numpys(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    exact = values.to(torch.complex128 if dtype.is_complex else torch.float64)
    found = norm(values)
    assert found.shape == ()
    assert found.dtype is (torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32)
    np.testing.assert_allclose(float(found), np.linalg.norm(exact.numpy().ravel()), rtol=2e-6)


def test_squares_that_half_precision_cannot_hold() -> None:
    assert float(norm(torch.full((4,), 3e4, dtype=torch.float16))) == 6e4
    assert float(norm(torch.full((4,), 1e-5, dtype=torch.float16))) == pytest.approx(
        2 * float(torch.tensor(1e-5).half())
    )


def test_in_a_wider_type_where_asked() -> None:
    values = torch.full((3,), 1e-30)
    assert float(norm(values)) == 0.0  # 1e-60 is nothing in float32
    assert norm(values, at_least=torch.float64).dtype is torch.float64
    np.testing.assert_allclose(float(norm(values, at_least=torch.float64)), 3**0.5 * float(values[0]), rtol=1e-12)


def test_what_is_not_finite_shows() -> None:
    assert norm(torch.tensor([1.0, torch.nan])).isnan()
    assert norm(torch.tensor([1.0, -torch.inf])).isinf()


def test_it_can_be_differentiated() -> None:
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (values,))


def test_several_are_as_one() -> None:
    parts = [torch.randn(3, 2), torch.randn(4).double(), torch.randn(()).bfloat16()]
    whole = np.concatenate([part.double().numpy().ravel() for part in parts])
    np.testing.assert_allclose(
        float(join_norms([norm(part).double() for part in parts])), np.linalg.norm(whole), rtol=1e-6
    )
