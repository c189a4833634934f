"""What the Trace Event Format, and what Perfetto makes of it, ask of a file; read without us.

Perfetto turns microseconds into whole nanoseconds by ``int(1000 * ts)`` and drops slices of a thread that overlap
without nesting. An arrow's end binds to the innermost slice open at its time.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN = {"X", "M", "s", "f", "C"}


@dataclass
class Slice:
    """A slice as Perfetto has it, in nanoseconds."""

    event: dict[str, Any]
    begin: int
    end: int
    parent: Slice | None

    @property
    def name(self) -> str:
        return str(self.event["name"])

    @property
    def path(self) -> list[str]:
        return [*(self.parent.path if self.parent else []), self.name]


@dataclass
class Content:
    """What a viewer shows.

    Attributes:
        slices: all of them.
        arrows: from and to which slice.
        counters: name → values in the order of time.
        names: what processes and threads are called.
    """

    slices: list[Slice] = field(default_factory=list)
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)
    counters: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    names: dict[tuple[str, int, int], str] = field(default_factory=dict)


def _refuse(text: str) -> Any:
    raise AssertionError(f"{text} is not JSON")


def read_checked(path: Path) -> Content:
    """Read a Chrome trace, and check all that a viewer relies on."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(data, parse_constant=_refuse)
    assert document["displayTimeUnit"] in ("ms", "ns")
    content = Content()
    last = -1.0
    open_slices: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    starts: dict[tuple[str, int], Slice] = {}
    finished = set()
    for event in document["traceEvents"]:
        assert event["ph"] in KNOWN
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert 0 <= event["tid"] < 2**31
        if event["ph"] == "M":
            if event["name"].endswith("_name"):
                content.names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ts"] >= 0
        assert event["ts"] >= last, "events are in the order of time"
        last = event["ts"]
        begin = int(event["ts"] * 1000)
        assert ("process_name", event["pid"], 0) in content.names
        stack = open_slices[event["pid"], event["tid"]]
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
            content.counters[event["name"]] += event["args"].values()
            continue
        assert ("thread_name", event["pid"], event["tid"]) in content.names
        while stack and stack[-1].end <= begin:
            stack.pop()
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"]
            end = begin + int(event["dur"] * 1000)
            made = Slice(event, begin, end, stack[-1] if stack else None)
            assert made.parent is None or end <= made.parent.end, f"{made.path} overlaps"
            content.slices.append(made)
            stack.append(made)
        else:
            key = (event["cat"], event["id"])
            assert stack, "an arrow lies in a slice"
            if event["ph"] == "s":
                assert key not in starts, "one start for each arrow"
                starts[key] = stack[-1]
            else:
                assert event["bp"] == "e"
                assert key in starts, "an arrow ends after its start"
                assert key not in finished, "one end for each arrow"
                finished.add(key)
                content.arrows.append((starts[key], stack[-1]))
    assert finished == starts.keys()
    return content
