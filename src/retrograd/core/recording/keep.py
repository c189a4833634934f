"""Keeps tensors whole or in part: which, when they are handed to the sink, and how many bytes of them are held.

A trigger is any callable ``(names, rows) -> str``: ``names`` are the printed sites of the rows of a micro-batch and
``rows`` their columns (see :mod:`retrograd.core.statistics.row`). It returns why it fires, or an empty text.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrograd.core.amounts import count_of, parse_bytes
from retrograd.core.errors import TensorPolicyError
from retrograd.core.history.kept import count_bytes
from retrograd.core.history.sink import Event, KeptTensor, Moment, Sink
from retrograd.core.notices import warn
from retrograd.core.sites.pattern import Candidate, Pattern
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import Site, parse_site
from retrograd.core.statistics.row import STATISTICS, derive

Rows = Mapping[str, npt.NDArray[Any]]
Trigger = Callable[[Sequence[str], Rows], str]


class _Chosen:
    """Remembers which names a selection wants."""

    def __init__(self, sites: str) -> None:
        self._selection = Selection(sites)
        self._known: dict[str, bool] = {}

    def among(self, names: Sequence[str]) -> npt.NDArray[np.bool_]:
        for name in names:
            if name not in self._known:
                self._known[name] = self._selection.wants(Candidate(parse_site(name)))
        return np.fromiter((self._known[name] for name in names), dtype=bool, count=len(names))


def on_nonfinite(sites: str = "*") -> Trigger:
    """Fires when a NaN or an infinity is seen at one of these sites."""
    chosen = _Chosen(sites)

    def trigger(names: Sequence[str], rows: Rows) -> str:
        found = np.flatnonzero((derive(rows, "nonfinite") > 0) & chosen.among(names))
        return f"{names[found[0]]} is not finite" if len(found) else ""

    return trigger


def on_jump(factor: float = 10.0, sites: str = "*:output.grad", statistic: str = "rms", memory: float = 0.9) -> Trigger:
    """Fires when a statistic exceeds ``factor`` times its own running mean (exponential, ``memory`` a step).

    Values that are not finite neither fire nor enter the mean.

    Raises:
        TensorPolicyError: unless ``factor`` exceeds 1, ``memory`` lies in (0, 1) and the statistic exists.
    """
    if factor <= 1 or not 0 < memory < 1 or statistic not in STATISTICS:
        raise TensorPolicyError(
            f"on_jump(factor={factor!r}, statistic={statistic!r}, memory={memory!r}) has invalid arguments.",
            repair=f"take factor > 1, 0 < memory < 1 and a statistic of {', '.join(STATISTICS)}.",
        )
    chosen = _Chosen(sites)
    means: dict[str, float] = {}

    def trigger(names: Sequence[str], rows: Rows) -> str:
        reason = ""
        values = np.asarray(derive(rows, statistic), dtype=float)
        for index in np.flatnonzero(chosen.among(names) & np.isfinite(values)).tolist():
            name, value = names[index], float(values[index])
            mean = means.get(name)
            if mean is not None and value > factor * mean > 0 and not reason:
                reason = f"{statistic} of {name} jumped to {value:.3g} from {mean:.3g}"
            means[name] = value if mean is None else memory * mean + (1 - memory) * value
        return reason

    return trigger


Part = Callable[[torch.Tensor], torch.Tensor]

DEFAULT_BUDGET = 2 * 1024**3
"""Bytes of kept tensors, held or written, that a recording never passes unless told otherwise: 2 GiB."""


@dataclass(frozen=True)
class Keep:
    """Keep tensors of some sites.

    Attributes:
        sites: a pattern or several, as in ``sites=`` of :func:`retrograd.record`; values and gradients alike.
        part: what to keep of each tensor: a function tensor → tensor, or an index such as ``(slice(0, 2), ..., 0)``;
            None keeps it whole. A part is copied.
        last: hold the last so many recorded steps in memory and hand them over at the end, or when ``when`` fires.
        when: hand over only when this trigger fires; then with the ``last`` steps before it.
        copy: copy each tensor when it is seen. Otherwise a reference is kept, which costs nothing, and a tensor that
            is later overwritten in place is reported as overwritten instead of stored.

    Raises:
        TensorPolicyError: when ``last`` is not a whole number from 0 on.
    """

    sites: Pattern | Iterable[Pattern]
    part: Part | Any = None
    last: int | None = None
    when: Trigger | None = None
    copy: bool = False
    selection: Selection = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.last is not None and (isinstance(self.last, bool) or not isinstance(self.last, int) or self.last < 0):
            raise TensorPolicyError(
                f"last={self.last!r} is not a number of steps.", repair="give a whole number from 0 on, as in last=20."
            )
        object.__setattr__(self, "selection", Selection(self.sites))

    @property
    def copies(self) -> bool:
        """True if tensors are copied when they are seen; a part always is, lest it hold the whole."""
        return self.copy or self.part is not None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of what is kept of a tensor."""
        with torch.inference_mode(False), torch.no_grad():
            kept = tensor.detach()
            if self.part is not None:
                kept = self.part(kept) if callable(self.part) else kept[self.part]
            return kept.clone()


