"""The layers of a model in the order in which a forward reaches them, with what they gave and what came back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from retrograd.findings.record import Record
from retrograd.history.matrix import Matrix
from retrograd.sites.site import Site

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
        self._matrices: dict[tuple[str, str], Matrix] = {}

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

    def values(self, statistic: str) -> Matrix:
        """A statistic of what they gave: as many lines as there are layers."""
        return self._lay_out("value", statistic)

    def gradients(self, statistic: str) -> Matrix:
        """A statistic of the gradients of what they gave; NaN where none came."""
        return self._lay_out("grad", statistic)

    def _lay_out(self, quantity: str, statistic: str) -> Matrix:
        key = quantity, statistic
        if key not in self._matrices:
            self._matrices[key] = self._build(quantity, statistic)
        return self._matrices[key]

    def _build(self, quantity: str, statistic: str) -> Matrix:
        history = self._record.history
        names = [str(layer.site if quantity == "value" else layer.site.grad) for layer in self.listed]
        known = [place for place, name in enumerate(names) if name in history]
        found = history.matrix(statistic, [names[place] for place in known])
        values = np.full((len(names), len(found.steps)), np.nan)
        values[known] = found.values
        return Matrix(names, found.steps, values)


def median_of_first(matrix: Matrix, until: int | None = None, steps: int = 3) -> FloatArray:
    """Median of each line's values above zero in its first steps; NaN where there is none.

    Args:
        matrix: layers × steps.
        until: the first step that does not count; None for none.
        steps: how many count.
    """
    head = matrix.values[:, :steps] if until is None else matrix.values[:, matrix.steps < until][:, :steps]
    head = np.where(np.isfinite(head) & (head > 0), head, np.nan)
    known = np.isfinite(head).any(axis=1)
    out = np.full(len(head), np.nan)
    out[known] = np.nanmedian(head[known], axis=1)
    return out
