"""The layers of a model in the order in which a forward reaches them, with what they gave and what came back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from retrograd.core.history.matrix import Matrix, join_matrices
from retrograd.core.sites.site import Site
from retrograd.explaining.findings.record import Record

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """A module without children that was called in training.

    Attributes:
        path: of the module.
        type: its class.
        site: its output, or the first of several.
        line: where it was constructed.
        weighs: whether it has a weight that is not a scale of a norm.
    """

    path: str
    type: str
    site: Site
    line: str
    weighs: bool


class Layers:
    """All layers of a record.

    Args:
        record: what it reads.
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    @cached_property
    def listed(self) -> list[Layer]:
        """The layers, in the order of the first forward."""
        record = self._record
        parents = {path.rpartition(".")[0] for path in record.modules} | record.root_names
        alone = len(record.modules) == 1
        weights = {site.path for site in record.of_kind("parameter", "grad") if site.keys[0] == "weight"}
        found: dict[str, Layer] = {}
        for site in record.of_kind("output"):
            if site.path not in found and (alone or site.path not in parents):
                kind = record.type_of(site.path)
                weighs = site.path in weights and "Norm" not in kind
                found[site.path] = Layer(site.path, kind, site, record.line_of(site.path), weighs)
        return list(found.values())

    def values(self, statistic: str) -> Iterator[Matrix]:
        """A statistic of what they gave, for some steps after the other: as many lines as there are layers."""
        return self.lay_out([str(layer.site) for layer in self.listed], statistic)

    def gradients(self, statistic: str) -> Iterator[Matrix]:
        """A statistic of the gradients of what they gave, for some steps after the other; NaN where none came."""
        return self.lay_out([str(layer.site.grad) for layer in self.listed], statistic)

    def lay_out(self, names: list[str], statistic: str) -> Iterator[Matrix]:
        """A statistic of sites, a line each, for some steps after the other; NaN where there is no such site."""
        history = self._record.history
        known = [place for place, name in enumerate(names) if name in history]
        for [found] in history.matrices([statistic], [names[place] for place in known]):
            values = np.full((len(names), len(found.steps)), np.nan)
            values[known] = found.values
            yield Matrix(names, found.steps, values)


def take_first(matrices: Iterable[Matrix], steps: int) -> Matrix:
    """The first steps of matrices that follow each other, of which no more are read."""
    head: list[Matrix] = []
    for matrix in matrices:
        head.append(matrix)
        if sum(len(each.steps) for each in head) >= steps:
            break
    found = join_matrices(head)
    return Matrix(found.sites, found.steps[:steps], found.values[:, :steps])


def median_of_first(matrices: Iterable[Matrix], until: int | None = None, steps: int = 3) -> FloatArray:
    """Median of each line's values above zero in its first steps; NaN where there is none.

    Args:
        matrices: layers × steps, for some steps after the other.
        until: the first step that does not count; None for none.
        steps: how many count.
    """
    matrix = take_first(matrices, steps)
    head = matrix.values[:, :steps] if until is None else matrix.values[:, matrix.steps < until][:, :steps]
    head = np.where(np.isfinite(head) & (head > 0), head, np.nan)
    known = np.isfinite(head).any(axis=1)
    out = np.full(len(head), np.nan)
    out[known] = np.nanmedian(head[known], axis=1)
    return out