def as_keeps(given: Keep | Pattern | Iterable[Keep | Pattern] | None) -> list[Keep]:
    """Policies from what a user wrote: patterns alone keep whole tensors at every recorded step."""
    if given is None:
        return []
    if isinstance(given, (str, re.Pattern, type, Keep)) or callable(given):
        given = [given]
    return [item if isinstance(item, Keep) else Keep(item) for item in given]


def find_keep(keeps: Sequence[Keep], candidate: Candidate) -> Keep | None:
    """The first policy that wants this site."""
    return next((keep for keep in keeps if keep.selection.wants(candidate)), None)


def read_limit(given: int | str) -> int:
    """A number of bytes from 1_000_000 or "500MB" (powers of 1000) or "2GiB" (powers of 1024).

    Raises:
        TensorPolicyError: for anything else.
    """
    is_number = isinstance(given, int) and not isinstance(given, bool) and given >= 0
    found = given if is_number else parse_bytes(given) if isinstance(given, str) else None
    if found is None:
        raise TensorPolicyError(
            f"{given!r} is not a valid number of bytes.", repair="write 500_000_000, '500MB' or '2GiB'."
        )
    return int(found)


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


_SOURCE, _SIZE = itemgetter(0), itemgetter(3)


@dataclass(slots=True)
class KeptBatch:
    """Holds what one policy kept of one micro-batch, as it came: most is let go again, so nothing is made of it yet.

    Attributes:
        moment: that micro-batch, at its last pass.
        scale: what its gradients were multiplied by.
        kept: the tensors.
        ready: as :class:`KeptTensor` has it.
        size: their bytes.
    """

    moment: Moment
    scale: float
    kept: list[Kept]
    ready: Sequence[Any] = ()
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(map(_SIZE, self.kept))

    def unpack(self) -> Iterator[KeptTensor]:
        """The tensors as a sink takes them."""
        forward = replace(self.moment, backward=-1)
        for source, tensor, version, _ in self.kept:
            if source.site.quantity == "grad":
                yield KeptTensor(self.moment, source.name, tensor, version, self.scale, ready=self.ready)
            else:
                yield KeptTensor(forward, source.name, tensor, version, ready=self.ready)


