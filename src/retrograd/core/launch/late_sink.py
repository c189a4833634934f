"""A sink that makes no run folder before the process has trained.

Only then is the rank known, and many processes that use a model never train it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Protocol

from retrograd.core.errors import RunError
from retrograd.core.history.sink import ENDS_NONE, UPDATES, Event, KeptTensor, RowBatch, Sink
from retrograd.core.runs.queue import Unwritten

HELD = 64
"""Batches, events and tensors from before the first backward pass that are kept; of more, the last ones."""


class FolderSink(Sink, Protocol):
    """A sink that writes a folder, in which there may be files of another kind."""

    @property
    def sites(self) -> Sequence[str]:
        """The sites of which something was written."""

    @property
    def lost(self) -> Unwritten:
        """Data that were not written."""

    def add_file(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write such a file."""


class LateSink:
    """Holds back what it is told until a backward pass is among it, then opens the real sink and passes all on.

    A program that dies before one, but means to train, has a record of that.

    Args:
        open_sink: makes the real sink; called once a process. None where this process is not to be recorded.
        step_made: called for every step that has been trained.
        failed: called once if the real sink cannot be made; what is told is then lost.

    Attributes:
        means_to_train: a backward pass has begun.
    """

    def __init__(
        self,
        open_sink: Callable[[], FolderSink | None],
        step_made: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._open_sink = open_sink
        self._step_made = step_made
        self._failed = failed
        self._facts: dict[str, Any] = {}
        self._names: list[str] = []
        self.start_over()

    def start_over(self) -> None:
        """Forget what was recorded, but neither sites nor facts."""
        self._sink: FolderSink | None = None
        self._held: deque[Callable[[Sink], None]] = deque(maxlen=HELD)
        self._files: dict[str, Callable[[BinaryIO], None]] = {}
        self._is_lost = self.means_to_train = False
        self._lock = threading.RLock()
        self._last_step = self._last_update = -1
        self._passes = self._updates = 0

    def lose(self) -> None:
        """Pass on nothing more."""
        self.start_over()
        self._is_lost = True

    @property
    def steps(self) -> int:
        """How many steps have been made and recorded, as :attr:`retrograd.History.made_steps` has them."""
        return self._updates or self._passes

    @property
    def sites(self) -> int:
        """Number of sites of which something was written; of those that were named where nothing was."""
        return len(self._names if self._sink is None else self._sink.sites)

    @property
    def lost(self) -> str:
        """Data that were not written, in words; empty for none."""
        return str(self._sink.lost) if self._sink is not None and self._sink.lost else ""

    @property
    def is_open(self) -> bool:
        """True if this process writes a record."""
        return self._sink is not None

    def use(self, sink: FolderSink) -> None:
        """Write to this sink from now on, beginning with what is held."""
        self._sink = sink
        sink.describe(**self._facts)
        sink.add_sites(self._names)
        while self._held:
            self._held.popleft()(sink)
        for name, write in self._files.items():
            sink.add_file(name, write)
        self._files.clear()

    def describe(self, **facts: Any) -> None:
        self._facts.update(facts)
        if self._sink is not None:
            self._sink.describe(**facts)

    def add_sites(self, names: Sequence[str]) -> None:
        self._names.extend(names)
        if self._sink is not None:
            self._sink.add_sites(names)

    def add_rows(self, batch: RowBatch) -> None:
        self._pass_on(lambda sink: sink.add_rows(batch), batch.moment.step if batch.moment.phase == "train" else None)

    def add_event(self, event: Event) -> None:
        trained = event.kind in ("loss", *UPDATES)
        ends_step = event.kind in UPDATES and not event.text.endswith(ENDS_NONE)
        if ends_step and event.moment.step > self._last_update:
            self._last_update = event.moment.step
            self._updates += 1
        self._pass_on(lambda sink: sink.add_event(event), event.moment.step if trained else None)
        if event.kind == "error" and self.means_to_train and not self.is_open and not self._is_lost:
            self._open()

    def add_tensor(self, kept: KeptTensor) -> None:
        self._pass_on(lambda sink: sink.add_tensor(kept), None)

    def mean_to_train(self) -> None:
        """The program means to train: of its error there is to be a record, too, if it dies before it has."""
        self.means_to_train = True

    def add_file(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        """Write a file of another kind, as soon as there is a folder for it."""
        with self._lock:
            if self._sink is not None:
                self._sink.add_file(name, write)
            elif not self._is_lost:
                self._files[name] = write

    def flush(self) -> None:
        if self._sink is not None:
            self._sink.flush()

    def close(self, status: str = "finished") -> None:
        if self._sink is not None:
            self._sink.close(status)

    def _pass_on(self, tell: Callable[[Sink], None], trained_step: int | None) -> None:
        with self._lock:
            if trained_step is not None:
                self._count(trained_step)
            if self._sink is not None:
                tell(self._sink)
            elif not self._is_lost:
                self._held.append(tell)

    def _count(self, step: int) -> None:
        if self._sink is None and not self._is_lost:
            self._open()
        if step > self._last_step:
            self._last_step = step
            self._passes += 1
            self._step_made()

    def _open(self) -> None:
        try:
            sink = self._open_sink()
            if sink is None:
                self.lose()
            else:
                self.use(sink)
        except (RunError, OSError, ImportError, MemoryError) as error:  # training goes on without us
            self.lose()
            self._failed(error)
