"""Messages between ranks: a JSON head and plain bytes, checked as files of others are.

Each frame is eight bytes, the lengths of head and body, and then these. Nothing that is read here is ever run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from retrograd.core.foreign.text import check_kinds, parse_object
from retrograd.core.history.rows import encode_phase
from retrograd.core.history.sink import Moment, RowBatch, Unit
from retrograd.core.merging.holdings import Parcel
from retrograd.core.merging.rows import RankedRows
from retrograd.core.merging.sites import OWN, IntArray
from retrograd.core.statistics.row import BINS, ROW

_LENGTHS = struct.Struct("<II")
_LARGEST_HEAD = 1 << 26
_LARGEST_BODY = 1 << 29
_BODY_BYTES = 1 << 24
"""About as much is sent in one frame."""

_PARCEL = {"when": list[int], "units": int, "losses": list[list[Any]], "rows": list[dict[str, Any]]}
_ROWS = {
    "moment": list[Any],
    "scale": float,
    "rows": int,
    "bins": int,
    "custom": dict[str, list[Any]],
}

Message = tuple[dict[str, Any], memoryview]


def pack(kind: str, body: Sequence[bytes] = (), **head: Any) -> bytes:
    """Make a frame."""
    text = json.dumps({"kind": kind, **head}).encode()
    return b"".join([_LENGTHS.pack(len(text), sum(map(len, body))), text, *body])


class Frames:
    """Puts together frames of bytes as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, received: bytes) -> Iterator[Message]:
        """Take bytes; returns the messages that are complete.

        Raises:
            ValueError: these are none of our messages.
        """
        self._bytes += received
        while len(self._bytes) >= _LENGTHS.size:
            head, body = _LENGTHS.unpack_from(self._bytes)
            if head > _LARGEST_HEAD or body > _LARGEST_BODY:
                raise ValueError(f"a message of {head} and {body} bytes is too large")
            end = _LENGTHS.size + head + body
            if len(self._bytes) < end:
                return
            frame = bytes(self._bytes[:end])
            del self._bytes[:end]
            content = parse_object(frame[_LENGTHS.size : end - body])
            if not isinstance(content.get("kind"), str):
                raise ValueError("a message has no kind")  # noqa: TRY004  # what bad bytes raise
            yield content, memoryview(frame)[end - body :]


def pack_parcels(parcels: Iterable[Parcel], **head: Any) -> Iterator[bytes]:
    """Make frames of parcels, at least one; the head is in all, and ``is_end`` in the last."""
    listed: list[dict[str, Any]] = []
    body: list[bytes] = []
    size = 0
    for parcel in parcels:
        listed.append(_list_parcel(parcel))
        body.append(np.array([unit[:2] for unit in parcel.units], np.int32).tobytes())
        for rows in parcel.rows:
            body += [rows.batch.rows, rows.owners, rows.sources, rows.batch.bins]
        size += parcel.size
        if size > _BODY_BYTES:
            yield pack("rows", body, listed=listed, **head)
            listed, body, size = [], [], 0
    yield pack("rows", body, listed=listed, is_end=True, **head)


def _list_parcel(parcel: Parcel) -> dict[str, Any]:
    return {
        "when": parcel.when,
        "units": len(parcel.units),
        "losses": parcel.losses,
        "rows": [_list_rows(rows.batch) for rows in parcel.rows],
    }


def _list_rows(batch: RowBatch) -> dict[str, Any]:
    moment = batch.moment
    return {
        "moment": [moment.step, moment.micro, moment.backward, moment.phase],
        "scale": batch.scale,
        "rows": len(batch.rows) // ROW.itemsize,
        "bins": len(batch.bins) // 8,
        "custom": {name: [list(places), list(values)] for name, (places, values) in batch.custom.items()},
    }


