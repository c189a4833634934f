"""Rows made from elements that are known, and what they must say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd.core.history.sink import Moment, RowBatch
from retrograd.core.statistics.row import ROW

SITES = ["a:output", "a:output.grad", "b:output", "b:output.grad", "b:weight.update"]
UPDATE = 4
"""Number of the site that is an update, of a weight whose squares add up to 9."""


def count_exponents(elements: np.ndarray) -> np.ndarray:
    """The exponent histogram, an element at a time."""
    bins = np.zeros(255, np.int64)
    for element in np.abs(elements[np.isfinite(elements)]):
        if element:
            bins[min(max(int(np.frexp(element)[1]) - 1 + 127, 0), 254)] += 1
    return bins


def make_row(number: int, elements: np.ndarray, reference: float = 0.0) -> tuple[tuple[Any, ...], np.ndarray]:
    """The row of these elements as the fields of ``ROW``, and its stretch of bins."""
    finite = elements[np.isfinite(elements)]
    bins = count_exponents(elements)
    used = np.flatnonzero(bins)
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    counts = [np.isnan(elements), np.isposinf(elements), np.isneginf(elements), elements == 0]
    fields = (
        number,
        1,
        2 * number,  # its order
        len(elements),
        *(int(which.sum()) for which in counts),
        finite.sum() if len(finite) else 0.0,
        ((finite - finite.mean()) ** 2).sum() if len(finite) else 0.0,
        np.abs(finite).sum(),
        finite.min(initial=np.inf),
        finite.max(initial=-np.inf),
        reference,
        first,
        last - first,
    )
    return fields, bins[first:last]


def make_batch(moment: Moment, elements: dict[int, np.ndarray], **rest: Any) -> RowBatch:
    """A batch of one row for each number of a row."""
    made = [make_row(number, values, 9.0 * (number == UPDATE)) for number, values in elements.items()]
    rows = np.array([fields for fields, _ in made], ROW)
    bins = np.concatenate([stretch for _, stretch in made]) if made else np.empty(0, np.int64)
    return RowBatch(moment, rows.tobytes(), bins.astype(np.int64).tobytes(), **rest)


def make_steps(steps: Sequence[int], n_sites: int = len(SITES), seed: int = 0) -> list[RowBatch]:
    """A batch a step, of normal elements that differ from step to step."""
    batches = []
    for step in steps:
        generator = np.random.default_rng([seed, step])
        elements = {number: generator.standard_normal(8) for number in range(n_sites)}
        batches.append(make_batch(Moment(step, 0, 0), elements))
    return batches
