"""One statistic of many sites over all steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.drawings import ask_view, drawn_by
from retrograd.core.errors import StatisticError
from retrograd.core.history.cells import merge_picked
from retrograd.core.history.passes import choose_first
from retrograd.core.history.rows import Index, Part, Picked, Rows, count_up, encode_phase
from retrograd.core.history.steps import number_steps
from retrograd.core.statistics.row import STATISTICS, derive, list_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Matrix(NamedTuple):
    """Sites × steps.

    Attributes:
        sites: names of the rows.
        steps: int64, shape ``[m]``, rising.
        values: float64, shape ``[len(sites), m]``; NaN where nothing was recorded.
    """

    sites: list[str]
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __repr__(self) -> str:
        span = f", {self.steps[0]}…{self.steps[-1]}" if len(self.steps) else ""
        return f"Matrix({count_of(len(self.sites), 'site')} × {count_of(len(self.steps), 'step')}{span})"

    def _repr_html_(self) -> str:
        return drawn_by("retrograd.core.views.notebook.records", "draw_matrix")(self)

    def plot(self, *, ax: Axes | None = None, **mesh: Any) -> Axes:
        """Draw magnitudes as colours with matplotlib: zero is grey, what is not finite red.

        It is on axes or a new figure; ``mesh`` goes to ``Axes.pcolormesh``.

        Raises:
            LibraryError: matplotlib is not installed.
        """
        axes: Axes = ask_view("retrograd.core.views.notebook.plots", "plot_matrix")(self, ax, **mesh)
        return axes


def build_matrix(
    rows: Rows, codes: Sequence[Collection[int]], sites: list[str], statistic: str, phase: str | None
) -> Matrix:
    """Lay one statistic out over sites and steps, with micro-batches and ranks merged.

    Args:
        rows: all rows, or those of some steps.
        codes: for each line the codes that are merged in it.
        sites: names of the lines.
        statistic: name of the statistic.
        phase: kind of forward; None for all.
    """
    [matrix] = build_matrices(rows, codes, sites, [statistic], phase)
    return matrix


def build_matrices(
    rows: Rows, codes: Sequence[Collection[int]], sites: list[str], statistics: Sequence[str], phase: str | None
) -> Iterator[Matrix]:
    """As :func:`build_matrix`, of one statistic after the other."""
    members = np.array([code for several in codes for code in several], np.int64)
    index = _pick(rows, members, phase)
    lines = np.repeat(np.arange(len(codes)), [len(several) for several in codes])
    index, line = _spread(rows["site"][index], index, members, lines)
    steps, column = number_steps(rows["step"][index])
    cells = line * len(steps) + column
    size = len(codes) * len(steps)
    occupied = np.bincount(cells, minlength=size)
    filled = np.flatnonzero(occupied)
    is_merged = bool(len(occupied) and occupied.max() > 1)
    groups = (np.cumsum(occupied > 0) - 1)[cells] if is_merged else cells
    del line, column, occupied
    for statistic in statistics:
        picked: Part = Picked(rows, index)
        if is_merged:
            picked = merge_picked(Picked(rows, index), groups, len(filled), find_columns([statistic], rows.custom))
        values = np.full(size, np.nan)
        values[filled if is_merged else cells] = compute_statistic(picked, statistic, rows.custom)
        yield Matrix(sites, steps, values.reshape(len(codes), len(steps)))


def join_matrices(matrices: Sequence[Matrix]) -> Matrix:
    """The same lines over more and more steps as one matrix."""
    if len(matrices) == 1:
        return matrices[0]
    steps = np.concatenate([each.steps for each in matrices])
    return Matrix(matrices[0].sites, steps, np.concatenate([each.values for each in matrices], axis=1))


def compute_statistic(rows: Part, statistic: str, custom: Sequence[str]) -> npt.NDArray[np.float64]:
    """One statistic of each row.

    Raises:
        StatisticError: for an unknown statistic.
    """
    check_name(statistic, custom)
    if statistic in custom:
        return np.asarray(rows[statistic], np.float64)
    return np.asarray(derive(rows, statistic), np.float64)


def find_columns(statistics: Sequence[str], custom: Sequence[str]) -> frozenset[str]:
    """Columns of rows that some statistics are computed from, when these rows are merged before.

    Raises:
        StatisticError: for an unknown statistic.
    """
    for statistic in statistics:
        check_name(statistic, custom)
    of_each = (frozenset({each, "calls"}) if each in custom else list_columns(each) for each in statistics)
    return frozenset[str]().union(*of_each)


def check_name(statistic: str, custom: Sequence[str]) -> None:
    """Check that there is a statistic of this name, ours or one of the ``custom`` ones.

    Raises:
        StatisticError: there is none; all are named.
    """
    if statistic not in custom and statistic not in STATISTICS:
        known = ", ".join((*STATISTICS, *custom))
        raise StatisticError(f"There is no statistic {statistic!r} in this record.", repair=f"give one of {known}.")


def _pick(rows: Rows, members: npt.NDArray[np.int64], phase: str | None) -> Index:
    wanted = np.zeros(int(rows["site"].max(initial=-1)) + 1, np.bool_)
    wanted[members[members < len(wanted)]] = True
    mask = wanted[rows["site"]] & choose_first([rows])
    if phase is not None:
        mask &= rows["phase"] == encode_phase(phase)
    if rows.copies is not None:
        index = np.flatnonzero(mask)
        return index[rows.counts(index)]
    return slice(None) if mask.all() else np.flatnonzero(mask)


def _spread(
    site: npt.NDArray[Any], index: Index, members: npt.NDArray[np.int64], lines: npt.NDArray[np.int64]
) -> tuple[Index, npt.NDArray[np.int64]]:
    """Repeat each row for every line that it belongs to, and name the line of each."""
    size = int(max(site.max(initial=-1), members.max(initial=-1))) + 1
    counts = np.bincount(members, minlength=size)
    order = np.argsort(members, kind="stable")
    starts = np.cumsum(counts) - counts
    if counts.max(initial=0) <= 1:
        return index, lines[order][starts[site]]
    often = counts[site]
    rows = np.arange(len(site)) if isinstance(index, slice) else index
    return np.repeat(rows, often), lines[order][count_up(starts[site], often)]
