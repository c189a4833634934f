"""Streams of a device that only note what they are told, and say which accesses to memory nothing has put in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """Where kernels and copies are noted as they are made, at once, on whatever stream is current.

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
        self._note([written], read)

    def _note(self, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        stream = self.current
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        clock = dict(stream.clock)
        for tensors, is_write in ((written, True), (read, False)):
            for tensor in tensors:
                begin, storage = tensor.data_ptr(), tensor.untyped_storage()
                end = min(begin + tensor.nbytes, storage.data_ptr() + storage.nbytes())  # less where it is expanded
                self.accesses.append(Access(stream.name, clock, begin, end, is_write))

    def races(self) -> list[tuple[Access, Access]]:
        """Accesses of which nobody has said which comes first."""
        streams: dict[str, list[Access]] = {}
        for access in self.accesses:
            streams.setdefault(access.stream, []).append(access)
        pairs = (pair for two in combinations(streams.values(), 2) for pair in product(*two))
        return [(one, other) for one, other in pairs if one.races_with(other)]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = list(zip(func._schema.arguments, args, strict=False)), tree_leaves(result)
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if is_view or func.overloadpacket is torch.ops.aten.set_:
            return result  # no kernel
        written = [value for spec, value in given if spec.alias_info is not None and spec.alias_info.is_write]
        if not any(aliases):  # new memory: what lay there before was used on the stream that gets it again
            written += [value for value in made if isinstance(value, Tensor)]
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self._note(
            [each for each in written if isinstance(each, Tensor)],
            [each for each in read if not any(each is other for other in written)],
        )
        return result
