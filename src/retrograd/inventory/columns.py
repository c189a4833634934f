"""The columns of an inventory's table: one row for each tensor that a node keeps."""

from __future__ import annotations

import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("entry", pa.int64()),  # number of the row
        ("module", pa.string()),  # path of the innermost module in whose call it was saved; null outside of all
        ("call", pa.int32()),  # which call of that module in its forward: 1, 2, …
        ("node", pa.string()),  # kind of the node that keeps it
        ("number", pa.uint64()),  # that node's sequence number
        ("slot", pa.string()),  # torch's name for it; ctx.NAME for an attribute, checkpoint[N] for an argument
        ("held", pa.string()),  # saved, attribute, hooks, checkpoint or argument: see retrograd.inventory.facts.Held
        ("kind", pa.string()),  # parameter, parameter view, buffer, buffer view, cast, input, intermediate, unknown
        ("name", pa.string()),  # of that parameter or buffer; empty for anything else
        ("shape", pa.list_(pa.int64())),  # null for nested tensors, and for what was never there
        ("dtype", pa.string()),
        ("device", pa.string()),
        ("strides", pa.list_(pa.int64())),  # in elements
        ("offset", pa.int64()),  # in elements
        ("version", pa.int64()),  # how often its memory had been written to when the pass began
        ("asked", pa.int64()),  # bytes of its elements, as a copy would take them
        ("resident", pa.int64()),  # bytes of memory that are there because of this row, and of no row before it
        ("storages", pa.list_(pa.int64())),  # numbers of its pieces of memory
        ("storage_bytes", pa.list_(pa.int64())),  # bytes of each
        ("first_saver", pa.int64()),  # the first row with the same memory
        ("sharers", pa.int32()),  # how many other rows have the same memory
        ("packed", pa.int64()),  # position at which it was saved; null if it was never there
        ("packed_s", pa.float64()),  # seconds since the beginning
        ("unpacked", pa.list_(pa.int64())),  # positions at which its node ran
        ("unpacked_s", pa.list_(pa.float64())),
        ("released", pa.int64()),  # position after which it is held no more; null: until the graph is dropped
        ("file", pa.string()),  # source line of the forward
        ("line", pa.int32()),
        ("function", pa.string()),
        ("operation", pa.string()),  # torch's function that was called there
        ("maker", pa.string()),  # kind of the node that made it; null where no recorded operation has
        ("maker_number", pa.uint64()),
        ("sources", pa.list_(pa.uint64())),  # numbers of the nodes that made what the maker was given
        ("seconds", pa.float64()),  # how long the operation took that made it; null where that is not known
        ("remake", pa.string()),  # what would make it again; null where only running its module again would
        ("price", pa.string()),  # of that: free, cheap or dear
    ]
)

PERMANENT = ("parameter", "parameter view", "buffer", "buffer view")
"""Kinds whose memory is there anyway."""
