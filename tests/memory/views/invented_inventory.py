"""Inventories made by hand, of which every number is known."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.inventory.timeline import SCHEMA

HOSTILE = '</script><script>document.title="gone"</script>&amp;'


def saved(entry: int, **values: Any) -> dict[str, Any]:
    """A row; four bytes a number, packed at its number and released as a backward pass does."""
    row = {
        "entry": entry,
        "module": "net",
        "call": 1,
        "node": "ReluBackward0",
        "number": entry,
        "slot": "result",
        "held": "saved",
        "kind": "intermediate",
        "name": "",
        "shape": [values.get("resident", 0) // 4],
        "dtype": "float32",
        "device": "cpu",
        "strides": [1],
        "offset": 0,
        "version": 0,
        "asked": values.get("resident", 0),
        "storages": [entry],
        "storage_bytes": [values.get("resident", 0)],
        "first_saver": entry,
        "sharers": 0,
        "packed": entry,
        "packed_s": 0.001 * values.get("packed", entry),
        "unpacked": [values["released"]],
        "unpacked_s": [0.001 * values["released"]],
        "file": "/home/me/model.py",
        "line": 10 + entry,
        "function": "forward",
        "operation": "relu",
        "maker": "ReluBackward0",
        "maker_number": entry,
        "sources": [],
        "seconds": None,
        "remake": "relu of its inputs",
        "price": "cheap",
    }
    return {**row, **values}


def invent_inventory() -> Inventory:
    """A stem, a block that keeps most, and a head which shares the block's memory; the peak is at position 2.

    ::

        position      0      1      2       3       4       5     the end
        bytes      1000   5000   7000    7000    5000    1000      0
    """
    rows = [
        saved(0, module="stem", node="ConvolutionBackward0", slot="input", kind="input", resident=1000, released=5,
              maker=None, remake=None, price=None),
        saved(1, module="blocks.0", resident=4000, released=4, sharers=1),
        saved(2, module="head", node="AddmmBackward0", slot="mat1", resident=0, asked=4000, released=3, storages=[1],
              storage_bytes=[4000], first_saver=1, sharers=1),
        saved(3, module="blocks.0", packed=2, slot="self", resident=2000, released=3, price="dear", unpacked_s=[0.003],
              remake="matrix product of both factors"),
        saved(4, module="head", node="AddmmBackward0", slot="mat2", kind="parameter view", name="head:weight",
              packed=2, resident=0, asked=800, released=3, remake=None, price=None),
    ]  # fmt: skip
    return make_inventory(rows, modules={"head": 0.002})


def invent_large(count: int) -> Inventory:
    """So many tensors in modules of ten, in three levels; no two of one size."""
    rows = [
        saved(
            entry,
            module=f"stages.{entry // 1000}.blocks.{entry // 10 % 100}.layer{entry % 10}",
            resident=4 * (1 + entry * 7919 % count),
            released=2 * count - 1 - entry,
            price=("cheap", "dear", None)[entry % 3],
        )
        for entry in range(count)
    ]
    return make_inventory(rows)


def make_inventory(rows: list[dict[str, Any]], **facts: Any) -> Inventory:
    return Inventory(pa.Table.from_pylist(rows, schema=SCHEMA), passes=1, **facts)
