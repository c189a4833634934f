"""The history of a run: the record in memory, and how it is read."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.amounts import count_of, show_bytes
from retrograd.core.drawings import ask_view, drawn_by
from retrograd.core.errors import CallError, NoSuchSiteError, SiteError, TableSizeError
from retrograd.core.guesses import Guided, names_arguments
from retrograd.core.history.chosen_sites import ChosenSites
from retrograd.core.history.copies import Copies, Disagreement
from retrograd.core.history.curve import Curve
from retrograd.core.history.data_facts import SIGNED_BINS, SignedHistogram
from retrograd.core.history.events import Events
from retrograd.core.history.facts import read_facts
from retrograd.core.history.kept import Kept, TensorRing, pack_kept, read_kept, unpack_kept
from retrograd.core.history.matrix import Matrix, build_matrices, find_columns, join_matrices
from retrograd.core.history.names import SiteNames
from retrograd.core.history.outline import RecordOutline
from retrograd.core.history.rows import (
    FIXED_TYPES,
    OF_HISTOGRAMS,
    Part,
    Rows,
    StoredPart,
    count_entries,
    decode_batches,
    encode_phase,
    join_neighbours,
    leave_earlier_out,
)
from retrograd.core.history.scalars import SCALAR_NAMES, Scalars
from retrograd.core.history.series import Relatives, Series
from retrograd.core.history.sink import UPDATES, Event, KeptTensor, RowBatch
from retrograd.core.history.steps import number_steps
from retrograd.core.history.table import (
    NO_EVENTS,
    ROW_BYTES,
    build_event_table,
    build_ranked_table,
    find_made,
    read_events,
)
from retrograd.core.history.windows import LongRows, choose_rows, compare_copies, find_outline
from retrograd.core.libraries import load_library
from retrograd.core.limits import LIMITS
from retrograd.core.sites.pattern import MAGIC, Pattern
from retrograd.core.statistics.row import STATISTICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class History(Guided):
    """The record of every site at every step. In memory it is also a sink that a recorder writes to.

        history.sites                                  names, in call order
        history["blocks.3:output.grad"].rms            one number a step
        history["cell:output.grad"].rms                all calls of a module merged
        history["cell#2:output.grad"].rms              the second call alone
        history["blocks.3:output.grad"].tensors[-5:]   kept tensors
        history["blocks.*:output.grad"].rms            several sites: a matrix of sites × steps
        history.matrix("rms")                          the same of all sites
        history.loss, history.lr, history.grad_norm    one number a step: see ``scalars``

    Args:
        rank: the rank of everything that is added.
        keep_last: how many tensors of each site to hold; None for as many as the budget allows.
        tensor_budget: bytes of held tensors; beyond it the oldest are dropped, which an event notes.
    """

    def __init__(self, *, rank: int = 0, keep_last: int | None = None, tensor_budget: int = 1 << 30) -> None:
        self.manifest: dict[str, Any] = {}
        self.rank = rank
        self.ring = TensorRing(keep_last, tensor_budget)
        self._names = SiteNames()
        self._pending: deque[RowBatch] = deque()
        self._rows = Rows()
        self._counted: tuple[Rows, npt.NDArray[np.bool_]] | None = None
        """Rows, and for each site whether it has any of them, as last counted."""
        self._outlined: tuple[Rows, RecordOutline] | None = None
        """Rows, and their outline, as last asked for."""
        self._copies: Copies | None = None
        self._events = Events()
        self._pending_events: deque[Event] = deque()
        self._reading = threading.Lock()
        self._find_stored: Callable[[str], list[Kept]] = lambda site: []

    def load(
        self,
        names: SiteNames,
        parts: Sequence[Part],
        events: Events,
        find_tensors: Callable[[str], list[Kept]],
        copies: Copies | None = None,
    ) -> None:
        """Replace what is held by a record that is stored elsewhere.

        Args:
            names: the sites, as numbered in ``parts``.
            parts: columns of rows.
            events: those of all ranks, of one after the other.
            find_tensors: returns the tensors kept of a site.
            copies: which ranks hold the same tensors.
        """
        with self._reading:
            self._names, self._events, self._find_stored = names, events, find_tensors
            if copies is not None and self._copies is not None:
                copies.warned |= self._copies.warned
            self._copies = copies
            self._rows = choose_rows(parts, self._rows, self._merges, copies)

    def since(self, step: int, until: int | None = None) -> History:
        """The record from some step on, or to another; of a part that holds other steps too more may be left."""
        later = History(rank=self.rank)
        later.manifest = self.manifest
        last = np.iinfo(np.int64).max if until is None else until
        kept: list[Part] = []
        for part in self.rows.parts:
            if not isinstance(part, StoredPart):
                kept += [left] if (left := leave_earlier_out(part, step)) is not None else []
            elif part.step_limits[0] <= last and part.step_limits[1] >= step:
                kept.append(part)
        later.load(self._names, kept, self.all_events.since(step), lambda site: [], self._copies)
        if len(kept) == len(self.rows.parts):
            later._rows = self.rows  # with what is known of them already
        return later

    def only(self, sites: Iterable[str], *, histograms: bool = False) -> History:
        """The record with the rows of some sites alone; those of a long record are read in one pass, and held.

        Args:
            sites: names.
            histograms: of a long record, with these.

        Raises:
            NoSuchSiteError: for a site that was not recorded.
        """
        rows, some = self.rows, History(rank=self.rank)
        some.manifest = self.manifest
        codes = {code for site in sites for code in self._find(site)}
        names = [name for name in rows if histograms or name not in OF_HISTOGRAMS]
        parts = [rows.hold(codes, names)] if isinstance(rows, LongRows) else rows.parts
        some.load(self._names, parts, self.all_events, self.list_tensors, self._copies)
        return some

    # ---- the sink ----

    def describe(self, **facts: Any) -> None:
        """Add facts to the manifest."""
        self.manifest.update(facts)

    def add_sites(self, names: Sequence[str]) -> None:
        """Name the next rows."""
        self._names.add_rows(names)

    def add_rows(self, batch: RowBatch) -> None:
        """Keep rows; they are decoded when they are read."""
        self._pending.append(batch)

    def add_event(self, event: Event) -> None:
        """Keep an event."""
        self._pending_events.append(event)

    def add_tensor(self, kept: KeptTensor) -> None:
        """Keep a tensor by reference, and drop the oldest where the budget requires it."""
        if self.ring.add(kept) and self.ring.dropped == 1:
            text = f"the budget of {self.ring.budget:,} bytes for tensors is spent; the oldest make room from here on"
            self.add_event(Event(kept.moment, "dropped", kept.site, text=text))

    def flush(self) -> None:
        """Do nothing: rows can be read as soon as they are added."""

    def close(self, status: str = "finished") -> None:
        """Record how the run ended."""
        self.manifest.setdefault("status", status)

    # ---- reading ----

    @property
    def sites(self) -> list[str]:
        """Names of all recorded sites, in the order first seen, which is call order.

        Before anything is recorded, the sites that will be. The name of a module that was called several times stands
        for all calls; its first call is listed with its number, as ``cell#1:output``.
        """
        listed = self._names.listed
        return [listed[code] for code in self._recorded]

    @property
    def site_names(self) -> list[str]:
        """Names by number, as in the column ``site`` of the rows; sites without rows are included."""
        return self._names.listed

    @property
    def written_names(self) -> list[str]:
        """The same as in files, where a first call never has a number."""
        return self._names.written

    @property
    def _recorded(self) -> list[int]:
        """Codes of the recorded sites; of all sites before anything is recorded."""
        names = self._names.written
        rows = self.rows
        if self._counted is None or self._counted[0] is not rows or len(self._counted[1]) < len(names):
            has_rows = np.zeros(len(names), np.bool_)
            has_rows[rows.codes] = True
            self._counted = rows, has_rows
        has_rows = self._counted[1]
        found = [code for code, name in enumerate(names) if has_rows[code] or self.list_tensors(name)]
        return found or list(range(len(names)))

    def __getitem__(self, site: str) -> Series:
        """One site over time: all calls of a module, unless the name has the number of one.

        A parameter may be named as torch names it, ``fc.weight.grad`` for ``fc:weight.grad``. A pattern, as of
        :func:`retrograd.record`, gives all recorded sites that match, as :class:`ChosenSites`: ``history["blocks.*"]``.

        Raises:
            NoSuchSiteError: for a site that was not recorded (a KeyError); the nearest are named.
            CallError: for what is not a text.
        """
        if not isinstance(site, str):
            repair = "history['fc:output.grad'], or a pattern; history.sites lists the names."
            raise CallError(f"A history is asked by the name of a site, not by {type(site).__name__}.", repair=repair)
        name = self._names.read_dotted(site)
        if name in self._names:
            relatives = Relatives(self._names, self.__getitem__, self.list_tensors, self._explain, self._find_signed)
            return Series(self.rows, name, self._find(name), relatives)
        try:
            return cast("Series", ChosenSites(self, self.select(name)))  # a text cannot tell a checker which it is
        except SiteError as error:
            if name in self.scalars:
                raise NoSuchSiteError(f"{name!r} is no site.", repair=f"history.scalars[{name!r}].") from None
            if MAGIC.search(name) and not self._explain(name):
                raise error from None
        self._find(name)
        raise AssertionError("unreachable")

    def keys(self) -> KeysView[str]:
        """Names of all recorded sites, as :attr:`sites` lists them."""
        return KeysView(self)

    def values(self) -> ValuesView[Series]:
        """The series of each site, in that order."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Series]:
        """Each name with its series, in that order."""
        return ItemsView(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A series of one number a step by its name, ``history.lr``; see :attr:`scalars`."""
            if name not in SCALAR_NAMES:
                return super().__getattr__(name)
            return self.scalars[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *({*self.scalars} & SCALAR_NAMES)})

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle all that is held, with its kept tensors; of a run folder, what was read of it."""
        rows = {name: np.asarray(column) for name, column in self.rows.items()}
        written = self._names.written
        tensors = {name: [pack_kept(kept) for kept in self.list_tensors(name)] for name in written}
        return _restore, (self.manifest, self.rank, written, rows, self.event_table, tensors)

    def __contains__(self, site: object) -> bool:
        return site in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        rows = self.rows
        span = "no steps yet" if rows.step_limits is None else "steps {}…{}".format(*rows.step_limits)
        counts = f"{count_of(rows.count, 'row')}, {count_of(self.all_events.count, 'event')}"
        return f"History({count_of(len(self.sites), 'site')}, {span}, {counts})"

    _repr_html_ = drawn_by("retrograd.core.views.notebook.records", "draw_history")

    @names_arguments
    def select(self, patterns: Pattern | Iterable[Pattern]) -> list[str]:
        """Names of the recorded sites that match a pattern, or one of several.

        Patterns are those of :func:`retrograd.record`, without module types.

        Raises:
            PatternError: for an invalid pattern.
            NoSuchSiteError: when a pattern matches nothing.
        """
        return self._names.match(patterns, self._recorded)

    def matrix(
        self, statistic: str = "rms", sites: str | Sequence[str] | None = None, phase: str | None = "train"
    ) -> Matrix:
        """One statistic of many sites over all steps, with micro-batches, ranks, and calls of a module merged.

        Args:
            statistic: one of :data:`retrograd.core.statistics.row.STATISTICS`, or a user's own;
                ``"norm"`` is ``"l2"``.
            sites: names, or a pattern; all sites when left out.
            phase: kind of forward; None for all.

        Raises:
            StatisticError: for a statistic that was not recorded.
            NoSuchSiteError: for a site that was not recorded.
        """
        listed = self.sites if sites is None else self.select(sites) if isinstance(sites, str) else list(sites)
        statistic = "l2" if statistic == "norm" else statistic
        return join_matrices([only for [only] in self.matrices([statistic], listed, phase)])

    def matrices(
        self, statistics: Sequence[str], sites: Sequence[str], phase: str | None = "train"
    ) -> Iterator[Iterator[Matrix]]:
        """As :meth:`matrix`, of several statistics, for some steps after the other: of a long record some at a time.

        Those of some steps are to be taken before the next ones are asked for: each is made when it is.
        """
        columns = find_columns(statistics, self.rows.custom)
        for rows, codes in self.merged(sites, phase, columns):
            yield build_matrices(rows, codes, list(sites), statistics, phase)

    def merged(
        self, sites: Sequence[str], phase: str | None, columns: Collection[str]
    ) -> Iterator[tuple[Rows, list[dict[int, int]]]]:
        """Rows among which are those of some sites, merged by site and step, for some steps after the other.

        Args:
            sites: names.
            phase: kind of forward; None for all.
            columns: of numbers, that will be asked for.

        Yields:
            The rows, and for each site the codes of its calls, each with the number of the call.
        """
        codes = [self._find(site) for site in sites]
        for rows in self.rows.merged(phase, {code for several in codes for code in several}, columns):
            for some in rows.by_steps(LIMITS.cells_at_once):
                yield some, codes
                del some
            del rows  # they go before the next are merged

    def add_exponents(
        self,
        sites: Sequence[str],
        phase: str,
        place: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]],
        columns: int,
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Exponent histograms of each site, added up over the steps that share a column: int64, ``[columns, 255]``.

        Args:
            sites: names.
            phase: kind of forward.
            place: returns the column of each of some rising steps.
            columns: how many there are.
        """
        rows = self.rows
        if isinstance(rows, LongRows):
            yield from rows.add_exponents([self._find(site) for site in sites], phase, place, columns)
            return
        for site in sites:
            yield self[site].select(phase=phase).add_exponents(place, columns)

    @property
    def outline(self) -> RecordOutline:
        """Steps by phase, and the order in which sites were reached."""
        rows = self.rows
        if self._outlined is None or self._outlined[0] is not rows:
            self._outlined = rows, rows.outline if isinstance(rows, LongRows) else find_outline(rows)
        return self._outlined[1]

    def find_first_nonfinite(self, phase: str) -> int | None:
        """A step before which no row of a phase has NaN or infinite elements; None where none has any at all."""
        code, found = encode_phase(phase), []
        for piece in self.rows.nonfinite_pieces(("step", "phase", "nan", "pos_inf", "neg_inf")):
            bad = [np.flatnonzero(piece[name]) for name in ("nan", "pos_inf", "neg_inf") if piece[name].any()]
            found += [piece["step"][index][piece["phase"][index] == code] for index in bad]
        return min((int(steps.min()) for steps in found if len(steps)), default=None)

    @property
    def loss(self) -> Curve:
        """The loss of each step: the mean of all scalars from which backward started.

        Passes that return gradients with a graph of their own, for a penalty or an inner step, start from none.
        """
        return self.all_events.loss

    @property
    def scalars(self) -> Scalars:
        """Series of one number a step, by name: ``loss``, and what else was recorded or logged, as of now."""
        return Scalars(self.all_events, self.manifest)

    @property
    def made_steps(self) -> npt.NDArray[np.int64]:
        """The recorded steps that were made, rising: those ended by an update; where nothing tells of one, with a pass.

        What runs behind the last update (an evaluation, micro-batches that none follows) is of a step that was not.
        """
        updates = list(self.all_events.pieces(["kind", "step", "text"], UPDATES))
        if any(piece.num_rows for piece in updates):
            return number_steps(np.concatenate(list(map(find_made, updates))))[0]
        trained = self.outline.steps.get(encode_phase("train"), np.empty(0, np.int64))
        return number_steps(np.concatenate((self.loss.steps, trained)))[0]

    @property
    def made_loss(self) -> Curve:
        """The loss of each step up to the last that was made: without passes behind it, as of an evaluation."""
        steps, values = self.loss
        made = self.made_steps
        end = int(np.searchsorted(steps, made[-1], side="right")) if len(made) else 0
        return Curve(steps[:end], values[:end])

    def losses_at(self, steps: Collection[int]) -> list[Event]:
        """The losses of some steps, in the order recorded."""
        return read_events(self.all_events.losses_at(steps))

    @property
    def events(self) -> list[Event]:
        """All events, in the order recorded."""
        return read_events(self.event_table)

    @property
    def few_events(self) -> list[Event]:
        """Events of all kinds of which not each step has one: neither losses nor updates."""
        return read_events(self.all_events.few)

    @property
    def event_table(self) -> pa.Table:
        """All events as :data:`retrograd.core.history.table.EVENT_COLUMNS`."""
        return self.all_events.table

    @property
    def all_events(self) -> Events:
        """All events, as of now: of a long record in memory are those alone of which there are few."""
        with self._reading:
            added = _take_all(self._pending_events)
            if added:
                tables = [self._events.table, build_event_table(added)]
                self._events = Events(pa.concat_tables(tables).unify_dictionaries())
            return self._events

    @property
    def rows(self) -> Rows:
        """All rows as columns, as of now."""
        with self._reading:
            batches = _take_all(self._pending)
            if batches:
                columns = decode_batches(batches, self._names.gradients, self.rank)
                columns["site"] = self._names.codes[columns["site"]]
                self._rows = Rows(join_neighbours([*self._rows.parts, columns]), self._rows, self._merges)
            return self._rows

    @property
    def disagreements(self) -> list[Disagreement]:
        """Sites whose copies on several ranks differ: for each the first step, and two ranks that differ."""
        rows = self.rows
        told = self.manifest.get("compacted", {}).get("differing", {})  # found when the ranks were merged
        found = [Disagreement(site, *numbers) for site, numbers in told.items() if len(numbers) == 3]
        if isinstance(rows, LongRows):
            return found + compare_copies(rows)
        return found + ([] if rows.copies is None else rows.copies.count(rows, np.arange(rows.count))[1])

    def table(self) -> pa.Table:
        """All rows as an Arrow table, with the columns of the run folder and the rank.

        Raises:
            TableSizeError: it would have more than ``LIMITS.table_bytes``.
        """
        rows = self.rows
        size = rows.count * (ROW_BYTES + 8 * len(rows.custom)) + 8 * sum(map(count_entries, rows.parts))
        if size > LIMITS.table_bytes:
            raise TableSizeError(
                f"All {rows.count:,} rows as one table would take {show_bytes(size)}; the limit is "
                f"{show_bytes(LIMITS.table_bytes)}.",
                repair="ask for history.matrix('rms'), for history.only(sites), or read history.to_batches() piece by "
                "piece, as DuckDB does: duckdb.sql('… FROM batches'). To hold it all the same, raise the limit: "
                "retrograd.core.limits.LIMITS.table_bytes.",
                reason="making it takes twice that memory, and a process that has too little ends without a word.",
            )
        return build_ranked_table(rows, self.site_names)

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table, see :meth:`table`."""
        return self.table()

    def to_batches(self) -> pa.RecordBatchReader:
        """The same, piece by piece, for records that are longer than memory; DuckDB and others take it as it is."""
        rows, names = self.rows, self.site_names
        none = {name: np.empty(0, FIXED_TYPES.get(name, np.float64)) for name in rows}
        schema = build_ranked_table(none, names).schema
        tables = (build_ranked_table(piece, names).select(schema.names) for piece in rows.in_pieces())
        return pa.RecordBatchReader.from_batches(schema, (batch for table in tables for batch in table.to_batches()))

    def to_pandas(self) -> Any:
        """All rows as a ``pandas.DataFrame``.

        Raises:
            LibraryError: pandas is not installed.
            TableSizeError: see :meth:`table`.
        """
        load_library("pandas", "pandas", "2.0")
        return self.table().to_pandas()

    def to_polars(self) -> Any:
        """All rows as a ``polars.DataFrame``.

        Raises:
            LibraryError: polars is not installed.
            TableSizeError: see :meth:`table`.
        """
        return load_library("polars", "polars", "1.0").from_arrow(self.table())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it as a run folder, which :func:`retrograd.open_run`, the report and every command read.

        Args:
            path: a new or empty folder.

        Returns:
            The folder.

        Raises:
            RunExistsError: the folder holds another run, or other files.
            RunWriteError: it cannot be written, or the record is of several ranks.
        """
        written: Path = ask_view("retrograd.core.runs.saving", "save_history")(self, path)
        return written

    def plot(self, name: str = "rms", *, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw with matplotlib: a statistic of all sites as colours, or a scalar as a line: ``history.plot("loss")``.

        Args:
            name: a statistic, or one of :attr:`scalars`.
            ax: axes to draw on; those of a new figure when left out.
            options: of the colours or the line.

        Returns:
            The axes.

        Raises:
            StatisticError: for an unknown name.
            LibraryError: matplotlib is not installed.
        """
        scalars = self.scalars
        if name in scalars and name not in STATISTICS:
            return scalars[name].plot(ax=ax, **({"label": name} | options))
        return self.matrix(name).plot(ax=ax, **options)

    def name_calls(self, sites: Iterable[str]) -> set[str]:
        """Names, as in tables, of all calls of some sites."""
        listed = self._names.listed
        return {listed[code] for site in sites for code in self._find(site)}

    def _find(self, site: str) -> dict[int, int]:
        """Codes of a name, each with the number of its call; the error says why nothing was recorded, if known."""
        try:
            return self._names.find(site)
        except NoSuchSiteError as error:
            raise NoSuchSiteError(error.problem, repair=error.repair, reason=self._explain(site)) from None

    def _explain(self, site: str) -> str:
        """Why nothing was recorded of a site or pattern, as the recorder noted it; empty if it did not."""
        missed = self.manifest.get("not_recorded")
        listed = [each for each in missed if isinstance(each, Mapping)] if isinstance(missed, list) else []
        return next((str(each.get("reason")) for each in listed if str(each.get("site")).strip("'") == site), "")

    @property
    def _merges(self) -> dict[str, str]:
        """How users' statistics merge, from the manifest."""
        described = self.manifest.get("statistics")
        return dict(described) if isinstance(described, Mapping) else {}

    def _find_signed(self, site: str) -> list[SignedHistogram]:
        return self.signed_histograms().get(site, [])

    def signed_histograms(self) -> dict[str, list[SignedHistogram]]:
        """Histograms around zero by site, see :attr:`retrograd.core.history.series.Series.signed_histograms`."""
        found: dict[str, list[SignedHistogram]] = {}
        for piece in self.all_events.pieces(NO_EVENTS.column_names, (SignedHistogram.kind,)):
            for fact in read_facts(read_events(piece)):
                if isinstance(fact, SignedHistogram) and len(fact.counts) == SIGNED_BINS + 3:
                    found.setdefault(fact.name, []).append(fact)
        return found

    def list_tensors(self, site: str) -> list[Kept]:
        """Tensors kept of one written name, oldest first."""
        return self._find_stored(site) + [read_kept(kept) for kept in self.ring.of_site(site)]


def _restore(
    manifest: dict[str, Any],
    rank: int,
    names: Sequence[str],
    rows: Part,
    events: pa.Table,
    tensors: Mapping[str, list[tuple[Any, ...]]],
) -> History:
    history = History(rank=rank)
    history.manifest = manifest
    history.load(SiteNames(names), [rows], Events(events), lambda site: list(map(unpack_kept, tensors.get(site, ()))))
    return history


def _take_all(items: deque[Any]) -> list[Any]:
    """Empty a queue to which another thread may add meanwhile."""
    return [items.popleft() for _ in range(len(items))]
