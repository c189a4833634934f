"""Policies: which tensors are kept whole or in part, and when they are handed to the sink.

A trigger is any callable ``(names, rows) -> str``: ``names`` are the printed sites of the rows of a micro-batch and
``rows`` their columns (see :mod:`retrograd.statistics.row`). It returns why it fires, or an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from retrograd.amounts import parse_bytes
from retrograd.errors import TensorPolicyError
from retrograd.sites.pattern import Candidate, Pattern
from retrograd.sites.selection import Selection
from retrograd.sites.site import parse_site
from retrograd.statistics.row import STATISTICS, derive

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
            f"on_jump(factor={factor!r}, statistic={statistic!r}, memory={memory!r}) can never be right.",
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
        """Whether tensors are copied when they are seen; a part always is, lest it hold the whole."""
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
