"""Hands kept tensors to the sink: at once, or when their policy says so."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from retrograd.history.sink import Event, KeptTensor, Moment, Sink
from retrograd.recording.keep import Holder, Keep
from retrograd.recording.stream import Stream
from retrograd.statistics.row import ROW

Kept = tuple[Stream, torch.Tensor, int]


class TensorKeeper:
    """Sorts what the lanes kept by policy.

    Args:
        keeps: the policies.
        budget: bytes that may be held in memory before they are handed over, all policies together.
        sink: where they go.
    """

    def __init__(self, keeps: Sequence[Keep], budget: int, sink: Sink) -> None:
        self._sink = sink
        waiting = [keep for keep in keeps if keep.last is not None or keep.when is not None]
        self._holders = {id(keep): Holder(keep, budget // len(waiting)) for keep in waiting}

    @property
    def has_triggers(self) -> bool:
        """Whether the statistics of each micro-batch are looked at."""
        return any(holder.keep.when is not None for holder in self._holders.values())

    def take(self, moment: Moment, kept: list[Kept], scale: float) -> None:
        """Take over what one micro-batch kept."""
        waiting: dict[int, list[KeptTensor]] = {}
        forward = Moment(moment.step, moment.micro, -1, moment.phase)
        for stream, tensor, version in kept:
            is_gradient = stream.site.quantity == "grad"
            item = KeptTensor(
                moment if is_gradient else forward, stream.name, tensor, version, scale if is_gradient else 1.0
            )
            if id(stream.keep) in self._holders:
                waiting.setdefault(id(stream.keep), []).append(item)
            else:
                self._sink.add_tensor(item)
        for key, items in waiting.items():
            self._holders[key].add(moment.step, items)

    def pull_triggers(self, moment: Moment, names: Sequence[str], rows: bytes) -> None:
        """Ask each trigger, and hand over what its policy holds when it fires."""
        table = np.frombuffer(rows, dtype=ROW)
        columns = {name: table[name] for name in ROW.names or ()}
        sites = [names[row] for row in table["row"]]
        for holder in self._holders.values():
            if holder.keep.when is None:
                continue
            reason = holder.keep.when(sites, columns)
            if reason:
                self._sink.add_event(Event(moment, "trigger", text=reason))
                self._hand_over(holder)

    def finish(self, moment: Moment) -> None:
        """The recording ends: hand over the last steps where that was asked, and tell what was dropped."""
        for holder in self._holders.values():
            if holder.keep.when is None:
                self._hand_over(holder)
            if holder.dropped:
                text = f"{holder.dropped} tensors of {holder.keep.selection.describe()} did not fit into the byte budget"
                self._sink.add_event(Event(moment, "dropped", value=float(holder.dropped), text=text))

    def _hand_over(self, holder: Holder) -> None:
        for item in holder.release():
            self._sink.add_tensor(item)