class Holder:
    """Holds tensors of the last steps.

    Args:
        depth: how many steps before the newest one.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._held: deque[KeptBatch] = deque()

    @property
    def oldest(self) -> int | None:
        """The oldest step of which something is held."""
        return self._held[0].moment.step if self._held else None

    def add(self, batch: KeptBatch) -> int:
        """Hold a batch; returns the bytes of what has become too old for it."""
        self._held.append(batch)
        freed = 0
        while self._held[0].moment.step < batch.moment.step - self._depth:
            freed += self._held.popleft().size
        return freed

    def drop_oldest(self) -> KeptBatch:
        """Let the oldest micro-batch go."""
        return self._held.popleft()

    def release(self) -> list[KeptBatch]:
        """All that is held, oldest first; it is held no longer."""
        released = list(self._held)
        self._held.clear()
        return released


def sources_of(kept: Sequence[Kept]) -> set[KeptSource]:
    """The sites that these tensors are of."""
    return set(map(_SOURCE, kept))


class TensorKeeper:
    """Sorts kept tensors by policy.

    Args:
        keeps: the policies.
        budget: bytes that may be held before they are handed over, all policies together; never passed.
        sink: where they go.

    Attributes:
        has_triggers: the statistics of each micro-batch are looked at.
        budget: the same.
        held: bytes that are held.
    """

    def __init__(self, keeps: Sequence[Keep], budget: int, sink: Sink) -> None:
        self._sink = sink
        self._keeps = tuple(keeps)
        self.budget = budget
        self.held = 0
        self._holders = {
            id(keep): (keep, Holder(keep.last or 0)) for keep in keeps if keep.last is not None or keep.when is not None
        }
        self.has_triggers = any(keep.when is not None for keep in keeps)
        self._dropped: Counter[str] = Counter()
        self._sources: set[KeptSource] = set()
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def names(self) -> set[str]:
        """The sites that something was kept of."""
        return {source.name for source in self._sources}

    def admit(self, keep: Keep, tensor: torch.Tensor) -> int | None:
        """Count a tensor that was just seen; returns its bytes, or None when there is no room for it.

        The oldest held tensors make room for it. On a CUDA device it is computed by the stream of now.
        """
        size = tensor.nbytes if tensor.layout is torch.strided else count_bytes(tensor)
        while self.held + size > self.budget:
            if not self._make_room():
                self._drop(keep, 1)
                return None
        self.held += size
        if tensor.is_cuda:
            self._streams.add(torch.cuda.current_stream(tensor.device))
        return size

    def take(self, moment: Moment, kept: Sequence[Kept], scale: float) -> None:
        """Take over what one micro-batch kept."""
        self._sources |= sources_of(kept)
        ready = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        for keep, items in self._by_policy(kept):
            batch = KeptBatch(moment, scale, items, ready)
            waiting = self._holders.get(id(keep))
            if waiting is None:
                self._hand_over(batch)
            else:
                self.held -= waiting[1].add(batch)

    def pull_triggers(self, moment: Moment, names: Sequence[str], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Evaluate each trigger on rows of statistics, and hand over what its policy holds when it fires."""
        for keep, holder in self._holders.values():
            reason = keep.when(names, columns) if keep.when is not None else ""
            if reason:
                self._sink.add_event(Event(moment, "trigger", text=reason))
                self._hand_over(*holder.release())

    def finish(self, moment: Moment) -> None:
        """Hand over the last steps where a policy asks for them, and note what was dropped: the recording ends."""
        for keep, holder in self._holders.values():
            held = holder.release()  # what no trigger has asked for is let go
            if keep.when is None:
                self._hand_over(*held)
        for pattern, number in self._dropped.items():
            text = f"{count_of(number, 'tensor')} of {pattern} did not fit into the budget of {self.budget:,} bytes"
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
        self.held -= gone.size
        self._drop(keep, len(gone.kept))
        return True

    def _drop(self, keep: Keep, number: int) -> None:
        if not self._dropped:
            warn(f"The budget of {self.budget:,} bytes for kept tensors is spent; retrograd drops what does not fit.")
        self._dropped[", ".join(keep.selection.describe())] += number

    def _hand_over(self, *batches: KeptBatch) -> None:
        for batch in batches:
            self.held -= batch.size
            for item in batch.unpack():
                self._sink.add_tensor(item)
