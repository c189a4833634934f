"""From batches of bytes to columns of numbers.

A recorder hands over bytes, because that costs the training thread nothing. They are decoded later, many
batches at once, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.history.sink import PHASES, RowBatch
from retrograd.statistics.row import BINS, ROW, scale_rows

Columns = dict[str, npt.NDArray[Any]]
"""Columns of equal length, save ``bins``: the stretches of all rows, one after the other, ``bin_count`` each.

``phase`` is an index into :data:`retrograd.history.sink.PHASES`, ``site`` the number of a site's name.
"""

MOMENT_TYPES = {"step": np.int64, "micro": np.int32, "backward": np.int16, "phase": np.uint8}
ROW_TYPES = {name: ROW[name] for name in ROW.names or () if name not in ("row", "first_bin", "bins")}
FIXED_TYPES: dict[str, Any] = {
    **MOMENT_TYPES,
    "site": np.int32,
    "rank": np.int32,
    **ROW_TYPES,
    "scale": np.float64,
    "first_bin": np.int16,
    "bin_count": np.int32,
    "bins": np.int64,
}
"""Columns that are always there; one float64 column a user statistic may follow."""

_PHASE_CODES: dict[str, int] = {phase: code for code, phase in enumerate(PHASES)}


def decode_batches(batches: Sequence[RowBatch], gradients: npt.NDArray[np.bool_], rank: int = 0) -> Columns:
    """Columns of the rows of many batches, in order.

    A gradient's row gets the batch's backward pass, and the loss scale is divided out of it: exactly when the
    scale is a power of two, else to rounding, with the histogram moved by the nearest whole exponent. Any
    other row belongs to no pass and was not scaled.

    Args:
        batches: what was added.
        gradients: for each site, by number, whether it is a gradient.
        rank: the rank that all of it is from.
    """
    rows = np.frombuffer(b"".join(batch.rows for batch in batches), ROW)
    lengths = [len(batch.rows) // ROW.itemsize for batch in batches]
    is_gradient = gradients[rows["row"]]
    columns: Columns = _repeat_moments(batches, lengths)
    columns["backward"] = np.where(is_gradient, columns["backward"], np.int16(-1))
    columns["site"] = rows["row"]
    columns["rank"] = np.full(len(rows), rank, np.int32)
    for name in ROW_TYPES:
        columns[name] = rows[name]  # a view: copying what may never be read costs most of the decoding
    columns["scale"] = np.where(is_gradient, np.repeat([float(batch.scale) for batch in batches], lengths), 1.0)
    columns["first_bin"] = rows["first_bin"].astype(np.int16)
    columns["bin_count"] = rows["bins"]
    columns["bins"] = np.frombuffer(b"".join(batch.bins for batch in batches), np.int64)
    _divide_out_scale(columns)
    columns.update(_decode_custom(batches, lengths, columns["site"]))
    return columns


def encode_phase(phase: str) -> int:
    """The code of a phase.

    Raises:
        ValueError: for a word that is none.
    """
    if phase not in _PHASE_CODES:
        raise ValueError(f"phase is one of {', '.join(PHASES)} or None, not {phase!r}")
    return _PHASE_CODES[phase]


def concatenate_columns(parts: Sequence[Mapping[str, npt.NDArray[Any]]], name: str) -> npt.NDArray[Any]:
    """One column over several sets of columns; where a set lacks a user's statistic it is NaN."""
    pieces = [part[name] if name in part else np.full(len(part["step"]), np.nan) for part in parts]
    if not pieces:
        return np.empty(0, FIXED_TYPES.get(name, np.float64))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _repeat_moments(batches: Sequence[RowBatch], lengths: list[int]) -> Columns:
    moments = [batch.moment for batch in batches]
    values = {
        "step": [moment.step for moment in moments],
        "micro": [moment.micro for moment in moments],
        "backward": [moment.backward for moment in moments],
        "phase": [_PHASE_CODES[moment.phase] for moment in moments],
    }
    return {name: np.repeat(np.array(values[name], kind), lengths) for name, kind in MOMENT_TYPES.items()}


def _divide_out_scale(columns: Columns) -> None:
    scale = columns["scale"]
    if np.all(scale == 1.0):
        return
    scale_rows(columns, 1.0 / scale)
    shift = np.rint(np.log2(scale)).astype(np.int64)
    last = BINS - 1
    first_bin, bin_count = columns["first_bin"] - shift, columns["bin_count"].astype(np.int64)
    if np.all((first_bin >= 0) & (first_bin + bin_count <= BINS)):
        columns["first_bin"] = first_bin.astype(np.int16)
        return
    # Some bins leave the range, and are merged into the first or the last one.
    owner = np.repeat(np.arange(len(scale)), bin_count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(bin_count) - bin_count, bin_count)
    place = np.clip(first_bin[owner] + within, 0, last)
    starts = np.flatnonzero(np.diff(owner * BINS + place, prepend=-1))
    columns["bins"] = np.add.reduceat(columns["bins"], starts) if len(starts) else columns["bins"]
    columns["bin_count"] = np.bincount(owner[starts], minlength=len(scale)).astype(np.int32)
    columns["first_bin"] = np.clip(first_bin, 0, last).astype(np.int16)


def _decode_custom(batches: Sequence[RowBatch], lengths: list[int], sites: npt.NDArray[np.int32]) -> Columns:
    """Columns of users' statistics: the mean where a site's row has several values, NaN where it has none."""
    names = dict.fromkeys(name for batch in batches for name in batch.custom)
    if not names:
        return {}
    owners = np.repeat(np.arange(len(batches), dtype=np.int64), lengths)
    keys = owners << 32 | sites
    order = np.argsort(keys, kind="stable")
    return {name: _place_custom(batches, name, keys, order) for name in names}


def _place_custom(
    batches: Sequence[RowBatch], name: str, keys: npt.NDArray[np.int64], order: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    given = [(number, *batch.custom[name]) for number, batch in enumerate(batches) if name in batch.custom]
    wanted = np.concatenate([number << 32 | np.asarray(rows, np.int64) for number, rows, _ in given])
    values = np.concatenate([np.asarray(values, np.float64) for _, _, values in given])
    places = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(order) - 1)] if len(order) else order
    if len(places) != len(wanted) or np.any(keys[places] != wanted):
        raise ValueError(f"the statistic {name!r} has values for rows that are not in its batch")
    total, n = np.zeros(len(keys)), np.zeros(len(keys))
    np.add.at(total, places, values)
    np.add.at(n, places, 1.0)
    column: npt.NDArray[np.float64] = np.divide(total, n, out=np.full(len(keys), np.nan), where=n > 0)
    return column
