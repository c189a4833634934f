"""Facts about data and losses: targets beside inputs, outputs over a batch, what a loss is the sum of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrograd.core.history.fact import Fact

SHIFTS = (-2, -1, 0, 1, 2, 3)
"""Positions by which tokens are moved before targets are compared with them; 1 is predicting the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets(Fact):
    """What a loss was given as its target, when it was looked at. ``name`` is the module that called it.

    ``value`` is the loss, NaN where that is more than one number.

    Attributes:
        loss, line: the function, and who called it; ``gather`` where log-probabilities are picked.
        dtype: of the targets; all but ``same`` is of integers.
        elements: how many targets.
        classes: of the logits, C; the loss of guessing is ln C.
        ignored: targets that are ``ignore_index``. They are left out of what follows.
        seen: different targets.
        most, share: the most frequent one, and its share.
        tail: share of those that stand in the tail of a row, behind which there is no other.
        lengths: how many different lengths rows have without that tail.
        filler: the tokens within these tails are all the same one.
        shifts: of each of :data:`SHIFTS` the share of targets that are the token so many positions ahead of the one
            at the same place; −1 where there is none to compare with.
        tokens: line where these tokens are looked up in an embedding; empty where none of that size were.
        axis: dimension of the tokens along which they are moved.
        same: they are in the memory of a tensor that the model took, as in an autoencoder.
    """

    kind = "targets"
    loss: str = ""
    line: str = ""
    dtype: str = ""
    elements: int = 0
    classes: int = 0
    ignored: int = 0
    seen: int = 0
    most: int = 0
    share: float = math.nan
    tail: float = math.nan
    lengths: int = 0
    filler: bool = False
    shifts: tuple[float, ...] = ()
    tokens: str = ""
    axis: int = 0
    same: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Fact):
    """How far the samples of a batch are apart in what a model returns, when it was looked at. ``name`` is the site.

    ``value`` is Σ(x − x̄)² / Σx², where x̄ is the mean over the batch: 0 where all samples give the same.

    Attributes:
        samples: in the batch, the first dimension.
        size: root mean square.
        given: the same number of the model's input; NaN where none has as many samples.
    """

    kind = "spread"
    samples: int = 0
    size: float = math.nan
    given: float = math.nan


SIGNED_BINS, SIGNED_WIDTH = 32, 4.0
"""Bins of a signed histogram, and its bound in root mean squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedHistogram(Fact):
    """Elements of what a module returned, counted in bins around zero, when it was looked at. ``name`` is the site.

    It is of the first call of the step in training. ``value`` is the bound: four times the root mean square of the
    elements that were counted and are finite; 0 where they are all zero.

    Attributes:
        elements: of the tensor. Of one with more than 8,192 some are counted, spread evenly over it.
        counts: below −bound; in each of 32 bins of equal width from there to the bound, its lower edge included; at the
            bound and above; not finite. Together as many as were counted.
    """

    kind = "signed"
    elements: int = 0
    counts: tuple[int, ...] = ()

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """The edges of the bins, rising: float64, shape ``[33]``, as numpy.histogram takes them; the middle is 0."""
        edges = np.float32(self.value) * np.linspace(-1.0, 1.0, SIGNED_BINS + 1, dtype=np.float32)  # as they were made
        return edges.astype(np.float64)

    @property
    def bins(self) -> npt.NDArray[np.int64]:
        """The counts between the edges: int64, shape ``[32]``."""
        return np.array(self.counts[1 : SIGNED_BINS + 1], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendedTokens(Fact):
    """The tokens that a padding mask lets attention take, when it was looked at. ``name`` is the module.

    ``value`` is the share of positions that it lets pass.

    Attributes:
        line: who called the function that takes the mask.
        kept, hidden: how many different tokens stand where it lets pass, and where it does not.
        only: the token that it lets pass, where that is one.
        lengths: how many different numbers of positions it lets pass in a row.
    """

    kind = "attended"
    line: str = ""
    kept: int = 0
    hidden: int = 0
    only: int = 0
    lengths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts(Fact):
    """Sums of what operations made that a backward pass began from, when it was looked at.

    ``name`` is that of the model, as of :class:`~retrograd.core.history.facts.Operations`, ``value`` the loss.

    Attributes:
        line: of the operation that made the loss.
        called: where backward was called.
        loss: number of that operation among those of the pass, as they were last noted.
        numbers: numbers of operations whose result is a single number, or is added to another that is none: what the
            loss is made of, and what has left torch by ``item()``.
        values: the sums of these results.
        equal: numbers of differences, ratios and distances of two tensors with a graph that were equal, bit for bit.
    """

    kind = "terms"
    line: str = ""
    called: str = ""
    loss: int = -1
    numbers: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    equal: tuple[int, ...] = ()

    def sum_of(self, number: int) -> float:
        """The sum of what an operation made; NaN where it is not known."""
        return self.values[self.numbers.index(number)] if number in self.numbers else math.nan
