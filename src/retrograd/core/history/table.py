"""Rows and events of a record as Arrow tables: their columns, what these mean, and the conversion both ways."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from retrograd.core.history.arrays import read_codes, read_numbers, to_coded_texts, to_numbers, to_texts
from retrograd.core.history.rows import Part
from retrograd.core.history.sink import ENDS_NONE, PHASES, UPDATES, Event, Moment
from retrograd.core.history.steps import number_steps
from retrograd.core.statistics.row import derive

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, with its description.

    Attributes:
        name: its name.
        type: its Arrow type.
        text: description of its contents.
    """

    name: str
    type: pa.DataType
    text: str


_TEXT = pa.dictionary(pa.int32(), pa.string())

STATISTICS_COLUMNS: tuple[Column, ...] = (
    Column("step", pa.int64(), "optimizer updates attempted when the forward began, from 0"),
    Column("micro", pa.int32(), "micro-batch within the step, from 0"),
    Column("backward", pa.int16(), "backward pass within the micro-batch, from 0; −1 for values and updates"),
    Column("phase", _TEXT, "kind of forward: " + ", ".join(PHASES)),
    Column("site", _TEXT, "where: `blocks.3.attn:output.grad`, `rnn.cell#2:output`; a first call has no number"),
    Column("calls", pa.int32(), "tensors merged into this row"),
    Column(
        "order",
        pa.int64(),
        "counts up in the order in which sites were first reached: through the forward, then through the backward pass "
        "and the update of a micro-batch; anew for a second pass; −1 in a record from before there was this column",
    ),
    Column("count", pa.int64(), "elements"),
    Column("nan", pa.int64(), "elements that are NaN"),
    Column("pos_inf", pa.int64(), "elements that are +∞"),
    Column("neg_inf", pa.int64(), "elements that are −∞"),
    Column("zeros", pa.int64(), "elements that are zero"),
    Column("sum", pa.float64(), "Σ x; this and the next four are of the finite elements alone"),
    Column("m2", pa.float64(), "Σ (x − mean)²"),
    Column("abs_sum", pa.float64(), "Σ |x|"),
    Column("min", pa.float64(), "smallest element; +∞ when none is finite"),
    Column("max", pa.float64(), "largest element; −∞ when none is finite"),
    Column("reference", pa.float64(), "Σ w² of the weight that an update was added to; 0 elsewhere"),
    Column("mean", pa.float64(), "sum / n, where n is the number of finite elements; NaN when there is none"),
    Column("std", pa.float64(), "√(m2 / n); NaN when n is 0"),
    Column("rms", pa.float64(), "√(Σ x² / n); NaN when n is 0"),
    Column("scale", pa.float64(), "loss scale that was divided out of a gradient; 1 elsewhere"),
    Column("first_bin", pa.int16(), "exponent bin that `bins` begins with"),
    Column(
        "bins",
        pa.list_(pa.int64()),
        "elements by binary exponent: entry i counts 2^e ≤ |x| < 2^(e+1) with e = first_bin + i − 127",
    ),
)
"""Each row is one site at one moment, on one rank."""

EVENT_COLUMNS: tuple[Column, ...] = (
    Column("step", pa.int64(), "as in the statistics"),
    Column("micro", pa.int32(), "as in the statistics"),
    Column("backward", pa.int16(), "as in the statistics"),
    Column("phase", _TEXT, "as in the statistics"),
    Column(
        "kind",
        _TEXT,
        "loss, scalar, update, skipped, scale, fault, dropped, overwritten, rewrite, trigger, note, error, finding, or "
        "a fact",
    ),
    Column("name", _TEXT, "what it is about: a site, an optimizer, …"),
    Column("value", pa.float64(), "its number; NaN where there is none; for rewrite, ‖after − before‖ / ‖before‖"),
    Column("text", pa.string(), "its words; for rewrite, the rule; for an update, if it ends no step"),
    Column("time", pa.float64(), "seconds since the epoch"),
)
"""Each row is something that happened once."""

STATISTICS_NAMES = frozenset(column.name for column in STATISTICS_COLUMNS)
TAKEN_NAMES = STATISTICS_NAMES | {"bin_count", "rank"}
"""Names that a user's statistic cannot have: columns of rows, in files or in memory."""

_DERIVED = ("mean", "std", "rms")
_CODED = ("phase", "site")


ROW_BYTES = 4 + sum(
    4 if column.name in ("phase", "site", "bins") else column.type.bit_width // 8 for column in STATISTICS_COLUMNS
)
"""Bytes of a row as a table with its rank, without the entries of its histogram."""


def make_schema(columns: Sequence[Column]) -> pa.Schema:
    """The Arrow schema of a table with these columns."""
    return pa.schema([(column.name, column.type) for column in columns])


