"""Terms of losses: what is named in small trainings, and what is not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from retrograd.core.history.history import History
from retrograd.core.recording.recorder import Recorder
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.findings.detectors.terms import family
from retrograd.explaining.findings.explain import explain_record
from retrograd.explaining.findings.loss_terms import describe_loss
from retrograd.explaining.findings.record import Record
from tests.explaining.findings.programs_of_terms import (
    HEALTHY,
    TERMS,
    Program,
    adversarial,
    supervised,
    with_a_schedule,
)

MINE = [entry.slug for entry in family.entries]


def record_of(program: Program) -> Record:
    training, history = program(), History()
    recorder = Recorder(next(training), history, sources=SOURCES)
    recorder.attach()
    try:
        for _ in training:
            pass
    finally:
        recorder.close()
    assert not [event for event in history.events if event.kind == "fault"]
    return Record(history)


def lines_of_fault(function: Callable[..., Any]) -> set[str]:
    lines, first = inspect.getsourcelines(function)
    return {f"{inspect.getsourcefile(function)}:{first + k}" for k, line in enumerate(lines) if "# fault" in line}


@pytest.mark.parametrize(("slug", "program", "function"), TERMS)
def test_what_is_wrong_is_named(slug: str, program: Program, function: Callable[..., Any]) -> None:
    found = [each for each in explain_record(record_of(program)) if each.detector in MINE]
    assert [each.detector for each in found] == [slug], [each.message for each in found]
    assert found[0].line in lines_of_fault(function), (found[0].line, found[0].message)


@pytest.mark.parametrize("program", HEALTHY)
def test_nothing_is_said_of_what_is_right(program: Program) -> None:
    found = explain_record(record_of(program))
    assert not [each.message for each in found if each.detector in MINE]


def test_of_runs_without_the_numbers_nobody_can_tell() -> None:
    found = explain_record(Record(History()))
    assert set(MINE) <= {each.detector for each in found.not_checked}


def test_a_loss_in_words() -> None:
    [loss] = describe_loss(record_of(supervised(with_a_schedule)))
    assert loss.text == "cross_entropy(first(…), target, mean) + data"


def test_each_place_that_makes_a_loss() -> None:
    losses = describe_loss(record_of(adversarial(detached=False)))
    assert [len(loss.terms) for loss in losses] == [2, 2]
    for loss in losses:
        assert sum(term.last_share for term in loss.terms) == pytest.approx(1)
        for place, parts in enumerate(loss.parts):
            assert sum(term.values[place] for term in loss.terms) == pytest.approx(parts.value)
