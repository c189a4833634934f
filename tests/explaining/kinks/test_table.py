"""Every row of the table, held against torch: the gradient by autograd, the rule by values close by in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from retrograd.explaining.kinks.point import Convention, Point
from retrograd.explaining.kinks.table import POINTS

NEAR = 1e-6
DIRECTIONS = 64

pytestmark = pytest.mark.filterwarnings("ignore:(std|var).*degrees of freedom")

ROWS = [pytest.param(point, id=str(point)) for point in POINTS]


def function_of(point: Point) -> Callable[[Tensor], Tensor]:
    code = compile(point.example, point.operation, "eval")

    def value(x: Tensor) -> Tensor:
        try:
            found: Tensor = eval(code, {"x": x, "torch": torch, "F": functional})  # noqa: S307  # our own source
        except RuntimeError:  # outside of where it is defined
            return x.new_tensor(math.nan)
        return found.sum()

    return value


def place(point: Point) -> Tensor:
    return torch.tensor(point.at, dtype=torch.float64)


def gradient_at(point: Point, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(function_of(point)(x), x)
    return found


@pytest.mark.parametrize("point", ROWS)
def test_torch_gives_this_gradient(point: Point) -> None:
    wanted = torch.tensor(point.gradient, dtype=torch.float64)
    torch.testing.assert_close(gradient_at(point, place(point)), wanted, equal_nan=True, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("point", ROWS)
def test_the_rule_is_the_one_that_is_named(point: Point) -> None:
    HOLDS[point.convention](function_of(point), place(point), torch.tensor(point.gradient, dtype=torch.float64))


def steps(x: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    some = torch.randn(DIRECTIONS, len(x), generator=generator, dtype=torch.float64)
    return [*torch.eye(len(x), dtype=torch.float64), *-torch.eye(len(x), dtype=torch.float64), *some]


def rise(function: Callable[[Tensor], Tensor], x: Tensor, way: Tensor, step: float = NEAR) -> float:
    """The slope from ``x`` on, in one direction."""
    return float((function(x + step * way) - function(x)) / step)


def is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4)


def has_gradient(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    for way in steps(x):
        assert is_close(rise(function, x, way), float(gradient @ way))


def has_several_slopes(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    return any(not is_close(rise(function, x, way), -rise(function, x, -way)) for way in steps(x))


def bounds(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, sign: int) -> bool:
    """Whether the plane of this slope stays below the function (sign 1), or above (−1)."""
    return all(sign * rise(function, x, way) >= sign * float(gradient @ way) - 1e-4 for way in steps(x))


def is_least(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, sign: int) -> bool:
    """Of all slopes s of a convex function the least one g has s·g ≥ |g|²: its rise along −g is −|g|²."""
    return is_close(sign * rise(function, x, -sign * gradient), -float(gradient @ gradient))


def is_bent(function: Callable[[Tensor], Tensor], x: Tensor, sign: int) -> bool:
    return all(sign * (rise(function, x, way) + rise(function, x, -way)) >= -1e-4 for way in steps(x))


def is_least_of_convex(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    assert has_several_slopes(function, x)
    assert is_bent(function, x, 1)
    assert bounds(function, x, gradient, 1)
    assert is_least(function, x, gradient, 1)


def is_least_of_concave(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    assert has_several_slopes(function, x)
    assert is_bent(function, x, -1)
    assert bounds(function, x, gradient, -1)
    assert is_least(function, x, gradient, -1)


def is_of_one_side(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    sign = 1 if is_bent(function, x, 1) else -1
    assert has_several_slopes(function, x)
    assert is_bent(function, x, sign)
    assert bounds(function, x, gradient, sign)
    assert not is_least(function, x, gradient, sign)


def is_a_limit(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    """From some side the slope close by comes near the gradient, or grows beyond all bounds with its sign."""
    found = []
    for way in steps(x):
        near, nearer = (slope_at(function, x + distance * way, distance / 100) for distance in (1e-4, 1e-6))
        found.append(all(_goes_to(*each) for each in zip(near, nearer, gradient.tolist(), strict=True)))
    assert any(found)


def slope_at(function: Callable[[Tensor], Tensor], x: Tensor, step: float) -> list[float]:
    ways = torch.eye(len(x), dtype=torch.float64)
    return [float((function(x + step * way) - function(x - step * way)) / (2 * step)) for way in ways]


def _goes_to(near: float, nearer: float, limit: float) -> bool:
    if math.isinf(limit):
        sign = math.copysign(1, limit)
        return sign * nearer > 1.2 * sign * near > 0  # logarithms grow slowly
    return math.isclose(nearer, limit, rel_tol=1e-3, abs_tol=1e-3)


def is_not_defined(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    """There is no value, or one that jumps or falls off close by."""
    slopes = [rise(function, x, way) for way in steps(x)]
    assert not all(map(math.isfinite, slopes)) or max(map(abs, slopes)) > 1e4 or not gradient.isfinite().all()


def has_none(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    """It is drawn: not the same again from another state of the generator, and no slope of its own."""
    assert not gradient.any()
    drawn = set()
    for seed in range(64):
        torch.manual_seed(seed)
        drawn.add(float(function(x)))
    assert len(drawn) > 1


def is_another(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    """A derivative is there, or a slope that bounds it, or a limit, and the gradient is none of those."""
    with pytest.raises(AssertionError):
        has_gradient(function, x, gradient)
    with pytest.raises(AssertionError):
        is_a_limit(function, x, gradient)
    assert not any(is_bent(function, x, sign) and bounds(function, x, gradient, sign) for sign in (1, -1))


HOLDS = {
    Convention.GRADIENT: has_gradient,
    Convention.SUBGRADIENT: is_least_of_convex,
    Convention.SUPERGRADIENT: is_least_of_concave,
    Convention.ONE_SIDE: is_of_one_side,
    Convention.LIMIT: is_a_limit,
    Convention.ARBITRARY: is_not_defined,
    Convention.ZERO: has_none,
    Convention.NONE_OF_THEM: is_another,
}
