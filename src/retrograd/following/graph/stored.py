"""Graphs as Parquet files, one row a node. Loaded when a graph is saved or read: a walk needs neither."""

from __future__ import annotations

import graphlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from retrograd.core.errors import GraphError
from retrograd.core.files import make_all_storable, write_file
from retrograd.core.foreign.tables import read_table
from retrograd.core.foreign.text import check_fields, fits, parse_json
from retrograd.following.graph.columns import Columns
from retrograd.following.graph.node import Edge, Line, Node, SavedValue, TensorInfo

_SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("number", pa.uint64()),
        ("incoming", pa.list_(pa.string())),
        ("edges", pa.list_(pa.struct([("node", pa.int64()), ("slot", pa.int32())]))),
        ("outgoing", pa.list_(pa.string())),
        (
            "saved",
            pa.list_(
                pa.struct(
                    [("name", pa.string()), ("tensor", pa.string()), ("value", pa.string()), ("version", pa.int64())]
                )
            ),
        ),
        ("module", pa.string()),
        ("call", pa.int32()),
        ("file", pa.string()),
        ("line", pa.int32()),
        ("function", pa.string()),
        ("operation", pa.string()),
        ("parameter", pa.string()),
    ]
)


def write_graph(path: str | os.PathLike[str], columns: Columns, roots: Sequence[Edge]) -> Path:
    """Write a graph; returns the path."""
    stored = {name: make_all_storable(values) for name, values in columns.stored().items()}
    written = json.dumps([[edge.node, edge.slot] for edge in roots])
    table = pa.table(stored, schema=_SCHEMA.with_metadata({"retrograd.roots": written}))
    with write_file(path) as file:
        pq.write_table(table, file, compression="zstd")
    return Path(path)


def read_graph(path: str | os.PathLike[str]) -> tuple[Columns, list[Edge]]:
    """Read the nodes and the roots of a graph that was saved.

    Raises:
        GraphError: the file is none, or is damaged.
    """
    try:
        table = read_table(path)
        roots = [Edge(node, slot) for node, slot in parse_json(table.schema.metadata[b"retrograd.roots"])]
        columns = Columns()
        for batch in table.select(_SCHEMA.names).cast(_SCHEMA).to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                columns.add(_read_row(len(columns.names), row))
        _check_edges(roots, columns.edges)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(
            f"{str(path)!r} holds no graph that can be read: {error}",
            repair="give a file that Graph.save() has written.",
        ) from error
    return columns, roots


def _read_row(index: int, row: dict[str, Any]) -> Node:
    line = Line(row["file"], row["line"], row["function"], row["operation"]) if row["file"] is not None else None
    saved = [SavedValue(each["name"], _parse(each["tensor"]), each["value"], each["version"]) for each in row["saved"]]
    node = Node(
        index=index,
        name=row["name"],
        number=row["number"],
        incoming=tuple(map(_parse, row["incoming"])),
        edges=tuple(edge and Edge(edge["node"], edge["slot"]) for edge in row["edges"]),
        saved=tuple(saved),
        module=row["module"],
        call=row["call"],
        line=line,
        parameter=row["parameter"],
    )
    for each in (node, *saved, *([] if line is None else [line])):
        check_fields(each)
    return node


def _check_edges(roots: Sequence[Edge], edges: Sequence[Sequence[Edge | None]]) -> None:
    """Check that edges lead to nodes that are there, and not round in a circle.

    Raises:
        ValueError: one does not.
    """
    for edge in (*roots, *(each for leaving in edges for each in leaving if each is not None)):
        if not isinstance(edge.node, int) or not 0 <= edge.node < len(edges) or not fits(edge.slot, int):
            raise ValueError(f"there is no node {edge.node!r}")
    before = {node: {each.node for each in leaving if each is not None} for node, leaving in enumerate(edges)}
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        raise ValueError("its edges lead round in a circle") from error


def _parse(text: str | None) -> TensorInfo | None:
    return None if text is None else TensorInfo.parse(text)
