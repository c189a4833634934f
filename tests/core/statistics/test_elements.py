"""Every kind of tensor is read element by element, as numpy reads it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.statistics.slab import NativeSlab, Slab, make_slab, sum_squares
from tests.core.statistics.oracle import assert_reads, assert_row, drain, elements, expected_bins

REAL = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGER = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SIZES = [1, 2, 3, 5, 63, 511, 512, 513, 1500, 8192, 20_001]


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("size", SIZES)
def test_floats(slab: Slab, dtype: torch.dtype, size: int) -> None:
    assert_reads(slab, torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype))


@pytest.mark.parametrize("dtype", INTEGER)
@pytest.mark.parametrize("size", [1, 700, 9000])
def test_integers(slab: Slab, dtype: torch.dtype, size: int) -> None:
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**40)), min(limits.max, 2**40)
    assert_reads(slab, torch.randint(low, high, (size,), dtype=torch.int64).to(dtype))


def test_booleans(slab: Slab) -> None:
    assert_reads(slab, torch.rand(1000) > 0.3)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8(slab: Slab, dtype: torch.dtype) -> None:
    assert_reads(slab, torch.randn(1000).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_number(slab: Slab, dtype: torch.dtype) -> None:
    assert_reads(slab, torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_two_elements(slab: Slab, dtype: torch.dtype) -> None:
    x = torch.randn(50, 7, dtype=dtype)
    assert_reads(slab, x)
    assert_reads(slab, x.conj().t())


def test_lazily_negated(slab: Slab) -> None:
    x = torch.randn(50, 7, dtype=torch.complex64).conj()
    assert x.imag.is_neg()
    assert_reads(slab, x.imag)
    assert_reads(slab, x[0, 0].imag)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr"])
def test_sparse_tensors_give_their_explicit_values(slab: Slab, layout: str) -> None:
    dense = torch.randn(6, 8) * (torch.rand(6, 8) > 0.5)
    blocks = (2, 2) if layout == "sparse_bsr" else None
    assert_reads(slab, dense.to_sparse(layout=getattr(torch, layout), blocksize=blocks))


def test_duplicates_of_a_sparse_tensor_are_added(slab: Slab) -> None:
    assert_reads(slab, torch.sparse_coo_tensor([[0, 0, 3]], [1.0, 2.0, 5.0], (5,), check_invariants=True))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)])
def test_small_shapes(slab: Slab, shape: tuple[int, ...]) -> None:
    assert_reads(slab, torch.full(shape, -2.5))


def test_subclass_that_computes_like_a_tensor(slab: Slab) -> None:
    class Image(torch.Tensor):
        pass

    assert_reads(slab, torch.randn(9).as_subclass(Image))
    assert_reads(slab, torch.nn.Parameter(torch.randn(9)))


STRIDED = {
    "transposed": lambda x: x.t(),
    "every other column": lambda x: x[:, ::2],
    "every other row": lambda x: x[::2],
    "column": lambda x: x[:, 3],
    "unfolded, so that elements overlap": lambda x: x.flatten().unfold(0, 7, 3),
    "expanded scalar": lambda x: x[0, 0].expand(30, 40),
    "expanded row": lambda x: x[:1].expand(17, -1),
    "expanded in the middle": lambda x: x[:, None, ::3].expand(-1, 5, -1).transpose(0, 1),
    "channels last": lambda x: x.view(2, 3, -1, 5).to(memory_format=torch.channels_last),
    "slice of channels last": lambda x: x.view(2, 3, -1, 5).to(memory_format=torch.channels_last)[:, 1:],
    "many dimensions": lambda x: x.view(2, 3, 2, 5, 2, 5, 2, 1).permute(7, 3, 1, 5, 0, 2, 4, 6)[:, ::2, :, 1::2],
    "one of size one with an odd stride": lambda x: x[:, 1:2],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
def test_strides(slab: Slab, name: str, dtype: torch.dtype) -> None:
    x = torch.randn(60, 20, generator=torch.Generator().manual_seed(1)) * 10
    assert_reads(slab, STRIDED[name](x.to(dtype)))


SPECIAL = {
    "not a number": [float("nan"), 1.0, -3.0],
    "infinities": [float("inf"), -float("inf"), 2.0, 2.0],
    "nothing finite": [float("inf"), float("nan")],
    "signed zeros": [0.0, -0.0, 0.0],
    "subnormal numbers": [1e-40, -1e-45, 0.0, 1.0],
    "only subnormal numbers": [1e-40, 3e-39],
    "tiny": [1e-30, -3e-30, 2e-30],
    "huge": [1e30, -3e30, 2.5e38],
    "tiny and huge": [1e-30, 1e30, 1.0, 0.0],
    "constant": [0.1, 0.1, 0.1],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("repeats", [1, 400, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_special_values(slab: Slab, name: str, repeats: int, dtype: torch.dtype) -> None:
    assert_reads(slab, torch.tensor(SPECIAL[name]).to(dtype).repeat(repeats))


def test_special_values_far_apart(slab: Slab) -> None:
    x = torch.randn(50_000)
    x[[3, 700, 20_000, 49_999]] = torch.tensor([float("nan"), 1e30, -float("inf"), 0.0])
    assert_reads(slab, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [1e4, -1e6, 1e10, 1e-12])
def test_mean_far_above_the_deviation(slab: Slab, mean: float, dtype: torch.dtype) -> None:
    x = mean * (1 + torch.randn(30_000, dtype=torch.float64) * 1e-4)
    assert_reads(slab, x.to(dtype))


def test_means_that_differ_from_block_to_block(slab: Slab) -> None:
    x = torch.randn(40, 600) + torch.logspace(-6, 6, 40)[:, None]
    assert_reads(slab, x)


@pytest.mark.parametrize("spread", [3, 30, 100])
def test_exponents_far_apart(slab: Slab, spread: int) -> None:
    x = torch.randn(60_000, dtype=torch.float64) * torch.exp2((torch.rand(60_000, dtype=torch.float64) - 0.5) * spread)
    assert_reads(slab, x.float())


def test_range_beyond_float32(slab: Slab) -> None:
    assert_reads(slab, torch.tensor([1e-60, -1e60, 3.0], dtype=torch.float64))


def test_without_histogram(plain_slab: Slab) -> None:
    plain_slab.grow(1)
    x = torch.randn(3000)
    plain_slab.observe(x, 0)
    rows, bins = drain(plain_slab)
    assert_row(rows[0], elements(x))
    assert rows[0]["bins"] == 0
    assert not bins.any()


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.lists(st.floats(width=32), max_size=40), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_row_is_that_of_all_its_tensors_together(parts: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [torch.tensor(part, dtype=dtype) for part in parts]
    x = np.concatenate([elements(tensor) for tensor in tensors])
    for slab in (make_slab("cpu"), make_slab("cpu", histogram=False)):
        slab.grow(1)
        for tensor in tensors:
            slab.observe(tensor, 0)
        rows, bins = drain(slab)
        assert_row(rows[0], x, calls=len(parts))
        if rows[0]["bins"]:
            np.testing.assert_array_equal(bins[0], expected_bins(x))


@pytest.mark.skipif(NativeSlab is None, reason="needs the compiled kernel")
def test_squares_are_summed_as_numpy_sums_them() -> None:
    generator = torch.Generator().manual_seed(4)
    drawn = [torch.randn(size, generator=generator).to(dtype) for dtype in REAL for size in SIZES]
    strided = [drawn[7].view(1, -1).expand(3, -1), drawn[8].view(3, -1).t(), drawn[9][::3]]
    for tensors in [*([each] for each in drawn), [*drawn, *strided, torch.zeros(0), torch.ones(())], []]:
        expected = sum(np.square(each.double().numpy()).sum() for each in tensors)
        assert sum_squares(tensors) == pytest.approx(expected, rel=1e-12)
    assert sum_squares([torch.full((3,), 1e30)]) == pytest.approx(3e60)
    assert np.isnan(sum_squares([torch.tensor([1.0, float("nan")])]) or 0.0)
    assert sum_squares([torch.tensor([1.0, float("-inf")])]) == float("inf")


@pytest.mark.skipif(NativeSlab is None, reason="needs the compiled kernel")
@pytest.mark.parametrize(
    "odd",
    [torch.arange(3), torch.ones(3).to_sparse(), torch.ones(3, device="meta"), torch.ones(3, dtype=torch.complex64)],
)
def test_squares_of_what_the_kernel_does_not_read_are_not_known(odd: torch.Tensor) -> None:
    assert sum_squares([torch.ones(2), odd]) is None
