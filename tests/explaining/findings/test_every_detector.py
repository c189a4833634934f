"""All detectors of ours: what holds of every one, whatever it finds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import retrograd.explaining.findings.detectors
from retrograd.explaining.findings.detector import Detector
from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.entry import Entry
from retrograd.explaining.findings.explain import explain
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
@pytest.mark.parametrize("detector", DETECTORS, ids=lambda each: each.slug)
def test_the_contract(detector: Detector, check: str) -> None:
    contract = DetectorTests()
    contract.make_detector = lambda: detector  # type: ignore[method-assign]
    getattr(contract, check)()


def test_no_two_have_the_same_name() -> None:
    slugs = [make.slug for make in DETECTORS]
    assert len(set(slugs)) == len(slugs)


def test_none_of_them_fails() -> None:
    for history in (record_training(60), record_training(1), record_training(8, weight=float("nan"))):
        failed = [each for each in explain(history).not_checked if each.reason.startswith("it failed")]
        assert not failed


ONE_THING = {"no permute or transpose made what it is given"}


def list_checked() -> list[str]:
    """Texts in what detectors print as *checked*."""
    tables = [
        text
        for each in DETECTORS
        if isinstance(each, Entry)
        for grounds in each.row.grounds.values()
        for text in grounds.checked
    ]
    files = Path(retrograd.explaining.findings.detectors.__file__).parent.glob("*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    values = (node.value for node in nodes if isinstance(node, ast.keyword) and node.arg in ("precondition", "checked"))
    parts = (part.value for value in values for part in ast.walk(value) if isinstance(part, ast.Constant))
    return tables + [part for part in parts if isinstance(part, str)]


def test_what_was_checked_is_one_thing() -> None:
    """Of "this or that" no branch has checked both: the text is chosen where that is decided."""
    assert len(list_checked()) > 30
    assert not [text for text in list_checked() if " or " in text and text not in ONE_THING]
