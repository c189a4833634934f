"""One site over time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of
from retrograd.core.drawings import ask_view, drawn_by
from retrograd.core.errors import CallError, NoSuchSiteError, NothingKeptError
from retrograd.core.guesses import names_arguments
from retrograd.core.history.cells import merge_picked
from retrograd.core.history.curve import OverSteps
from retrograd.core.history.data_facts import SignedHistogram
from retrograd.core.history.histograms import add_exponents
from retrograd.core.history.kept import Kept, KeptTensors
from retrograd.core.history.matrix import build_matrix, compute_statistic, find_columns
from retrograd.core.history.names import SiteNames
from retrograd.core.history.passes import choose_first
from retrograd.core.history.rows import OF_HISTOGRAMS, Part, Picked, Rows, encode_phase, join_rows
from retrograd.core.history.sink import PHASES
from retrograd.core.history.steps import number_steps
from retrograd.core.history.windows import LongRows
from retrograd.core.libraries import load_library
from retrograd.core.sites.site import name_like, parse_leniently
from retrograd.core.statistics.row import STATISTICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = npt.NDArray[np.float64]
_SAME_CALL = ("step", "micro", "phase", "rank")


@dataclass(frozen=True, slots=True)
class Choice:
    """The rows of a site that are selected; None selects all.

    ``backward`` applies to gradients alone: values belong to no pass and are always selected. ``"first"`` is the first
    pass of the micro-batch that reached the site. ``call`` is the number of the module's call.
    """

    phase: str | None = "train"
    backward: int | Literal["first"] | None = "first"
    micro: int | None = None
    rank: int | None = None
    call: int | None = None

    def pick(self, rows: Rows, index: npt.NDArray[np.int64], calls: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions within ``index`` of the selected rows, by rising step; ``calls`` has the call of each row."""
        mask = np.ones(len(index), np.bool_) if self.call is None else calls == self.call
        if self.phase is not None:
            mask &= rows["phase"][index] == encode_phase(self.phase)
        if self.backward == "first":
            mask &= choose_first([Picked(rows, index)])
        elif self.backward is not None:
            mask &= np.isin(rows["backward"][index], (-1, self.backward))
        for name in ("micro", "rank"):
            wanted = getattr(self, name)
            if wanted is not None:
                mask &= rows[name][index] == wanted
        chosen = np.flatnonzero(mask)
        return chosen[np.argsort(rows["step"][index[chosen]], kind="stable")]


class SelectOptions(TypedDict, total=False):
    """Arguments of :meth:`Series.select`."""

    phase: str | None
    backward: int | Literal["first"] | None
    micro: int | None
    rank: int | None
    call: int | None


class StatisticAttribute:
    """A statistic as an attribute of a series: float64, one number a step."""

    def __init__(self, text: str, of: str = "") -> None:
        self.__doc__ = text
        self._name = of

    def __set_name__(self, owner: type[Series], name: str) -> None:
        self._name = self._name or name

    @overload
    def __get__(self, series: None, owner: type[Series]) -> StatisticAttribute: ...
    @overload
    def __get__(self, series: Series, owner: type[Series]) -> FloatArray: ...
    def __get__(self, series: Series | None, owner: type[Series]) -> FloatArray | StatisticAttribute:
        return self if series is None else series.statistic(self._name)


class StepStatistics(SimpleNamespace):
    """All statistics of one site at one step, as attributes beside ``step``."""

    def __repr__(self) -> str:
        lost = f", {self.nonfinite:.0f} not finite" if self.nonfinite else ""
        shown = ", ".join(f"{name} {getattr(self, name):.3g}" for name in ("rms", "mean", "std", "abs_max", "l2"))
        return f"<step {self.step}: {shown}, {self.count:.0f} elements{lost}>"


