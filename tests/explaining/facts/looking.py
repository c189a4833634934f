"""Helpers of the tests of facts: what a training noted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import retrograd as rg
from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import read_facts

F = TypeVar("F", bound=Fact)


def facts_of(recording: Any, kind: type[F]) -> list[F]:
    """The facts of one kind in a recording that is closed, which had no faults."""
    events = recording.history.events
    assert not [event for event in events if event.kind == "fault"]
    return [fact for fact in read_facts(events) if isinstance(fact, kind)]


def facts_while(train: Callable[[], None], model: Any, kind: type[F]) -> list[F]:
    """What is noted while ``train()`` runs."""
    recording = rg.record(model)
    try:
        train()
    finally:
        recording.close()
    return facts_of(recording, kind)


def line_of(text: str, source: Callable[..., Any]) -> str:
    """``file:line`` of the line with this text in a function or class."""
    lines, first = inspect.getsourcelines(source)
    numbers = [first + index for index, line in enumerate(lines) if text in line]
    assert len(numbers) == 1, f"{text!r} is in {len(numbers)} lines"
    return f"{inspect.getsourcefile(source)}:{numbers[0]}"
