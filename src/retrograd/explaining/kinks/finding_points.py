"""Functions for a table, which find the elements at a point from what an operation is called with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Arguments = Mapping[str, Any]
"""Arguments of an operation, by the names of its schema, defaults included."""

Finder = Callable[[Arguments], Tensor]
"""Returns for each element (for pooling: for each window) whether it lies at the point.

Raises:
    KeyError: an argument is not known.
"""


def equal(to: float, of: str = "self") -> Finder:
    """Where an argument has a value."""
    return lambda given: given[of] == to


def equal_to(name: str) -> Finder:
    """Where the first argument has the value of another one, if there is that."""
    return lambda given: _self(given).eq(torch.nan if given[name] is None else given[name])


def equal_in_size(to: float | str) -> Finder:
    """Where the first argument has a value, or minus it."""
    return lambda given: given["self"].abs() == (given[to] if isinstance(to, str) else to)


def below(bound: float) -> Finder:
    """Where the first argument is smaller."""
    return lambda given: given["self"] < bound


def beyond(bound: float) -> Finder:
    """Where the first argument, which is real, is of larger size."""
    return lambda given: (given["self"] > bound) | (given["self"] < -bound)


def only_if(condition: Callable[[Arguments], Any], find: Finder) -> Finder:
    """Find points only where a condition on plain arguments holds."""

    def find_so(given: Arguments) -> Tensor:
        found = find(given)
        return found if condition(given) else torch.zeros_like(found, dtype=torch.bool)

    return find_so


def both_equal(to: float) -> Finder:
    """Where two arguments have a value."""
    return lambda given: (given["self"] == to) & (given["other"] == to)


def everything(of: str = "self") -> Finder:
    """All elements."""
    return lambda given: torch.ones_like(given[of], dtype=torch.bool)


def whole(given: Arguments) -> Tensor:
    """Elements that have no fractional part."""
    return _self(given).frac() == 0


def same(given: Arguments) -> Tensor:
    """Where two arguments are equal."""
    return _self(given).eq(given["other"])


def multiple(given: Arguments) -> Tensor:
    """Where ``self`` is a multiple of ``other``."""
    return torch.fmod(given["self"], given["other"]) == 0


def tied_with_result(pick: Callable[[Arguments], Tensor]) -> Finder:
    """Elements that have the value that is picked along ``dim``, where there are several of them."""

    def find(given: Arguments) -> Tensor:
        at_it = given["self"] == pick(given)
        found: Tensor = at_it & (at_it.sum(_dims(given), keepdim=True) > 1)
        return found

    return find


def tied_with(extreme: Callable[..., Tensor]) -> Finder:
    """The same of the extreme along ``dim``: of ``torch.amax`` or ``torch.amin``."""
    return tied_with_result(lambda given: extreme(given["self"], _dims(given), keepdim=True))


def pick_median(given: Arguments) -> Tensor:
    """The median along ``dim``, or of all."""
    tensor, dim = _self(given), given.get("dim")
    return tensor.median() if dim is None else tensor.median(dim, keepdim=True).values


def pick_kth(given: Arguments) -> Tensor:
    """The k-th smallest along ``dim``."""
    values: Tensor = _self(given).kthvalue(given["k"], given["dim"], keepdim=True).values
    return values


def repeated(given: Arguments) -> Tensor:
    """Elements that are there several times along ``dim``."""
    tensor, dim = _self(given), given.get("dim", -1)
    if not tensor.dim():
        return torch.zeros_like(tensor, dtype=torch.bool)
    ordered, places = tensor.sort(dim)
    apart = ordered.diff(dim=dim) == 0
    edge = torch.zeros_like(ordered.narrow(dim, 0, 1), dtype=torch.bool)
    found = torch.cat([apart, edge], dim) | torch.cat([edge, apart], dim)
    return torch.zeros_like(found).scatter(dim, places, found)


def tied_at_top(given: Arguments) -> Tensor:
    """Elements among the ``k`` extreme ones along ``dim`` that are there several times."""
    tensor, dim = _self(given), given["dim"]
    last = tensor.topk(given["k"], dim, given["largest"]).values.select(dim, -1).unsqueeze(dim)
    return repeated(given) & (tensor >= last if given["largest"] else tensor <= last)


def norm_is_zero(given: Arguments) -> Tensor:
    """Elements of vectors that are zero."""
    tensor = _self(given)
    return (tensor == 0).all(_dims(given), keepdim=True).expand_as(tensor) if tensor.dim() else tensor == 0


def zero_beside_others(given: Arguments) -> Tensor:
    """Elements that are zero, of vectors that are not."""
    return (_self(given) == 0) & ~norm_is_zero(given)


def tied_in_size(given: Arguments) -> Tensor:
    """Elements of the largest size along ``dim``, where there are several of them, of vectors that are not zero."""
    sizes = {**given, "self": _self(given).abs()}
    return tied_with(torch.amax)(sizes) & ~norm_is_zero(given)


def no_spread(given: Arguments) -> Tensor:
    """Elements along ``dim`` that are all equal, of two and more."""
    tensor, dims = _self(given), _dims(given)
    found = torch.amax(tensor, dims, keepdim=True) == torch.amin(tensor, dims, keepdim=True)
    return (found & (_count(tensor, dims) > 1)).expand_as(tensor)


def too_few(given: Arguments) -> Tensor:
    """Elements along ``dim``, where there are no more of them than the correction takes away."""
    tensor, correction = _self(given), given.get("correction")
    missing = _count(tensor, _dims(given)) <= (1 if correction is None else correction)
    return torch.full_like(tensor, missing, dtype=torch.bool)


def all_minus_infinity(given: Arguments) -> Tensor:
    """Elements of rows along ``dim`` that are all −∞."""
    tensor = _self(given)
    return (tensor == -torch.inf).all(_dims(given), keepdim=True).expand_as(tensor)


def leads_with_minus_infinity(given: Arguments) -> Tensor:
    """Elements that are −∞ and have nothing else before them along ``dim``, not counting the first."""
    tensor, dim = _self(given), given["dim"]
    found = (tensor == -torch.inf).cummin(dim).values
    return found & (torch.ones_like(tensor, dtype=torch.int64).cumsum(dim) > 1)


def at_distance_zero(given: Arguments) -> Tensor:
    """Pairs of equal rows of ``x1`` and ``x2``."""
    found: Tensor = torch.cdist(given["x1"], given["x2"], p=torch.inf) == 0
    return found


def at_loss_edge(given: Arguments) -> Tensor:
    """Where the argument of a margin loss's hinge is zero, for the classes that are not the target."""
    scores, target = _self(given), given["target"]
    own = scores.gather(-1, target.unsqueeze(-1))
    hinge = given["margin"] - own + scores == 0
    found: Tensor = hinge & ~torch.zeros_like(hinge).scatter(-1, target.unsqueeze(-1), src=torch.ones_like(hinge))
    return found


