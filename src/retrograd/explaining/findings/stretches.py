"""Stretches of a run, in each of which other parameters are trained: what is said of losses is said of one stretch.

Folds, members of an ensemble and runs of a sweep train a model each, one after the other: the loss of one model says
nothing of another. Optimizers that share parameters train the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from retrograd.explaining.findings.record import Record


class Stretch(NamedTuple):
    """Steps in which the same parameters are trained.

    Attributes:
        first: the first step.
        end: the step behind the last one; None for the end of the run.
        optimizers: their names.
        is_mixed: parameters that no step updates together are trained in turn: a loss is of one or of another.
    """

    first: int
    end: int | None
    optimizers: frozenset[str]
    is_mixed: bool


def list_parts(record: Record) -> list[Record]:
    """The record of each stretch; of a run that has a single one, the record itself."""
    if len(record.optimizers) < 2:
        return [record]
    held = {name: made.parameters for name, made in record.optimizers.items()}
    found = find_stretches(held, ((call.step, call.about) for call in record.called("step")))
    if len(found) > 1 or any(each.is_mixed for each in found):
        return [record.take_part(*each) for each in found]
    return [record]


def find_stretches(held: Mapping[str, Collection[str]], updates: Iterable[tuple[int, str]]) -> list[Stretch]:
    """Find the stretches of a run.

    Args:
        held: the names of the parameters of each optimizer.
        updates: steps, each with the name of an optimizer that updates in it.
    """
    updates = list(updates)
    same = _Union()
    first_of: dict[str, str] = {}
    for name, parameters in held.items():
        for parameter in parameters:
            same.join(name, first_of.setdefault(parameter, name))
    spans: dict[str, tuple[int, int]] = {}
    for step, name in updates:
        first, last = spans.get(same.find(name), (step, step))
        spans[same.find(name)] = min(first, step), max(last, step)
    together = _Union()
    seen: dict[int, str] = {}
    for step, name in updates:
        together.join(same.find(name), seen.setdefault(step, same.find(name)))
    groups: list[tuple[int, int, list[str]]] = []
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if groups and first <= groups[-1][1]:
            before = groups.pop()
            groups.append((before[0], max(before[1], last), [*before[2], name]))
        else:
            groups.append((first, last, [name]))
    ends = [first for first, _, _ in groups[1:]]
    return [
        Stretch(
            first if place else 0,
            ends[place] if place < len(ends) else None,
            frozenset(name for name in held if same.find(name) in names),
            len({together.find(name) for name in names}) > 1,
        )
        for place, (first, _, names) in enumerate(groups)
    ]


class _Union:
    """Names that are the same as others."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def find(self, name: str) -> str:
        """The name that stands for it, and all that are the same."""
        while name in self._above:
            name = self._above[name]
        return name

    def join(self, name: str, other: str) -> None:
        """Record that two are the same."""
        name, other = self.find(name), self.find(other)
        if name != other:
            self._above[name] = other