def unpack_parcels(head: Mapping[str, Any], body: memoryview, codes: IntArray, processes: int) -> list[Parcel]:
    """Read parcels.

    Args:
        head: of the message.
        body: of the message.
        codes: by the sender's code of a site, the own one.
        processes: how many ranks there are.

    Raises:
        ValueError: it is not what :func:`pack_parcels` makes.
    """
    check_kinds({"listed": None, **head}, {"listed": list[dict[str, Any]]})
    pieces = _Pieces(body)
    found = []
    for each in head["listed"]:
        check_kinds({**dict.fromkeys(_PARCEL), **each}, _PARCEL)
        step, turn = each["when"]
        numbers = np.frombuffer(pieces.take(8 * each["units"]), np.int32).reshape(-1, 2)
        if not _lie_within(numbers[:, 0], 0, processes) or not _lie_within(numbers[:, 1], 0, 1 << 31):
            raise ValueError("there are no such units")
        units = tuple(Unit(rank, number, step, turn) for rank, number in numbers.tolist())
        rows = tuple(_take_rows(told, pieces, codes, processes) for told in each["rows"])
        losses = tuple((m.step, m.micro, m.backward, m.phase, n, total) for m, n, total in read_losses(each["losses"]))
        if {step} != {step, *(each.batch.moment.step for each in rows), *(loss[0] for loss in losses)}:
            raise ValueError("a parcel is of one step")
        found.append(Parcel((step, turn), units, rows, losses))
    return found


class _Pieces:
    """The body of a message, from its beginning on."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes.

        Raises:
            ValueError: there are not as many.
        """
        if size < 0 or self._at + size > len(self._body):
            raise ValueError("a message is too short")
        self._at += size
        return bytes(self._body[self._at - size : self._at])


def _take_rows(told: Mapping[str, Any], pieces: _Pieces, codes: IntArray, processes: int) -> RankedRows:
    check_kinds({**dict.fromkeys(_ROWS), **told}, _ROWS)
    n, n_bins = told["rows"], told["bins"]
    taken = [pieces.take(size) for size in (n * ROW.itemsize, 4 * n, 4 * n, 8 * n_bins)]
    return _check_rows(told, taken, codes, processes)


def _check_rows(told: Mapping[str, Any], pieces: Sequence[bytes], codes: IntArray, processes: int) -> RankedRows:
    rows, owners, sources, bins = pieces
    table = np.frombuffer(rows, ROW).copy()
    ranks = np.concatenate([np.frombuffer(owners, np.int32), np.frombuffer(sources, np.int32)])
    ends = table["first_bin"].astype(np.int64) + table["bins"]
    if not (
        _lie_within(table["row"], 0, len(codes))
        and _lie_within(ranks, OWN, processes)
        and _lie_within(table["first_bin"], 0, BINS)
        and _lie_within(table["bins"], 0, BINS + 1)
        and _lie_within(ends, 0, BINS + 1)
        and int(table["bins"].sum(dtype=np.int64)) * 8 == len(bins)
    ):
        raise ValueError("rows are not as they should be")
    table["row"] = codes[table["row"]]
    custom: dict[str, Any] = {name: _check_custom(found, len(table)) for name, found in told["custom"].items()}
    batch = RowBatch(_read_moment(told["moment"]), table.tobytes(), bins, float(told["scale"]), custom)
    return RankedRows(batch, owners, sources)


def _lie_within(numbers: Any, first: int, stop: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= first and numbers.max() < stop)


def _check_custom(columns: Any, size: int) -> tuple[list[int], list[float]]:
    check_kinds({"places": columns[0], "values": columns[-1]}, {"places": list[int], "values": list[float]})
    places, values = columns
    if len(places) != len(values) or not _lie_within(np.array(places, np.int64), 0, size):
        raise ValueError("a statistic has values for rows that are not there")
    return places, values


def _read_moment(told: Sequence[Any]) -> Moment:
    step, micro, backward, phase = told
    check_kinds({"step": step, "micro": micro, "backward": backward}, {"step": int, "micro": int, "backward": int})
    encode_phase(phase)
    return Moment(step, micro, backward, phase)


def read_losses(told: Any) -> list[tuple[Moment, int, float]]:
    """Read losses: of each moment how many, and their sum.

    Raises:
        ValueError: it is something else.
    """
    check_kinds({"losses": told}, {"losses": list[list[Any]]})
    found = []
    for *moment, n, total in told:
        check_kinds({"n": n, "total": total}, {"n": int, "total": float})
        found.append((_read_moment(moment), n, float(total)))
    return found
