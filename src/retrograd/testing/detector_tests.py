"""Tests of what every detector must do, to inherit from."""

from __future__ import annotations

import functools
import json
from dataclasses import fields

import torch
from torch import nn

from retrograd.core.history.history import History
from retrograd.core.recording.record import record
from retrograd.core.runs.findings import Evidence, Finding
from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.record import CannotTell, Record

MOST_LETTERS = 240
"""Of a message: it is one sentence."""


class DetectorTests:
    """The contract of :class:`retrograd.explaining.findings.detector.Detector`. Inherit from it in a test file.

        class TestMyDetector(DetectorTests):
            def make_detector(self) -> Detector:
                return MyDetector()

            def make_fault(self) -> Record:
                with rg.record(model) as recording:
                    train_badly(model)
                return rg.findings.Record(recording.history)

    Any test runner that finds methods named ``test_…`` will do.
    """

    def make_detector(self) -> Detector:
        """The detector."""
        raise NotImplementedError

    def make_fault(self) -> Record:
        """The record of a run that has the fault."""
        raise NotImplementedError

    def test_it_finds_the_fault_it_is_there_for(self) -> None:
        detector = self.make_detector()
        found = list(detector.check(self.make_fault()))
        assert found, "it says nothing of the fault"
        for finding in found:
            assert finding.detector == detector.slug, "make findings with `self.find(…)`"
            assert finding.repair, "what is to be done?"
            assert finding.evidence, "what does it rest on?"

    def test_it_is_silent_where_nothing_was_recorded(self) -> None:
        assert not self._ask(Record(History())), "it finds something in an empty record"

    def test_it_is_silent_on_a_healthy_run(self) -> None:
        alarms = [each for each in self._ask(Record(record_training(60))) if each.severity != "note"]
        assert not alarms, "it raises an alarm on a net that trains well"

    def test_it_is_silent_on_one_healthy_step(self) -> None:
        assert not self._ask(Record(record_training(1))), "one step shows no course"

    def test_it_survives_a_run_in_which_nothing_is_finite(self) -> None:
        for finding in self._ask(Record(record_training(8, weight=float("nan")))):
            _check(finding)

    def test_its_findings_are_plain_data(self) -> None:
        for finding in self._ask(self.make_fault()):
            _check(finding)

    def test_it_says_the_same_when_it_is_asked_again(self) -> None:
        record = self.make_fault()
        first, second = self._ask(record), self._ask(record)
        assert [each.as_json() for each in first] == [each.as_json() for each in second]

    def test_its_words_are_there(self) -> None:
        detector = self.make_detector()
        assert detector.slug, "it has no name"
        assert detector.slug == detector.slug.lower().replace(" ", "-").replace("_", "-"), (
            "a slug is as in `dead-units`"
        )
        for field in fields(detector.words):
            assert str(getattr(detector.words, field.name)).strip(), f"its documentation lacks {field.name!r}"

    def _ask(self, record: Record) -> list[Finding]:
        reason = ""
        try:
            return list(self.make_detector().check(record))
        except CannotTell as answer:
            reason = str(answer)
        assert reason.strip(), "why can it not tell?"
        return []


@functools.cache
def record_training(steps: int, weight: float | None = None) -> History:
    """The record of a small net that learns a rule from noise-free data, with plain SGD.

    Args:
        steps: how many.
        weight: what all elements of the first weight are; as torch draws them when left out.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Linear(8, 32)
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 2))
    if weight is not None:
        nn.init.constant_(first.weight, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with record(model) as recording:
        for _ in range(steps):
            data = torch.randn(64, 8, generator=generator)
            loss = nn.functional.cross_entropy(model(data), (data[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return recording.history


def _check(finding: Finding) -> None:
    """A finding is plain data that JSON carries, and its message one sentence."""
    carried = Finding.of_dict(json.loads(finding.as_json()))
    assert carried.as_json() == finding.as_json(), "JSON changes it"
    assert all(isinstance(each, Evidence) for each in finding.evidence)
    assert 0 < len(finding.message) <= MOST_LETTERS, f"a message is one sentence: {finding.message!r}"
    assert "\n" not in finding.message
