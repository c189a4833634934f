"""Streams of a device that only note what they are told, and say which accesses to memory nothing has put in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]
"""How much of each stream comes before."""


class Event:
    """Remembers what came before it."""

    def __init__(self) -> None:
        self.clock: Clock = {}


@dataclass(eq=False)
class Stream:
    """A stream, by name."""

    name: str
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        event = Event()
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        for name, count in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass(frozen=True)
class Access:
    """A stream reads or writes bytes."""

    stream: str
    clock: Clock
    begin: int
    end: int
    is_write: bool

    def is_before(self, other: Access) -> bool:
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]

    def races_with(self, other: Access) -> bool:
        overlaps = self.begin < other.end and other.begin < self.end
        is_ordered = self.is_before(other) or other.is_before(self)
        return overlaps and (self.is_write or other.is_write) and not is_ordered


class Device(TorchDispatchMode):
    """Where copies are noted as they are made, at once, on whatever stream is current.

    Attributes:
        current: the stream on which things are computed.
        accesses: all that were noted.
        lent: memory of which the allocator was told that another stream uses it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = Stream("computing")
        self.accesses: list[Access] = []
        self.lent: list[tuple[int, str]] = []
        self._made = 0
        monkeypatch.setattr(torch.cuda, "Stream", self._make_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        lend = self.lent
        monkeypatch.setattr(
            Tensor, "record_stream", lambda tensor, stream: lend.append((tensor.data_ptr(), stream.name)), raising=False
        )

    def _make_stream(self, device: Any = None) -> Stream:
        self._made += 1
        return Stream(f"copies {self._made}")

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def use(self, written: Tensor, *read: Tensor) -> None:
        """A kernel on the current stream."""
        stream = self.current
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        for tensor in (written, *read):
            begin = tensor.data_ptr()
            end = begin + tensor.nbytes
            self.accesses.append(Access(stream.name, dict(stream.clock), begin, end, tensor is written))

    def races(self) -> list[tuple[Access, Access]]:
        """Accesses of which nobody has said which comes first."""
        return [pair for pair in combinations(self.accesses, 2) if pair[0].races_with(pair[1])]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.use(args[0], args[1])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.use(result)  # what lay there before was written on the stream that gets it again
        return result