def singular(of: str) -> Finder:
    """Matrices without an inverse, one element each."""
    return lambda given: torch.linalg.matrix_rank(given[of]) < given[of].shape[-1]


def equal_eigenvalues(given: Arguments) -> Tensor:
    """Eigenvalues of which the next one is equal."""
    found = torch.linalg.eigvalsh(given["A"], UPLO=given.get("UPLO", "L"))
    return _close_to_next(found)


def equal_singular_values(given: Arguments) -> Tensor:
    """Singular values of which the next one is equal."""
    return _close_to_next(torch.linalg.svdvals(given["A"]))


def tied_in_window(given: Arguments) -> Tensor:
    """Windows of a pooling that have their maximum several times."""
    tensor = _self(given)
    count = len(given["kernel_size"])
    dims = range(tensor.dim() - count, tensor.dim())
    kernel, stride, padding, dilation = (
        _spread(given.get(name) or default, count)
        for name, default in (("kernel_size", 1), ("stride", given["kernel_size"]), ("padding", 0), ("dilation", 1))
    )
    after = [edge + (step - 1 if given.get("ceil_mode") else 0) for edge, step in zip(padding, stride, strict=True)]
    pads = [each for edge, more in reversed(list(zip(padding, after, strict=True))) for each in (edge, more)]
    windows = functional.pad(tensor, pads, value=-torch.inf)
    for dim, size, step, apart in zip(dims, kernel, stride, dilation, strict=True):
        windows = windows.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]
    inside = windows.flatten(-count)
    top = inside.amax(-1)
    return ((inside == top.unsqueeze(-1)).sum(-1) > 1) & top.isfinite()


def tied_in_cell(given: Arguments) -> Tensor:
    """Find ties of an adaptive pooling whose cells are of one size.

    Raises:
        KeyError: they are not.
    """
    tensor, cells = _self(given), given["output_size"]
    sizes = tensor.shape[-len(cells) :]
    if any(size % count for size, count in zip(sizes, cells, strict=True)):
        raise KeyError("cells of several sizes")
    return tied_in_window({"self": tensor, "kernel_size": [s // c for s, c in zip(sizes, cells, strict=True)]})


def _self(given: Arguments) -> Tensor:
    tensor: Tensor = given["self"]
    return tensor


def _dims(given: Arguments) -> list[int]:
    dims = given.get("dim")
    if dims is None or dims == []:
        return list(range(_self(given).dim()))
    return [dims] if isinstance(dims, int) else list(dims)


def _count(tensor: Tensor, dims: Sequence[int]) -> int:
    return math.prod(tensor.shape[dim] for dim in dims)


def _close_to_next(values: Tensor) -> Tensor:
    scale = values.abs().amax(-1, keepdim=True) if values.shape[-1] else values
    return values.diff(dim=-1).abs() <= torch.finfo(values.dtype).eps * scale


def _spread(value: Any, count: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given
