"""What was found out about a stretch of memory in a pass that is measured: what else could be done with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retrograd.budget.marks import Mark, seconds_between


@dataclass(frozen=True, slots=True)
class Squeezed:
    """What a lossless copy takes: bytes, and seconds there and back."""

    nbytes: int
    squeeze_seconds: float
    expand_seconds: float


@dataclass(frozen=True, slots=True)
class Probed:
    """A lossless copy that was made and read. A device is not waited for: it may not have come so far yet.

    Attributes:
        nbytes: of the copy.
        began, squeezed, expanded: marks before, between and after.
    """

    nbytes: int
    began: Mark
    squeezed: Mark
    expanded: Mark

    def settle(self) -> Squeezed:
        """What it takes. A device is waited for."""
        squeeze, expand = seconds_between(self.began, self.squeezed), seconds_between(self.squeezed, self.expanded)
        return Squeezed(self.nbytes, squeeze, expand)


@dataclass(frozen=True, slots=True)
class Remade:
    """What it takes to make a stretch again, as it was tried: the bits were the same.

    Attributes:
        operations: what was run, in words.
        sources: stretches that these were given.
        seconds: how long they took.
        nbytes: memory that they needed besides.
        numbers: of the operations, in the pass.
    """

    operations: str
    sources: tuple[int, ...]
    seconds: float
    nbytes: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tried:
    """How it went when a stretch was made again. A device is not waited for: it may not have come so far yet.

    Attributes:
        operations, sources, nbytes, numbers: as of :class:`Remade`.
        began, ended: marks before and after.
        is_same: whether all bits are; one element where a device says so.
    """

    operations: str
    sources: tuple[int, ...]
    began: Mark
    ended: Mark
    nbytes: int
    numbers: tuple[int, ...]
    is_same: bool | Tensor

    def settle(self) -> Remade | None:
        """What it takes; None if it came out otherwise. A device is waited for."""
        if not self.is_same:
            return None
        return Remade(self.operations, self.sources, seconds_between(self.began, self.ended), self.nbytes, self.numbers)
