"""All detectors of ours: what holds of every one, whatever it finds."""

from __future__ import annotations

import pytest

from retrograd.findings.detectors import DETECTORS
from retrograd.findings.explain import explain
from retrograd.testing.detector_tests import DetectorTests, record_training

CHECKS = [
    "test_it_is_silent_where_nothing_was_recorded",
    "test_it_is_silent_on_a_healthy_run",
    "test_it_is_silent_on_one_healthy_step",
    "test_it_survives_a_run_in_which_nothing_is_finite",
    "test_its_words_are_there",
]
"""Those of the contract for which no fault is needed; that each finds its own is in tests of its own."""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("make", DETECTORS, ids=lambda make: make.slug)
def test_the_contract(make: type, check: str) -> None:
    contract = DetectorTests()
    contract.make_detector = make  # type: ignore[method-assign]
    getattr(contract, check)()


def test_no_two_have_the_same_name() -> None:
    slugs = [make.slug for make in DETECTORS]
    assert len(set(slugs)) == len(slugs)


def test_none_of_them_fails() -> None:
    for history in (record_training(60), record_training(1), record_training(8, weight=float("nan"))):
        failed = [each for each in explain(history).not_checked if each.reason.startswith("it failed")]
        assert not failed
