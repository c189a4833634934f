"""What a probe of a model answers."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.core.runs.findings import shorten_line

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Whether what a model returns for one sample depends on others, or for one position on later ones.

    True where all is well: it does not, or by nothing but batch norm in training. So ``assert rg.check_batch(…)``.

    Attributes:
        what: ``samples`` or ``positions``.
        mixes: it depends on others, be it by batch norm.
        only_batch_norm: it would not if batch norm took no statistics of the batch.
        pairs: ``(i, j)`` of those that were tried: what is returned for i depends on j.
        operation: the first that mixes them; empty where that is not known.
        module: the path of the module that it is in.
        line: who called it, ``file:line``.
        reason: in words.
        shape: of what that operation makes.
        called_with: the arguments of the model.
        has_mask: a triangular mask was at work, or an operation was told to be causal.
    """

    what: str
    mixes: bool = False
    only_batch_norm: bool = False
    pairs: tuple[tuple[int, int], ...] = ()
    operation: str = ""
    module: str = ""
    line: str = ""
    reason: str = ""
    shape: tuple[int, ...] = ()
    called_with: str = ""
    has_mask: bool = False

    def __bool__(self) -> bool:
        return not self.mixes or self.only_batch_norm

    def __str__(self) -> str:
        asked = "no sample depends on another" if self.what == "samples" else "no position depends on a later one"
        if not self.mixes:
            return f"{asked}, of model({self.called_with})"
        shown = ", ".join(f"{i} on {j}" for i, j in self.pairs[:_SHOWN]) + (", …" if len(self.pairs) > _SHOWN else "")
        place = ", ".join(filter(None, (self.module, shorten_line(self.line) if self.line else "")))
        told = f"{self.what} depend on {'later' if self.what == 'positions' else 'other'} {self.what}"
        return f"{told} ({shown}): {self.reason}{f' ({place})' if place else ''}, of model({self.called_with})"

    __repr__ = __str__
