"""Hands kept tensors to the sink, at once or when their policy says so, and never holds more bytes than allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy.typing as npt
import torch

from retrograd.history.sink import Event, Moment, Sink
from retrograd.notices import warn
from retrograd.recording.holder import Bundle, Holder, Kept, Source, count_bytes
from retrograd.recording.keep import Keep

_SOURCE = itemgetter(0)


class TensorKeeper:
    """Sorts kept tensors by policy.

    Args:
        keeps: the policies.
        budget: bytes that may be held before they are handed over, all policies together; never passed.
        sink: where they go.
    """

    def __init__(self, keeps: Sequence[Keep], budget: int, sink: Sink) -> None:
        self._sink = sink
        self._keeps = tuple(keeps)
        self._budget = budget
        self._held = 0
        self._holders = {
            id(keep): (keep, Holder(keep.last or 0)) for keep in keeps if keep.last is not None or keep.when is not None
        }
        self._dropped: Counter[str] = Counter()
        self._sources: set[Source] = set()

    @property
    def names(self) -> set[str]:
        """The sites that something was kept of."""
        return {source.name for source in self._sources}

    @property
    def has_triggers(self) -> bool:
        """Whether the statistics of each micro-batch are looked at."""
        return any(keep.when is not None for keep, _ in self._holders.values())

    def admit(self, keep: Keep, tensor: torch.Tensor) -> int | None:
        """The bytes of a tensor that was just seen; None when there is no room for it.

        The oldest that wait make room for it.
        """
        size = count_bytes(tensor)
        while self._held + size > self._budget:
            if not self._make_room():
                self._drop(keep, 1)
                return None
        self._held += size
        return size

    def take(self, moment: Moment, kept: Sequence[Kept], scale: float) -> None:
        """Take over what one micro-batch kept."""
        self._sources.update(map(_SOURCE, kept))
        for keep, items in self._by_policy(kept):
            bundle = Bundle(moment, scale, items)
            waiting = self._holders.get(id(keep))
            if waiting is None:
                self._hand_over(bundle)
            else:
                self._held -= waiting[1].add(bundle)

    def pull_triggers(self, moment: Moment, names: Sequence[str], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Ask each trigger about rows of statistics, and hand over what its policy holds when it fires."""
        for keep, holder in self._holders.values():
            reason = keep.when(names, columns) if keep.when is not None else ""
            if reason:
                self._sink.add_event(Event(moment, "trigger", text=reason))
                self._hand_over(*holder.release())

    def finish(self, moment: Moment) -> None:
        """The recording ends: hand over the last steps where that was asked, and tell what was dropped."""
        for keep, holder in self._holders.values():
            held = holder.release()  # what no trigger has asked for is let go
            if keep.when is None:
                self._hand_over(*held)
        for pattern, number in self._dropped.items():
            text = f"{number:,} tensors of {pattern} did not fit into the budget of {self._budget:,} bytes"
            self._sink.add_event(Event(moment, "dropped", value=float(number), text=text))

    def _by_policy(self, kept: Sequence[Kept]) -> Iterable[tuple[Keep | None, list[Kept]]]:
        if kept and len(self._keeps) == 1:
            return [(self._keeps[0], list(kept))]
        return [(keep, items) for keep in self._keeps if (items := [item for item in kept if item[0].keep is keep])]

    def _make_room(self) -> bool:
        """Let the oldest micro-batch that waits go; returns whether there was one."""
        waiting = [(holder.oldest, key) for key, (_, holder) in self._holders.items() if holder.oldest is not None]
        if not waiting:
            return False
        keep, holder = self._holders[min(waiting)[1]]
        gone = holder.drop_oldest()
        self._held -= gone.size
        self._drop(keep, len(gone.kept))
        return True

    def _drop(self, keep: Keep, number: int) -> None:
        if not self._dropped:
            warn(f"The budget of {self._budget:,} bytes for kept tensors is spent; retrograd drops what does not fit.")
        self._dropped[", ".join(keep.selection.describe())] += number

    def _hand_over(self, *bundles: Bundle) -> None:
        for bundle in bundles:
            self._held -= bundle.size
            for item in bundle.unpack():
                self._sink.add_tensor(item)