class Series(OverSteps[StepStatistics]):
    """One site's statistics over steps, as of the moment when it was asked for.

        series[-1].rms, series.at(10).rms              all statistics of one step: the last one, that of step 10
        series[-100:]                                  a stretch of it

    By default it covers the phase ``train`` and the first backward pass that reached the site, with micro-batches,
    ranks, and calls of the module merged into one number a step; copies of one tensor on several ranks count once.
    :meth:`select` chooses other rows. The name of one call, ``fc#2:output``, gives that call alone.

    Args:
        rows: all rows.
        site: its name, as it was asked for.
        codes: those of its calls in the rows, each with the number of the call.
        relatives: finds its tensors, and its value and inputs if it is a gradient.
    """

    count = StatisticAttribute("Elements.")
    nan = StatisticAttribute("Elements that are NaN.")
    pos_inf = StatisticAttribute("Elements that are +∞.")
    neg_inf = StatisticAttribute("Elements that are −∞.")
    nonfinite = StatisticAttribute("Elements that are NaN or infinite.")
    zeros = StatisticAttribute("Elements that are zero.")
    zero_share = StatisticAttribute("Share of elements that are zero.")
    mean = StatisticAttribute("Mean of the finite elements.")
    std = StatisticAttribute("Standard deviation of the finite elements, divided by n.")
    rms = StatisticAttribute("Root of the mean square of the finite elements.")
    l1 = StatisticAttribute("Σ |x| over the finite elements.")
    l2 = StatisticAttribute("√Σ x² over the finite elements.")
    norm = StatisticAttribute("The same as ``l2``.", of="l2")
    min = StatisticAttribute("Smallest finite element.")
    max = StatisticAttribute("Largest finite element.")
    abs_max = StatisticAttribute("Largest magnitude of a finite element.")
    update_ratio = StatisticAttribute("‖Δw‖₂ / ‖w‖₂ of a parameter's update; NaN for anything else.")

    def __init__(self, rows: Rows, site: str, codes: Mapping[int, int], relatives: Relatives) -> None:
        self.site = site
        self._all_rows = rows
        self._codes = codes
        self._relatives = relatives
        self._choice = Choice()
        self._is_whole = not isinstance(rows, LongRows)
        self._leader: Series | None = None
        self._asked, self._is_held = "", False
        self._at_steps: npt.NDArray[np.int64] | None = None

    def _read(self, step: int) -> StepStatistics:
        """All statistics of one step, as attributes beside ``step``."""
        at = self.only((step,))
        return StepStatistics(step=step, **{name: float(at.statistic(name)[0]) for name in at.statistics})

    @property
    def statistics(self) -> list[str]:
        """Names of all statistics, those of the user's own last."""
        return [*STATISTICS, *self._all_rows.custom]

    def only(self, steps: Iterable[int]) -> Series:
        """This series at some steps."""
        rows, index, calls = self._whole._located if self._is_whole else self._located
        mine = np.isin(rows["step"][index], np.fromiter(steps, np.int64))
        some = self._with(self._choice)
        some._is_whole, some._at_steps = True, rows["step"][index[mine]]
        some._located = rows, index[mine], calls[mine]
        return some

    def to_numpy(self, statistic: str = "rms") -> FloatArray:
        """A statistic as an array, one number a step: float64, shape ``[n]``.

        Raises:
            StatisticError: for an unknown statistic.
        """
        return self.statistic(statistic)

    def to_pandas(self) -> Any:
        """All statistics as a ``pandas.DataFrame``: a line a step, a column a statistic.

        Raises:
            LibraryError: pandas is not installed.
        """
        pandas = load_library("pandas", "pandas", "2.0")
        self._is_held = True
        columns = {name: self.statistic(name) for name in self.statistics}
        return pandas.DataFrame(columns, index=pandas.Index(self.steps, name="step"))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the record with it, of which it is a view."""
        steps = None if self._at_steps is None else np.unique(self._at_steps)
        return _restore, (self._relatives.find_series, self.site, asdict(self._choice), self._leader, steps)

    def __repr__(self) -> str:
        merged = f"{len(self.calls)} calls merged, " if len(self.calls) > 1 else ""
        if not len(self):
            chosen = ", ".join(f"{name}={value!r}" for name, value in asdict(self._choice).items() if value is not None)
            return f"Series({self.site!r}: {merged}no steps with {chosen})"
        last = ", ".join(f"{value:.3g}" for value in self.rms[-3:])
        steps = f"{count_of(len(self), 'step')} {self.steps[0]}…{self.steps[-1]}"
        return f"Series({self.site!r}: {merged}{steps}, rms … {last})"

    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_series")

    def plot(self, statistic: str = "rms", *, ax: Axes | None = None, **line: Any) -> Axes:
        """Draw a statistic over steps with matplotlib; a red tick marks a step with elements that are not finite.

        Args:
            statistic: its name.
            ax: axes to draw on; those of a new figure when left out.
            line: options of the line, as for ``Axes.plot``.

        Returns:
            The axes.

        Raises:
            StatisticError: for an unknown statistic.
            LibraryError: matplotlib is not installed.
        """
        axes: Axes = ask_view("retrograd.core.views.notebook.plots", "plot_series")(self, statistic, ax, **line)
        return axes

    @property
    def calls(self) -> list[int]:
        """Numbers of the module's calls that are merged here, counted from 1."""
        if self.is_streamed:
            seen = {code for rows in self._stream() for code in np.unique(rows["site"]).tolist()}
            return sorted(call for code, call in self._codes.items() if code in seen)
        return [int(call) for call in np.unique(self._site_calls[self._chosen])]

    @property
    def is_streamed(self) -> bool:
        """True if no rows are held, of a record that is too long for a table: what is asked for first is read alone."""
        rows = self._all_rows
        is_long = isinstance(rows, LongRows) and not rows.fits(self._choice.phase)
        return is_long and self._is_merged and not self._is_held

    def means(self, call: int) -> bool:
        """Return whether this call is selected."""
        return self._choice.call in (None, call)

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """Steps that have data, rising: int64, shape ``[n]``."""
        return self._streamed_steps if self.is_streamed else self._numbered[0]

    @cached_property
    def tensors(self) -> Sequence[Kept]:
        """Kept tensors of this site, whole or in part, oldest first, of all phases; each is loaded on access.

        The tensors of :attr:`value` and :attr:`input` match those of the gradient one to one, in the same order.

        Raises:
            NoSuchSiteError: when the value or input of a kept gradient was not kept itself.
            NothingKeptError: when a tensor is asked for and none was kept.
        """
        kept = self._relatives.list_tensors(self)
        matched = kept if self._leader is None else match_tensors(self._leader, self.site, kept)
        if self._at_steps is not None:
            matched = [each for each in matched if each.step in self._at_steps]
        return KeptTensors(matched, lambda: self._relatives.explain_none_kept(self))

    @property
    def exponents(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The steps, and for each the exponent histogram: int64, shape ``[n, 255]``.

        Bin ``e + 127`` counts the elements with 2^e ≤ |x| < 2^(e+1).
        """
        whole = self._whole
        steps, groups = whole._numbered
        return steps, add_exponents(Picked(whole._rows, whole._index), groups, len(steps))

    @property
    def signed_histograms(self) -> list[SignedHistogram]:
        """Histograms around zero of a module's output, of sampled training steps, in the order recorded.

        Each has ``step``, ``rank``, ``edges`` (33, in the unit of the tensor) and ``bins`` (32 counts). They are taken
        at recorded steps 0, 1, 2, 4 … 128 and every 128th, more seldom of more than 32 modules; inputs, gradients
        and parameters have none.
        """
        return self._relatives.find_signed(self.site)

    def add_exponents(
        self, place: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]], columns: int
    ) -> npt.NDArray[np.int64]:
        """Exponent histograms added up over steps that share a column: shape ``[columns, 255]``.

        Args:
            place: returns the column of each of some rising steps.
            columns: how many there are.
        """
        whole = self._whole
        steps, groups = whole._numbered
        return add_exponents(Picked(whole._rows, whole._index), place(steps)[groups], columns)

    @property
    def rows(self) -> dict[str, npt.NDArray[Any]]:
        """Selected rows of all ranks, unmerged, as columns of equal length; ``phase`` is text, ``call`` a number."""
        rows, index, calls = self._whole._located
        chosen = self._choice.pick(rows, index, calls)
        picked = Picked(rows, index[chosen])
        columns = {name: picked[name] for name in picked if name not in ("site", *OF_HISTOGRAMS)}
        columns["phase"] = np.array(PHASES)[columns["phase"]]
        columns["call"] = calls[chosen]
        return columns

    @property
    def value(self) -> Series:
        """The value of which this is the gradient or update, at the very same calls.

        Raises:
            NoSuchSiteError: when the value was not recorded.
        """
        return self._relatives.find_value(self)

    @property
    def inputs(self) -> dict[str, Series]:
        """The recorded arguments of the module at the very same calls, by name.

        A tensor in a nested argument has the name of the argument and its keys: ``"states.0"``.

        Raises:
            NoSuchSiteError: when no argument was recorded, or the site has none: a parameter, whose gradient comes from
                all calls, or a tensor watched by hand.
        """
        return self._relatives.find_inputs(self)

    @property
    def input(self) -> Series:
        """The only entry of :attr:`inputs`. For a linear layer, dW is the sum of ``gradient.T @ input`` over its calls.

        Raises:
            NoSuchSiteError: when several were recorded, or none.
        """
        inputs = self.inputs
        if len(inputs) > 1:
            names = ", ".join(f"history[{self.site!r}].inputs[{name!r}]" for name in inputs)
            raise NoSuchSiteError(f"{self.site!r} belongs to {len(inputs)} inputs.", repair=f"take one of {names}.")
        return next(iter(inputs.values()))

    def statistic(self, name: str) -> FloatArray:
        """A statistic by name, built in or a user's own: one number a step.

        Raises:
            StatisticError: for an unknown statistic.
        """
        if self.is_streamed and self._asked in ("", name):
            self._asked = name
            columns, codes = find_columns([name], self._all_rows.custom), [self._wanted_codes]
            pieces = (
                build_matrix(rows, codes, [self.site], name, self._choice.phase) for rows in self._stream(columns)
            )
            return np.concatenate([piece.values[0] for piece in pieces])
        self._is_held = True  # whoever asks for a second one may ask for more
        return compute_statistic(self._merged, name, self._rows.custom)

    @names_arguments
    def select(self, **wanted: Unpack[SelectOptions]) -> Series:
        """This site with other rows selected.

        Args:
            wanted: ``phase``, ``backward``, ``micro``, ``rank``, ``call``; None merges all of them. A number of
                ``backward`` is that of a pass within its micro-batch, ``"first"`` the first one that reached the site.

        Raises:
            PatternError: for an unknown phase (a ValueError).
            CallError: for anything else.
        """
        if strange := [name for name in wanted if name not in SelectOptions.__annotations__]:
            known = ", ".join(f"{name}=" for name in SelectOptions.__annotations__)
            repair = f"give one of {known}; a step is series.at(3), a stretch of them series[-100:]."
            raise CallError(f"select() takes no {strange[0]!r}.", repair=repair)
        choice = replace(self._choice, **wanted)
        if choice.phase is not None:
            encode_phase(choice.phase)  # raises at once for an unknown phase
        selected = self._with(choice)
        selected._leader = self._leader and self._leader.select(**wanted)
        return selected

    def paired_with(self, other: Series) -> Series:
        """This series at the calls of another one: same step, micro-batch, phase, rank and call."""
        rows, index, calls = self._whole._located
        whole = other._whole
        mine = _stack_calls(rows, index, calls)
        is_theirs = np.isin(mine, _stack_calls(whole._rows, whole._index, whole._site_calls[whole._chosen]))
        paired = self._with(other._choice)
        paired._leader = other
        paired._is_whole = True
        paired._located = rows, index[is_theirs], calls[is_theirs]
        return paired

    def _with(self, choice: Choice) -> Series:
        other = object.__new__(Series)
        vars(other).update(vars(self))
        for name in (
            "tensors",
            "_chosen",
            "_index",
            "_numbered",
            "_merged",
            "_whole",
            "_streamed_steps",
        ):  # what is cached is of this choice
            vars(other).pop(name, None)
        if not self._is_whole:
            vars(other).pop("_located", None)
        other._choice = choice
        other._asked, other._is_held = "", False
        return other

    @cached_property
    def _whole(self) -> Series:
        """This series with every row told apart, of which a long record holds those with ranks merged."""
        if self._is_whole:
            return self
        other = self._with(self._choice)
        other._is_whole = True
        return other

    @cached_property
    def _located(self) -> tuple[Rows, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows, the numbers of those of this site, and the call of each."""
        merged = self._all_rows.merged(self._choice.phase, self._codes) if self._is_merged else ()
        rows = join_rows(merged) if self._is_merged else self._all_rows.only(self._codes)
        found = {call: rows.of_site(code) for code, call in self._codes.items()}
        calls = np.repeat(list(found), [len(index) for index in found.values()])
        return rows, np.concatenate(list(found.values())), calls

    @property
    def _is_merged(self) -> bool:
        """Whether rows with micro-batches and ranks merged will do."""
        choice = self._choice
        return not self._is_whole and choice.backward == "first" and choice.micro is None and choice.rank is None

    def _stream(self, columns: Collection[str] = ("calls",)) -> Iterator[Rows]:
        """Some columns of the selected rows, merged, for some steps after the other."""
        return self._all_rows.merged(self._choice.phase, self._wanted_codes, columns)

    @property
    def _wanted_codes(self) -> list[int]:
        return [code for code, call in self._codes.items() if self.means(call)]

    @cached_property
    def _streamed_steps(self) -> npt.NDArray[np.int64]:
        return np.concatenate([number_steps(rows["step"])[0] for rows in self._stream()])

    @property
    def _rows(self) -> Rows:
        return self._located[0]

    @property
    def _site_index(self) -> npt.NDArray[np.int64]:
        return self._located[1]

    @property
    def _site_calls(self) -> npt.NDArray[np.int64]:
        return self._located[2]

    @cached_property
    def _chosen(self) -> npt.NDArray[np.int64]:
        chosen = self._choice.pick(self._rows, self._site_index, self._site_calls)
        return chosen if self._choice.rank is not None else chosen[self._rows.counts(self._site_index[chosen])]

    @cached_property
    def _index(self) -> npt.NDArray[np.int64]:
        return self._site_index[self._chosen]

    @cached_property
    def _numbered(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return number_steps(self._rows["step"][self._index])

    @cached_property
    def _merged(self) -> Part:
        steps, groups = self._numbered
        picked = Picked(self._rows, self._index)
        return picked if len(steps) == len(groups) else merge_picked(picked, groups, len(steps))


def _restore(
    find_series: Callable[[str], Series],
    site: str,
    choice: SelectOptions,
    leader: Series | None,
    steps: npt.NDArray[np.int64] | None,
) -> Series:
    series = find_series(site)
    if leader is not None:
        series = series.paired_with(leader)
    series = series.select(**choice)
    return series if steps is None else series.only(steps)


def match_tensors(leader: Series, site: str, kept: Sequence[Kept]) -> list[Kept]:
    """The kept tensor that belongs to each kept tensor of a gradient.

    Raises:
        NoSuchSiteError: when one of them was not kept.
    """
    by_call = {_call_of(each): each for each in kept}
    found = []
    for each in leader.tensors:
        if _call_of(each) not in by_call:
            raise NoSuchSiteError(
                f"No tensor of {site!r} was kept for {each.site!r} at step {each.step}.",
                repair=f"keep both: rg.record(model, tensors=[{leader.site!r}, {site!r}]).",
                reason="tensors beyond the budget are dropped, and an event says so.",
            )
        found.append(by_call[_call_of(each)])
    return found


def _call_of(kept: Kept) -> tuple[int, int, str, int, int]:
    return kept.step, kept.micro, kept.phase, kept.rank, kept.call


def _stack_calls(rows: Rows, index: npt.NDArray[np.int64], calls: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    keys = np.stack([*(rows[name][index].astype(np.int64) for name in _SAME_CALL), calls.astype(np.int64)], axis=1)
    kind = [(name, np.int64) for name in (*_SAME_CALL, "call")]
    return np.ascontiguousarray(keys).view(kind).reshape(-1)


class Relatives:
    """Finds what belongs to a series in its record: kept tensors, the value of a gradient, the inputs of a call.

    Args:
        names: its sites.
        find_series: returns the series of a name.
        find_tensors: returns the tensors kept of a site, by its written name.
        explain: returns why nothing was recorded of a name, or an empty text.
        find_signed: returns the signed histograms of a site.
    """

    def __init__(
        self,
        names: SiteNames,
        find_series: Callable[[str], Series],
        find_tensors: Callable[[str], list[Kept]],
        explain: Callable[[str], str],
        find_signed: Callable[[str], list[SignedHistogram]],
    ) -> None:
        self.find_signed = find_signed
        self._explain = explain
        self._names = names
        self.find_series = find_series
        self._find_tensors = find_tensors

    def list_tensors(self, series: Series) -> Sequence[Kept]:
        """Tensors kept of its calls, oldest first."""
        codes = self._names.find(series.site)
        of_calls = [self._find_tensors(self._names.write(code)) for code, call in codes.items() if series.means(call)]
        if len(of_calls) == 1:
            return of_calls[0]
        together = [kept for tensors in of_calls for kept in tensors]
        return sorted(together, key=lambda kept: (kept.step, kept.micro, kept.backward))

    def explain_none_kept(self, series: Series) -> NothingKeptError:
        """The error for a site without kept tensors."""
        why = self._explain(series.site)
        if not why and parse_leniently(series.site).quantity == "grad":
            why = "a gradient comes only where the tensor requires grad and a backward pass reaches it."
        return NothingKeptError(
            f"No tensor of {series.site!r} was kept.",
            repair=f"ask for it, rg.record(model, tensors={series.site!r}), or for a site that produces tensors.",
            reason=why,
        )

    def find_value(self, series: Series) -> Series:
        """The value of which it is the gradient or update."""
        name = name_like(parse_leniently(series.site).value, series.site)
        if name not in self._names:
            raise _miss(f"The value of {series.site!r}", name, series.site)
        return self.find_series(name).paired_with(series)

    def find_inputs(self, series: Series) -> dict[str, Series]:
        """Recorded arguments of the module at the same calls, by name."""
        site = parse_leniently(series.site)
        if site.kind in ("parameter", "watched"):
            what = "a parameter" if site.kind == "parameter" else "a tensor watched by hand"
            raise NoSuchSiteError(
                f"{series.site!r} belongs to {what}, which has no input.",
                repair=f"ask for its value, history[{series.site!r}].value, or for the input of a "
                "module's output: history['fc:output.grad'].input.",
                reason="an input belongs to one call of a module.",
            )
        arguments = [replace(each, call=site.call) for each in self._names.list_arguments(site.path)]
        names = {".".join(each.keys[1:]): name_like(each, series.site) for each in arguments}
        found = {
            argument: self.find_series(name).paired_with(series)
            for argument, name in names.items()
            if name in self._names
        }
        if not found:
            raise _miss(f"The input of {series.site!r}", f"{site.printed_path}:inputs", series.site)
        return found


def _miss(what: str, pattern: str, asked: str) -> NoSuchSiteError:
    return NoSuchSiteError(
        f"{what} was not recorded: there is no {pattern!r}.",
        repair=f"add it: rg.record(model, sites=[{asked!r}, {pattern!r}]).",
    )
