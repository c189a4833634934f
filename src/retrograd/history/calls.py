"""The calls of every step, expanded from those that were noted and the steps that repeat them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from retrograd.history.facts import Call, Fact, Repeats
from retrograd.history.sink import Moment


def expand_calls(facts: Iterable[Fact]) -> list[Call]:
    """All calls of a process, by step, in the order made. Repetitions of a missing step are skipped."""
    patterns: dict[int, list[Call]] = {}
    found: list[Call] = []
    for fact in facts:
        if isinstance(fact, Call):
            patterns.setdefault(fact.step, []).append(fact)
            found.append(fact)
        elif isinstance(fact, Repeats):
            for step, like, changes in fact.steps:
                if like in patterns:
                    now = patterns[like] = list(_repeat(patterns[like], step, changes))
                    found.extend(now)
    return sorted(found, key=lambda call: call.step)


def _repeat(calls: list[Call], step: int, changes: Iterable[tuple[int, Any, Any]]) -> Iterator[Call]:
    moment = Moment(step)
    changed = {index: (value, rates) for index, value, rates in changes}
    for index, call in enumerate(calls):
        value, details = call.value, call.details
        if index in changed:
            new, rates = changed[index]
            value = float("nan") if new is None else float(new)
            details = details if rates is None else {**details, "lr": list(rates)}
        yield Call(
            name=call.name,
            value=value,
            moment=moment,
            rank=call.rank,
            line=call.line,
            about=call.about,
            details=details,
        )
