"""Numbers over steps, and what they share with a series: entries by place, or by the number of a step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.drawings import ask_view, drawn_by
from retrograd.core.errors import CallError, NoSuchStepError
from retrograd.core.guesses import Guided
from retrograd.core.libraries import load_library

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")


class OverSteps(Guided, Generic[T]):
    """What has an entry for each of some rising steps: ``x[-1]`` by place, ``x.at(10)`` by the number of the step."""

    if TYPE_CHECKING:

        @property
        def steps(self) -> npt.NDArray[np.int64]: ...

        def only(self, steps: Iterable[int]) -> Self:
            """The same at some steps."""

        def _read(self, step: int) -> T: ...

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, index: slice) -> Self: ...
    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: Sequence[Any]) -> Self: ...
    def __getitem__(self, index: Any) -> T | Self:
        """The entry at a place, the last one at -1; or those of a slice, of places or of a mask.

        Raises:
            NoSuchStepError: there is no such place (an IndexError).
        """
        if isinstance(index, str):
            raise CallError(f"[] takes a place or a slice, not {index!r}.", repair=f".{index}, one number a step.")
        if not isinstance(index, slice) and np.ndim(index) == 0:
            try:
                return self._read(int(self.steps[operator.index(index)]))
            except IndexError:
                raise self._miss(f"There is no entry {index}: there are {len(self)}.") from None
        return self.only(self.steps[index])

    def at(self, step: int) -> T:
        """The entry of the step with this number; with ``[]`` it is found by its place.

        Raises:
            NoSuchStepError: nothing was recorded at this step.
        """
        if step not in self.steps:
            raise self._miss(f"Nothing was recorded at step {step}.")
        return self._read(int(step))

    @property
    def last(self) -> T:
        """The entry of the last step.

        Raises:
            NoSuchStepError: there is none.
        """
        return self[-1]

    def _miss(self, problem: str) -> NoSuchStepError:
        repair = "record some steps first."
        if len(steps := self.steps):
            repair = f"steps {steps[0]} to {steps[-1]} have one, the last at [-1]; .at(step) finds one by its step."
        return NoSuchStepError(problem, repair=repair)


@dataclass(frozen=True, eq=False, repr=False)
class Curve(np.lib.mixins.NDArrayOperatorsMixin, OverSteps[float]):
    """One number a step. For numpy, and in arithmetic, it is its values.

        history.loss[-1], history.loss.at(10)          the last one; that of step 10
        history.loss > 2 * history.loss.values.min()   an array of bool
        steps, values = history.loss

    Attributes:
        steps: int64, shape ``[n]``, rising.
        values: float64, shape ``[n]``.
    """

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.steps, self.values))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.values, dtype) if copy else np.asarray(self.values, dtype)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply a function of numpy to the values.

        Raises:
            CallError: to those of two curves with other steps.
        """
        if any(isinstance(each, Curve) and not np.array_equal(each.steps, self.steps) for each in inputs):
            raise CallError(
                "The curves are of different steps.", repair="align them: (a.to_pandas() - b.to_pandas()).dropna()."
            )
        values = (each.values if isinstance(each, Curve) else each for each in inputs)
        return getattr(function, method)(*values, **options)

    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_curve")

    def __repr__(self) -> str:
        if not len(self):
            return "Curve(no steps)"
        last = ", ".join(f"{value:.3g}" for value in self.values[-3:])
        return f"Curve({count_of(len(self), 'step')} {self.steps[0]}…{self.steps[-1]}: … {last})"

    def _read(self, step: int) -> float:
        return float(self.values[np.searchsorted(self.steps, step)])

    def only(self, steps: Iterable[int]) -> Curve:
        """These numbers at some steps."""
        mine = np.isin(self.steps, np.fromiter(steps, np.int64))
        return Curve(self.steps[mine], self.values[mine])

    def to_numpy(self) -> npt.NDArray[np.float64]:
        """The values."""
        return self.values

    def to_pandas(self) -> Any:
        """The values as a ``pandas.Series`` whose index is the step.

        Raises:
            LibraryError: pandas is not installed.
        """
        pandas = load_library("pandas", "pandas", "2.0")
        return pandas.Series(self.values, index=pandas.Index(self.steps, name="step"))

    def plot(self, *, ax: Axes | None = None, **line: Any) -> Axes:
        """Draw them as a line with matplotlib, on axes or a new figure; ``line`` goes to ``Axes.plot``.

        Raises:
            LibraryError: matplotlib is not installed.
        """
        axes: Axes = ask_view("retrograd.core.views.notebook.plots", "plot_curve")(self, ax, **line)
        return axes
