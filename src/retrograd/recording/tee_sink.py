"""A sink, and others beside it that hear the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retrograd.history.sink import Event, KeptTensor, RowBatch, Sink
from retrograd.notices import warn


class TeeSink:
    """Passes all on to a sink, and then, but for tensors, to those that listen. What these raise ends nothing.

    Args:
        sink: keeps the record.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._listeners: tuple[Sink, ...] = ()
        self._names: list[str] = []

    def add_listener(self, listener: Sink) -> None:
        """Have a sink hear what comes from now on, after the names of all sites so far."""
        listener.add_sites(self._names)
        self._listeners += (listener,)

    def describe(self, **facts: Any) -> None:
        self._sink.describe(**facts)
        self._tell(lambda listener: listener.describe(**facts))

    def add_sites(self, names: Sequence[str]) -> None:
        self._names.extend(names)
        self._sink.add_sites(names)
        self._tell(lambda listener: listener.add_sites(names))

    def add_rows(self, batch: RowBatch) -> None:
        self._sink.add_rows(batch)
        self._tell(lambda listener: listener.add_rows(batch))

    def add_event(self, event: Event) -> None:
        self._sink.add_event(event)
        self._tell(lambda listener: listener.add_event(event))

    def add_tensor(self, kept: KeptTensor) -> None:
        self._sink.add_tensor(kept)

    def flush(self) -> None:
        self._sink.flush()

    def close(self, status: str = "finished") -> None:
        self._sink.close(status)
        self._tell(lambda listener: listener.close(status))

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        for listener in self._listeners:
            try:
                tell(listener)
            except Exception as error:
                self._listeners = tuple(each for each in self._listeners if each is not listener)
                warn(f"{type(listener).__name__} hears no more of the recording, which goes on: {error!r}.")
