"""Reads the file of an offline run of W&B: records of a LevelDB log, each a message of theirs."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK = 7, 1 << 15


def read_records(folder: Path) -> list[Any]:
    """All records of the only run below a folder; their service writes the last ones after the run has ended."""
    (file,) = folder.rglob("*.wandb")
    while True:
        records = [Record.FromString(each) for each in split(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.05)


def split(data: bytes) -> Iterator[bytes]:
    at, held = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + HEADER + length > len(data):
            return
        held += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or the last part of one
            yield held
            held = b""


def read_series(records: list[Any]) -> dict[str, dict[int, Any]]:
    """What was logged under each name, by our steps."""
    found: dict[str, dict[int, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            line = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            for name, value in line.items():
                found.setdefault(name, {})[line["step"]] = value
    return found
