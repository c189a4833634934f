from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from retrograd.core.errors import RuleError
from retrograd.rewriting.rules import PCGrad
from tests.rewriting.rules import references

SHAPES = [(3, 2), (4,), ()]


def draw(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def join(gradients: list[Tensor | None]) -> np.ndarray:
    return np.concatenate(
        [
            np.zeros(shape).ravel() if each is None else each.numpy().ravel()
            for each, shape in zip(gradients, SHAPES, strict=True)
        ]
    )


def combine(rule: PCGrad, passes: list[list[Tensor | None]]) -> list[Tensor | None]:
    return rule.combine(passes, rule.state_at("site"))


@pytest.mark.parametrize("seed", range(20))
def test_two_losses_are_projected_as_published(seed: int) -> None:
    passes = [draw(seed), draw(seed + 100)]
    expected = references.pcgrad([join(one) for one in passes], [[1], [0]])
    np.testing.assert_allclose(join(combine(PCGrad(), passes)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_many_losses_are_projected_in_some_order_of_the_paper(n: int, seed: int) -> None:
    passes = [draw(seed + 100 * number) for number in range(n)]
    vectors = [join(one) for one in passes]
    ours = join(combine(PCGrad(seed=seed), passes))
    orders = [itertools.permutations([j for j in range(n) if j != i]) for i in range(n)]
    assert any(np.allclose(ours, references.pcgrad(vectors, order)) for order in itertools.product(*orders))


def test_the_order_is_drawn_anew_and_comes_again() -> None:
    passes = [draw(100 * number) for number in range(8)]
    one, other = PCGrad(), PCGrad()
    results = [join(combine(one, passes)) for _ in range(12)]
    assert all(np.array_equal(result, join(combine(other, passes))) for result in results)
    assert len({result.tobytes() for result in results}) > 1
    resumed = PCGrad()
    resumed.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(join(combine(resumed, passes)), join(combine(one, passes)))


def test_losses_that_agree_are_added_up() -> None:
    one = draw(0)
    other = [gradient * 2 for gradient in one]
    for ours, theirs in zip(combine(PCGrad(), [one, other]), one, strict=True):
        torch.testing.assert_close(ours, theirs * 3)


def test_losses_that_cancel_leave_nothing() -> None:
    one = draw(0)
    for ours in combine(PCGrad(), [one, [-2 * gradient for gradient in one]]):
        torch.testing.assert_close(ours, torch.zeros_like(ours))


def test_a_parameter_that_a_loss_does_not_reach_counts_as_zero() -> None:
    passes: list[list[Tensor | None]] = [draw(1), draw(2), draw(3)]
    passes[0][0] = passes[1][1] = None
    for one in passes:
        one[2] = None
    ours = combine(PCGrad(), passes)
    assert ours[2] is None
    orders = [itertools.permutations([j for j in range(3) if j != i]) for i in range(3)]
    vectors = [join(one) for one in passes]
    assert any(np.allclose(join(ours), references.pcgrad(vectors, order)) for order in itertools.product(*orders))


def test_each_tensor_may_be_projected_by_itself() -> None:
    passes = [draw(5), draw(6)]
    ours = combine(PCGrad(per_tensor=True), passes)
    for number, gradient in enumerate(ours):
        pair = [one[number].numpy().ravel() for one in passes]
        np.testing.assert_allclose(gradient.numpy().ravel(), references.pcgrad(pair, [[1], [0]]), atol=1e-12)


def test_one_loss_stays_as_it_is_and_none_is_nothing() -> None:
    gradients = draw(0)
    for ours, theirs in zip(combine(PCGrad(), [gradients]), gradients, strict=True):
        assert torch.equal(ours, theirs)
        assert ours is not theirs
    assert combine(PCGrad(), [[None], [None]]) == [None]


def test_a_loss_of_gradient_zero_divides_by_nothing() -> None:
    gradients = draw(0)
    for ours, theirs in zip(combine(PCGrad(), [gradients, [0 * each for each in gradients]]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_not_finite_shows_and_is_not_kept() -> None:
    rule, bad = PCGrad(), draw(1)
    bad[1] = bad[1] * math.nan
    spoilt = combine(rule, [draw(0), bad])
    assert torch.isnan(spoilt[1]).all()
    assert torch.isfinite(spoilt[0]).all()
    assert all(torch.isfinite(gradient).all() for gradient in combine(rule, [draw(0), draw(2)]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_types(dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for seed in range(6):
        passes = [draw(seed, dtype), draw(seed + 100, dtype)]
        exact = [torch.cat([each.to(wide).ravel() for each in one]) for one in passes]
        real = [torch.view_as_real(one).ravel() if dtype.is_complex else one for one in exact]
        expected = references.pcgrad([one.numpy() for one in real], [[1], [0]])
        ours = combine(PCGrad(), passes)
        assert {each.dtype for each in ours} == {dtype}
        joined = torch.cat([each.to(wide).ravel() for each in ours])
        joined = torch.view_as_real(joined).ravel() if dtype.is_complex else joined
        atol = {torch.float16: 1e-2, torch.bfloat16: 8e-2}.get(dtype, 1e-5)
        np.testing.assert_allclose(joined.numpy(), expected, atol=atol)


@pytest.mark.parametrize("scale", [2.0**12, 2.0**-12])
def test_products_that_half_precision_cannot_hold(scale: float) -> None:
    passes = [[scale * each.half() for each in draw(seed)] for seed in (0, 100)]
    ours = combine(PCGrad(), passes)
    wide = combine(PCGrad(), [[each.double() for each in one] for one in passes])
    for one, other in zip(ours, wide, strict=True):
        np.testing.assert_allclose(one.double() / scale, other / scale, atol=1e-2)


def test_the_gradients_that_were_given_are_not_written_into() -> None:
    passes = [draw(0), draw(1)]
    versions = [each._version for one in passes for each in one]
    combine(PCGrad(), passes)
    assert [each._version for one in passes for each in one] == versions


def test_one_gradient_alone_and_sparse_gradients_are_refused() -> None:
    rule = PCGrad()
    with pytest.raises(RuleError, match="combines several backward passes"):
        rule(torch.ones(3), rule.state_at("site"))
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (6,), check_invariants=True)
    with pytest.raises(RuleError, match="works on dense tensors"):
        combine(rule, [[sparse], [sparse]])
