"""The smallest program that still does what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.memory.saved.random_programs import Part, Program


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A program that fails still, of which nothing can be left out any more."""
    for smaller in _smaller(program):
        if fails(smaller):
            return shrink(smaller, fails)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """All programs with one thing less."""
    for name in ("events", "order", "parts"):
        for fewer in _leave_one_out(getattr(program, name)):
            yield replace(program, **{name: fewer})
    for number, part in enumerate(program.parts):
        for simpler in [Part(part.call, steps) for steps in _leave_one_out(part.steps)] + [Part("plainly", part.steps)]:
            if simpler != part:
                yield replace(program, parts=(*program.parts[:number], simpler, *program.parts[number + 1 :]))


def _leave_one_out(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if len(values) > 1:
        yield from (values[:number] + values[number + 1 :] for number in range(len(values)))
