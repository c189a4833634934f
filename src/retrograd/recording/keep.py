"""Which tensors are kept whole or in part, and when they are handed to the sink."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograd.amounts import parse_bytes
from retrograd.errors import TensorPolicyError
from retrograd.recording.trigger import Trigger
from retrograd.sites.pattern import Candidate, Pattern
from retrograd.sites.selection import Selection

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
