"""What a slab should say, computed by numpy in float64 from the elements one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from retrograd.core.statistics.row import BINS, ROW
from retrograd.core.statistics.slab import Slab

Array = npt.NDArray[np.float64]


def elements(tensor: torch.Tensor) -> Array:
    """All elements as float64; those of a complex tensor are twice as many, of a sparse one its explicit values."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        return np.concatenate([elements(tensor.real), elements(tensor.imag)])
    return np.asarray(tensor.to(torch.float64).flatten().tolist(), dtype=np.float64)


def expected_row(x: Array, calls: int = 1) -> dict[str, float]:
    """The columns of a row that has seen these elements."""
    finite = x[np.isfinite(x)]
    some = finite.size > 0
    mean = finite.mean() if some else 0.0
    return {
        "calls": calls,
        "count": x.size,
        "nan": np.isnan(x).sum(),
        "pos_inf": (x == np.inf).sum(),
        "neg_inf": (x == -np.inf).sum(),
        "zeros": (x == 0).sum(),
        "sum": finite.sum(),
        "m2": ((finite - mean) ** 2).sum(),
        "abs_sum": np.abs(finite).sum(),
        "min": finite.min() if some else np.inf,
        "max": finite.max() if some else -np.inf,
    }


def expected_bins(x: Array) -> npt.NDArray[np.int64]:
    """The whole histogram of exponents."""
    nonzero = x[np.isfinite(x) & (x != 0)]
    _, exponent = np.frexp(nonzero)  # |x| = m 2^e with ½ ≤ m < 1
    return np.bincount(np.clip(exponent - 1 + 127, 0, BINS - 1), minlength=BINS).astype(np.int64)


def drain(slab: Slab) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The rows of a slab, and their histograms spread out to shape [rows, 255]."""
    row_bytes, bin_bytes = slab.drain()
    rows, stretches = np.frombuffer(row_bytes, ROW), np.frombuffer(bin_bytes, np.int64)
    spread = np.zeros((len(rows), BINS), np.int64)
    at = 0
    for row, line in zip(rows, spread, strict=True):
        stretch = stretches[at : at + row["bins"]]
        if row["bins"]:
            assert stretch[0] > 0
            assert stretch[-1] > 0
        line[row["first_bin"] : row["first_bin"] + row["bins"]] = stretch
        at += row["bins"]
    assert at == len(stretches)
    return rows, spread


def assert_row(row: np.void, x: Array, calls: int = 1, rtol: float = 1e-6) -> None:
    """Counts and extremes are exact; a sum is right to ``rtol`` of the sum of magnitudes, m2 of itself.

    Deviations are also allowed what the elements' own rounding to float32 would cost.
    """
    expected = expected_row(x, calls)
    for name in ("calls", "count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max"):
        assert row[name] == expected[name], (name, row[name], expected[name])
    np.testing.assert_allclose(row["abs_sum"], expected["abs_sum"], rtol=rtol)
    np.testing.assert_allclose(row["sum"], expected["sum"], rtol=rtol, atol=rtol * expected["abs_sum"])
    np.testing.assert_allclose(row["m2"], expected["m2"], rtol=rtol)


def assert_reads(slab: Slab, tensor: torch.Tensor, rtol: float = 1e-6) -> None:
    """A slab reads one tensor as numpy does."""
    slab.grow(1)
    assert slab.observe(tensor, 0) == tensor.requires_grad
    rows, bins = drain(slab)
    assert_row(rows[0], elements(tensor), rtol=rtol)
    np.testing.assert_array_equal(bins[0], expected_bins(elements(tensor)))
