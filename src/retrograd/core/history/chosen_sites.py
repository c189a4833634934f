"""Several sites of a record, as one thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrograd.core.amounts import count_of, list_names
from retrograd.core.drawings import drawn_by
from retrograd.core.errors import NoSuchSiteError
from retrograd.core.guesses import Guided
from retrograd.core.history.matrix import Matrix
from retrograd.core.history.series import Series
from retrograd.core.statistics.row import STATISTICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class ChosenSites(Guided, Mapping[str, Series]):
    """The sites of a record that a pattern matches, each with its series.

        history["blocks.*:output.grad"].rms        a Matrix: sites × steps; any statistic, by its name
        list(history["blocks.*"])                  names, in call order
        history["blocks.*"].plot("l2")
        for name, series in history["*:weight.grad"].items(): ...

    Args:
        history: the :class:`~retrograd.core.history.history.History` that has them.
        sites: names in it.
    """

    def __init__(self, history: Any, sites: Sequence[str]) -> None:
        self._history = history
        self.sites = list(sites)

    def __getitem__(self, site: str) -> Series:
        if site not in self.sites:
            raise NoSuchSiteError(f"{site!r} is not among these sites.", repair="ask the whole: history[…].")
        series: Series = self._history[site]
        return series

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        return f"<{count_of(len(self), 'site')}: {list_names(self.sites)}>"

    def _repr_html_(self) -> str:
        return drawn_by("retrograd.core.views.notebook.records", "draw_sites")((self._history, self.sites))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *STATISTICS, *self._history.rows.custom})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Matrix: ...

    else:

        def __getattr__(self, name: str) -> Matrix:
            if name == "norm" or name in STATISTICS or (name[:1] != "_" and name in self._history.rows.custom):
                return self.matrix("l2" if name == "norm" else name)
            return super().__getattr__(name)

    def matrix(self, statistic: str = "rms", phase: str | None = "train") -> Matrix:
        """One statistic of these sites over all steps, as :meth:`History.matrix` gives it."""
        matrix: Matrix = self._history.matrix(statistic, self.sites, phase)
        return matrix

    def plot(self, statistic: str = "rms", *, ax: Axes | None = None, **mesh: Any) -> Axes:
        """Draw a statistic of these sites over steps as colours; see :meth:`Matrix.plot`."""
        return self.matrix(statistic).plot(ax=ax, **mesh)

    def to_pandas(self) -> Any:
        """The rows of these sites as a ``pandas.DataFrame``."""
        history = self._history.only(self.sites)
        rows = history.to_pandas()
        return rows[rows["site"].isin(history.name_calls(self.sites))].reset_index(drop=True)