def build_table(columns: Part, sites: Sequence[str]) -> pa.Table:
    """The table of decoded rows.

    Args:
        columns: as :func:`retrograd.core.history.rows.decode_batches` returns them.
        sites: names by code.

    Returns:
        A table with :data:`STATISTICS_COLUMNS`, then one float64 column a user statistic.
    """
    names = {"phase": to_texts(PHASES), "site": to_texts(sites)}
    arrays: dict[str, pa.Array] = {}
    for column in STATISTICS_COLUMNS:
        if column.name in _CODED:
            codes = to_numbers(columns[column.name].astype(np.int32))
            arrays[column.name] = pa.DictionaryArray.from_arrays(codes, names[column.name])
        elif column.name == "bins":
            arrays["bins"] = _build_lists(columns["bin_count"], columns["bins"])
        elif column.name in _DERIVED:
            arrays[column.name] = to_numbers(derive(columns, column.name))
        else:
            arrays[column.name] = to_numbers(columns[column.name], column.type)
    for name in columns.keys() - TAKEN_NAMES:
        arrays[name] = to_numbers(columns[name], pa.float64())
    return pa.table(arrays)


def build_ranked_table(columns: Part, sites: Sequence[str]) -> pa.Table:
    """The same, and the rank as the last column."""
    table = build_table(columns, sites)
    return table.append_column("rank", to_numbers(columns["rank"]))


def _build_lists(lengths: npt.NDArray[Any], values: npt.NDArray[Any]) -> pa.ListArray:
    offsets = to_numbers(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    return pa.ListArray.from_arrays(offsets, to_numbers(values, pa.int64()))


EVENT_SCHEMA = make_schema(EVENT_COLUMNS)
NO_EVENTS = pa.Table.from_batches([], EVENT_SCHEMA)  # Schema.empty_table() makes arrays, for which pandas is loaded
_MOMENT = ("step", "micro", "backward", "phase")
OF_LOSSES = ("kind", "step", "value")
"""Columns that tell losses."""

_OWN = ("kind", "name", "value", "text", "time")


def build_event_table(events: Sequence[Event]) -> pa.Table:
    """Events as a table of :data:`retrograd.core.history.table.EVENT_COLUMNS`."""
    moment, own = operator.attrgetter(*_MOMENT), operator.attrgetter(*_OWN)
    lines = [(*moment(event.moment), *own(event)) for event in events]
    if not lines:
        return NO_EVENTS
    columns = zip(EVENT_SCHEMA, zip(*lines, strict=True), strict=True)
    return pa.table([_build_column(values, field.type) for field, values in columns], EVENT_SCHEMA)


def _build_column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return to_coded_texts(values)
    return to_texts(values) if pa.types.is_string(kind) else to_numbers(np.array(values, kind.to_pandas_dtype()))


def read_events(table: pa.Table) -> list[Event]:
    """The events of a table."""
    columns = [table[name].to_pylist() for name in (*_MOMENT, *_OWN)]
    return [Event(Moment(*line[:4]), *line[4:]) for line in zip(*columns, strict=True)]


def find_last_micro_batches(table: pa.Table) -> tuple[IntArray, IntArray]:
    """Steps that have ended in an update, each once and rising, and the last micro-batch of each."""
    updates = filter_rows(table, find_kinds(table, UPDATES))
    steps, groups = number_steps(read_numbers(updates["step"]))
    lasts = np.zeros(len(steps), np.int64)
    np.maximum.at(lasts, groups, read_numbers(updates["micro"]))
    return steps, lasts


def find_made(table: pa.Table) -> IntArray:
    """Steps of the updates that have ended one, of columns ``kind``, ``step`` and ``text``."""
    updates = filter_rows(table, find_kinds(table, UPDATES))
    steps, code_of = read_numbers(updates["step"]), dict[str, int]()
    codes = read_codes(updates["text"].dictionary_encode(null_encoding="encode"), code_of)
    ends = np.array([not str(text).endswith(ENDS_NONE) for text in code_of], np.bool_)
    return steps[ends[codes]]


def pick_losses(table: pa.Table, steps: Collection[int] | None = None) -> pa.Table:
    """Losses alone, of some steps or of all."""
    mask = find_kinds(table, ("loss",))
    return filter_rows(table, mask if steps is None else mask & np.isin(read_numbers(table["step"]), list(steps)))


def find_last_loss(table: pa.Table) -> int | None:
    """The last step that has a loss, of columns ``kind`` and ``step``."""
    steps = read_numbers(pick_losses(table)["step"])
    return int(steps.max()) if len(steps) else None


def find_kinds(table: pa.Table, kinds: Collection[str]) -> npt.NDArray[np.bool_]:
    """Which events are of some kinds."""
    code_of = {kind: code for code, kind in enumerate(kinds)}
    return np.less(read_codes(table["kind"], code_of), len(kinds))


def filter_rows(table: pa.Table, mask: npt.NDArray[np.bool_]) -> pa.Table:
    """The rows for which this is true."""
    return table if mask.all() else table.filter(to_numbers(mask))
