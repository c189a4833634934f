"""Several runs on common rows and columns: sites by name, steps by number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrograd.core.amounts import count_of, list_names
from retrograd.core.groups import gather
from retrograd.core.history.history import History
from retrograd.core.history.sink import Phase
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.views.downsample import IntArray, StepColumns, share_columns
from retrograd.core.views.report.scope import SHARE_OF_NUMBERS, Scope, choose_detail, choose_scope
from retrograd.core.views.shown import ModelPlace, add_ungraded, find_phase
from retrograd.explaining.comparing.pairs import plain_names


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """Runs on common rows and columns.

    Attributes:
        scopes: what is shown of each run, with its own names of sites and its own steps.
        names: sites of all runs, in an order that keeps that of each where they agree.
        rows: for each run, the number in ``names`` of each of its sites.
        columns: how the steps of all runs share columns.
        mantissa_bits: to how many bits numbers are rounded.
    """

    scopes: list[Scope]
    names: list[str]
    rows: list[IntArray]
    columns: StepColumns
    mantissa_bits: int

    @property
    def shown(self) -> Scope:
        """All that is shown, as of one run."""
        elements = np.full(len(self.names), -1)
        for scope, rows in zip(self.scopes, self.rows, strict=True):
            np.maximum.at(elements, rows, np.array(scope.elements, np.int64))
        first = self.scopes[0]
        return Scope(first.history, first.phase, self.names, [], elements.tolist(), self.columns, self.mantissa_bits)


def align(histories: Sequence[History], phase: Phase | None, most_columns: int, megabytes: float) -> Aligned:
    """Lay runs beside each other, as fine as the page can be."""
    phase = find_phase(histories[0]) if phase is None else phase
    scopes = [choose_scope(each, phase, 1 << 62, float("inf")) for each in histories]
    plain = [dict(zip(plain_names(scope.sites), scope.sites, strict=True)) for scope in scopes]
    order = {name: number for number, name in enumerate(merge_orders([list(each) for each in plain]))}
    steps = np.unique(np.concatenate([scope.columns.steps for scope in scopes]))
    numbers = sum(len(scope.sites) for scope in scopes)
    columns, bits = choose_detail(numbers, len(steps), most_columns, megabytes * 1e6 * SHARE_OF_NUMBERS)
    return Aligned(
        scopes=scopes,
        names=[next(each[name] for each in plain if name in each) for name in order],
        rows=[np.array([order[name] for name in each], np.int64) for each in plain],
        columns=share_columns(steps, columns),
        mantissa_bits=bits,
    )


def merge_orders(lists: Sequence[Sequence[str]]) -> list[str]:
    """All names, each once; one that only a later list has follows the name that it follows there."""
    merged: list[str] = []
    for names in lists:
        known, after, last = set(merged), dict[str, list[str]](), ""
        for name in names:
            if name in known:
                last = name
            else:
                after.setdefault(last, []).append(name)
        merged = [*after.get("", ()), *(each for name in merged for each in (name, *after.get(name, ())))]
    return merged


def list_differences(aligned: Aligned, letters: Sequence[str]) -> list[str]:
    """What only some of the runs have, in sentences."""
    sentences = []
    steps = [scope.columns.steps for scope in aligned.scopes]
    if any(not np.array_equal(steps[0], each) for each in steps[1:]):
        parts = [
            f"{letter} has {count_of(len(each), 'step')}" + (f" ({each[0]:,} to {each[-1]:,})" if len(each) else "")
            for letter, each in zip(letters, steps, strict=True)
        ]
        sentences.append(f"Their recorded steps differ: {', '.join(parts)}.")
    lacking = zip(find_missing(aligned), aligned.names, strict=True)
    for missing, names in gather(each for each in lacking if each[0]).items():
        having = [letter for number, letter in enumerate(letters) if number not in missing]
        sentences.append(f"Only {' and '.join(having)} {'has' if len(having) == 1 else 'have'} {list_names(names)}.")
    return sentences


def find_missing(aligned: Aligned) -> list[tuple[int, ...]]:
    """For each site the numbers of the runs that lack it."""
    has = np.zeros((len(aligned.scopes), len(aligned.names)), np.bool_)
    for number, rows in enumerate(aligned.rows):
        has[number, rows] = True
    return [tuple(np.flatnonzero(~column).tolist()) for column in has.T]


def add_all_ungraded(places: Sequence[ModelPlace], aligned: Aligned, letters: Sequence[str]) -> list[ModelPlace]:
    """Places of all runs, with those of parameters that in some of them never got a gradient."""
    scopes = zip(aligned.scopes, letters, strict=True)
    having = gather((name, letter) for scope, letter in scopes for name in list_ungraded(scope.history))
    added = list(places)
    for scope, letter in zip(aligned.scopes, letters, strict=True):
        words = {
            name: f"never got a gradient in {', '.join(each)}" for name, each in having.items() if each[0] == letter
        }
        added = add_ungraded(added, words, scope.history.manifest)
    return added
