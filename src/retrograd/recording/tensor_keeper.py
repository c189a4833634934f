"""Hands kept tensors to the sink, at once or when their policy says so, and never holds more bytes than allowed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy.typing as npt
import torch

from retrograd.history.sink import Event, KeptTensor, Moment, Sink
from retrograd.notices import warn
from retrograd.recording.keep import Keep
from retrograd.sites.site import Site


class KeptSource:
    """The site that a kept tensor is of, and the policy that keeps it.

    Attributes:
        site: its site.
        name: the same, printed.
        row: the row of the site's statistics, or ``NO_ROW``.
        keep: the policy that keeps its tensors, or None.
    """

    __slots__ = ("keep", "name", "row", "site")

    def __init__(self, site: Site, row: int, keep: Keep | None) -> None:
        self.site = site
        self.name = str(site)
        self.row = row
        self.keep = keep


Kept = tuple[KeptSource, torch.Tensor, int, int]
"""A tensor as it was just kept: where it is from, itself, its version, and its bytes."""


def count_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one, of what it stores."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return count_bytes(tensor._values()) + count_bytes(tensor._indices())
    return tensor.values().nbytes


@dataclass(slots=True)
class Bundle:
    """Holds what one policy kept of one micro-batch, as it came: most is let go again, so nothing is made of it yet.

    Attributes:
        moment: that micro-batch, at its last pass.
        scale: what its gradients were multiplied by.
        kept: the tensors.
        size: their bytes.
    """

    moment: Moment
    scale: float
    kept: list[Kept]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(item[3] for item in self.kept)

    def unpack(self) -> Iterator[KeptTensor]:
        """The tensors as a sink takes them."""
        forward = replace(self.moment, backward=-1)
        for source, tensor, version, _ in self.kept:
            if source.site.quantity == "grad":
                yield KeptTensor(self.moment, source.name, tensor, version, self.scale)
            else:
                yield KeptTensor(forward, source.name, tensor, version)


class Holder:
    """Holds tensors of the last steps.

    Args:
        depth: how many steps before the newest one.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._held: deque[Bundle] = deque()

    @property
    def oldest(self) -> int | None:
        """The oldest step of which something is held."""
        return self._held[0].moment.step if self._held else None

    def add(self, bundle: Bundle) -> int:
        """Hold a bundle; returns the bytes of what has become too old for it."""
        self._held.append(bundle)
        freed = 0
        while self._held[0].moment.step < bundle.moment.step - self._depth:
            freed += self._held.popleft().size
        return freed

    def drop_oldest(self) -> Bundle:
        """Let the oldest micro-batch go."""
        return self._held.popleft()

    def release(self) -> list[Bundle]:
        """All that is held, oldest first; it is held no longer."""
        released = list(self._held)
        self._held.clear()
        return released


_SOURCE = itemgetter(0)


class TensorKeeper:
    """Sorts kept tensors by policy.

    Args:
        keeps: the policies.
        budget: bytes that may be held before they are handed over, all policies together; never passed.
        sink: where they go.

    Attributes:
        has_triggers: the statistics of each micro-batch are looked at.
    """

    def __init__(self, keeps: Sequence[Keep], budget: int, sink: Sink) -> None:
        self._sink = sink
        self._keeps = tuple(keeps)
        self._budget = budget
        self._held = 0
        self._holders = {
            id(keep): (keep, Holder(keep.last or 0)) for keep in keeps if keep.last is not None or keep.when is not None
        }
        self.has_triggers = any(keep.when is not None for keep in keeps)
        self._dropped: Counter[str] = Counter()
        self._sources: set[KeptSource] = set()

    @property
    def names(self) -> set[str]:
        """The sites that something was kept of."""
        return {source.name for source in self._sources}

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
