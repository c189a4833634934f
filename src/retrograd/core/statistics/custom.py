"""Statistics that users add: one function of a tensor each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrograd.core.errors import StatisticError
from retrograd.core.randomness import random_kept
from retrograd.core.statistics.row import ROW, STATISTICS

CustomValues = dict[str, tuple[Sequence[int], Sequence[float]]]
"""By the name of a statistic, rows and their values, of equal length."""

Merge = Literal["mean", "sum", "min", "max"]
Function = Callable[[Tensor], Tensor]

START: dict[Merge, float] = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": -float("inf")}
REPAIR = "return one real number, as a 0-d tensor on the device of the tensor given: `return tensor.abs().median()`."


@dataclass(frozen=True, slots=True)
class Statistic:
    """A user's statistic.

    Attributes:
        function: from a tensor of any shape to one number, a 0-d tensor. It runs without grad mode.
        name: what its values are called.
        merge: how the values of several tensors at one site and micro-batch become one.
    """

    function: Function
    name: str
    merge: Merge = "mean"

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.function(tensor)


@overload
def statistic(function: Function, /) -> Statistic: ...
@overload
def statistic(*, merge: Merge = "mean", name: str = "") -> Callable[[Function], Statistic]: ...
def statistic(
    function: Function | None = None, /, *, merge: Merge = "mean", name: str = ""
) -> Statistic | Callable[[Function], Statistic]:
    """Decorator that makes a function of one tensor a statistic; a plain function given to ``record`` is one too.

    Args:
        function: from a tensor to one number, as a 0-d tensor.
        merge: how values of several tensors become one: their ``mean``, ``sum``, ``min`` or ``max``.
        name: what to call it; the function's own name when left out.

    Raises:
        StatisticError: for a merge or a name that cannot be used.

    Example::

        @rg.statistic(merge="max")
        def largest_row(tensor):
            return tensor.flatten(1).norm(dim=1).max()
    """
    if merge not in get_args(Merge):
        raise StatisticError(
            f"merge={merge!r} is not a way to merge values.", repair=f"take one of {', '.join(get_args(Merge))}."
        )

    def make(function: Function) -> Statistic:
        return Statistic(function, _check_name(name or getattr(function, "__name__", "")), merge)

    return make if function is None else make(function)


def check_statistic(function: Any) -> Statistic:
    """Try a statistic on a small random tensor.

    Raises:
        StatisticError: when it fails, does not return one real number, or changes the tensor.
    """
    if isinstance(function, Statistic):
        each = function
    elif callable(function):
        each = statistic(function)
    else:
        raise StatisticError(f"{function!r} is not a function.", repair="give functions of one tensor.")
    tensor = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    before = tensor.clone()
    try:
        with torch.no_grad(), random_kept():
            value = each(tensor)
    except Exception as error:
        raise StatisticError(f"{each.name} fails on a float tensor of shape (4, 8): {error}", repair=REPAIR) from error
    if not _is_number(value):
        raise StatisticError(f"{each.name} returns {_describe(value)}, not one number.", repair=REPAIR)
    if not torch.equal(tensor, before):
        raise StatisticError(
            f"{each.name} changes the tensor that it is given.",
            repair="work on a copy, with operations whose names do not end in an underscore.",
            reason="training goes on with this very tensor.",
        )
    return each


def _check_name(name: str) -> str:
    if not name.isidentifier():
        raise StatisticError(
            f"A statistic cannot be called {name!r}.", repair='use `def`, or `rg.statistic(name="…")`.'
        )
    if name in STATISTICS or name in (ROW.names or ()):
        raise StatisticError(f"{name!r} is a statistic that is always recorded.", repair="give yours another name.")
    return name


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


class CustomStatistics:
    """The values of users' statistics, one a row, merged on the device where they arise.

    Nothing waits for a device, and nothing keeps a tensor that was observed.

    Raises:
        StatisticError: when two have one name.
    """

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        names = [each.name for each in statistics]
        if len(set(names)) < len(names):
            raise StatisticError(f"Two statistics have one name: {', '.join(names)}.", repair="rename one of them.")
        self.statistics = tuple(statistics)
        self._values: dict[torch.device, Tensor] = {}
        self._calls: dict[torch.device, npt.NDArray[np.int64]] = {}

    def observe(self, tensor: Tensor, row: int, /) -> None:
        """Compute every statistic of a tensor and merge it into a row.

        Raises:
            Exception: what the first of them raised that failed; the others have been merged all the same.
        """
        device = tensor.device
        if device not in self._values or row >= self._values[device].size(1):
            self._grow(device, row + 1)
        values, calls = self._values[device], self._calls[device]
        failure: Exception | None = None
        with torch.no_grad():
            tensor = tensor.detach()
            for index, each in enumerate(self.statistics):
                try:
                    value = torch.as_tensor(each(tensor), device=device).to(values.dtype).reshape(())
                except Exception as error:
                    failure = failure or error
                else:
                    _merge(values[index, row], value, each.merge)
                    calls[index, row] += 1
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame, and the frame would hold it, with the tensor

    def take(self) -> tuple[list[Tensor], Callable[[Sequence[npt.NDArray[np.float64]]], CustomValues]]:
        """Empty all rows, without waiting for a device.

        Returns:
            What is on devices, float64 or float32 [statistics, rows] each, and what makes values of it once it is on
            the host: by the name of the statistic the rows that were observed and their values. A row that was
            observed on two devices appears twice.
        """
        tables = [table.clone() for table in self._values.values()]
        calls = [each.copy() for each in self._calls.values()]
        self.forget()
        return tables, partial(self._merge_tables, calls)

    def _merge_tables(
        self, counted: list[npt.NDArray[np.int64]], tables: Sequence[npt.NDArray[np.float64]]
    ) -> CustomValues:
        found: dict[str, tuple[list[int], list[float]]] = {each.name: ([], []) for each in self.statistics}
        for table, of_device in zip(tables, counted, strict=True):
            for each, column, calls in zip(self.statistics, table.astype(np.float64), of_device, strict=True):
                rows = np.flatnonzero(calls)
                merged = column[rows] / calls[rows] if each.merge == "mean" else column[rows]
                found[each.name][0].extend(rows.tolist())
                found[each.name][1].extend(merged.tolist())
        return {name: (rows, values) for name, (rows, values) in found.items() if rows}

    def forget(self) -> None:
        """Empty all rows."""
        for device, values in self._values.items():
            values.copy_(self._empty(device).expand_as(values))
            self._calls[device][:] = 0

    def _grow(self, device: torch.device, rows: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            empty = self._empty(device)
            values = self._values.get(device, empty[:, :0])
            old = values.size(1)
            new = max(rows, 2 * old, 16)
            self._values[device] = torch.cat([values, empty.expand(-1, new - old)], dim=1)
            count = len(self.statistics)
            calls = self._calls.get(device, np.zeros((count, 0), np.int64))
            self._calls[device] = np.concatenate([calls, np.zeros((count, new - old), np.int64)], axis=1)

    def _empty(self, device: torch.device) -> Tensor:
        real = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor([[START[each.merge]] for each in self.statistics], dtype=real, device=device)


def _merge(cell: Tensor, value: Tensor, merge: Merge) -> None:
    if merge == "min":
        torch.minimum(cell, value, out=cell)
    elif merge == "max":
        torch.maximum(cell, value, out=cell)
    else:
        cell.add_(value)
