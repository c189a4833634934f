"""Hands kept tensors to the sink, at once or when their policy says so, and never holds more bytes than allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt
import torch

from retrograd.history.sink import Event, KeptTensor, Moment, Sink
from retrograd.recording.faults import say
from retrograd.recording.holder import Holder, count_bytes
from retrograd.recording.keep import Keep
from retrograd.sites.site import Site


class Source(Protocol):
    """What a kept tensor is of."""

    @property
    def site(self) -> Site:
        """Its site."""

    @property
    def name(self) -> str:
        """That site, printed."""

    @property
    def keep(self) -> Keep | None:
        """Why it was kept."""


Kept = tuple[Source, torch.Tensor, int]
"""A tensor, where it is from, and its version when it was kept."""


class TensorKeeper:
    """Sorts kept tensors by policy.

    Args:
        keeps: the policies.
        budget: bytes that may be held before they are handed over, all policies together; never passed.
        sink: where they go.

    Attributes:
        names: the sites that something was kept of.
    """

    def __init__(self, keeps: Sequence[Keep], budget: int, sink: Sink) -> None:
        self._sink = sink
        self._budget = budget
        self._held = 0
        self._holders = {
            id(keep): (keep, Holder(keep.last or 0)) for keep in keeps if keep.last is not None or keep.when is not None
        }
        self._dropped: Counter[str] = Counter()
        self.names: set[str] = set()

    @property
    def has_triggers(self) -> bool:
        """Whether the statistics of each micro-batch are looked at."""
        return any(keep.when is not None for keep, _ in self._holders.values())

    def admit(self, keep: Keep, tensor: torch.Tensor) -> bool:
        """Whether there is room for a tensor that was just seen; the oldest that wait make room for it."""
        size = count_bytes(tensor)
        while self._held + size > self._budget and self._make_room():
            pass
        if self._held + size > self._budget:
            self._drop(keep, 1)
            return False
        self._held += size
        return True

    def take(self, moment: Moment, kept: Sequence[Kept], scale: float) -> None:
        """Take over what one micro-batch kept."""
        waiting: dict[int, list[KeptTensor]] = {}
        forward = Moment(moment.step, moment.micro, -1, moment.phase)
        for source, tensor, version in kept:
            is_gradient = source.site.quantity == "grad"
            item = KeptTensor(
                moment if is_gradient else forward, source.name, tensor, version, scale if is_gradient else 1.0
            )
            self.names.add(source.name)
            if id(source.keep) in self._holders:
                waiting.setdefault(id(source.keep), []).append(item)
            else:
                self._hand_over([item])
        for key, items in waiting.items():
            self._held -= self._holders[key][1].add(moment.step, items)

    def pull_triggers(self, moment: Moment, names: Sequence[str], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Ask each trigger about rows of statistics, and hand over what its policy holds when it fires."""
        for keep, holder in self._holders.values():
            reason = keep.when(names, columns) if keep.when is not None else ""
            if reason:
                self._sink.add_event(Event(moment, "trigger", text=reason))
                self._hand_over(holder.release())

    def finish(self, moment: Moment) -> None:
        """The recording ends: hand over the last steps where that was asked, and tell what was dropped."""
        for keep, holder in self._holders.values():
            if keep.when is None:
                self._hand_over(holder.release())
        for pattern, number in self._dropped.items():
            text = f"{number:,} tensors of {pattern} did not fit into the budget of {self._budget:,} bytes"
            self._sink.add_event(Event(moment, "dropped", value=float(number), text=text))

    def _make_room(self) -> bool:
        """Let the oldest micro-batch that waits go; returns whether there was one."""
        waiting = [(holder.oldest, key) for key, (_, holder) in self._holders.items() if holder.oldest is not None]
        if not waiting:
            return False
        keep, holder = self._holders[min(waiting)[1]]
        size, number = holder.drop_oldest()
        self._held -= size
        self._drop(keep, number)
        return True

    def _drop(self, keep: Keep, number: int) -> None:
        if not self._dropped:
            say(f"The budget of {self._budget:,} bytes for kept tensors is spent; retrograd drops what does not fit.")
        self._dropped[", ".join(keep.selection.describe())] += number

    def _hand_over(self, items: Sequence[KeptTensor]) -> None:
        for item in items:
            self._held -= count_bytes(item.tensor)
            self._sink.add_tensor(item)
