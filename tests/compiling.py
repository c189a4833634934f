"""How much torch.compile has compiled."""

from __future__ import annotations

from typing import Any

from torch._dynamo.utils import counters

KINDS = ("stats", "frames", "graph_break", "recompiles", "recompile_limit")


def count_compiled() -> dict[str, Any]:
    """How much was compiled, and how often: all but the number of operations, to which ours are added."""
    counted: dict[str, Any] = {kind: dict(counters[kind]) for kind in KINDS}
    counted["stats"].pop("calls_captured", None)
    return counted
