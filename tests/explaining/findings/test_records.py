"""What each detector finds in tiny records: in one with its fault, in look-alikes, and where nobody can tell."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from retrograd.explaining.findings.detectors import DETECTORS
from retrograd.explaining.findings.record import CannotTell
from tests.explaining.findings.by_hand import ask, check
from tests.explaining.findings.records import Row

TABLES = [import_module(f"{__package__}.{path.stem}") for path in sorted(Path(__file__).parent.glob("records_of_*.py"))]
ROWS: list[Row] = [row for table in TABLES for row in table.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.slug)
def test_what_is_found(row: Row) -> None:
    if row.unknown:
        with pytest.raises(CannotTell, match=re.escape(row.words[0])):
            check(row.slug, row.make())
        return
    found = ask(row.slug, row.make())
    assert tuple(each.severity for each in found) == row.severities, [each.message for each in found]
    for each in found:
        assert all(text in each.message for text in row.words), each.message
        assert {name: getattr(each, name) for name in row.fields} == row.fields


WITH_PROGRAMS = {
    "nan-input", "nan-forward", "nan-backward", "nan-update",  # test_nonfinite.py
    "no-graph", "freed-graph", "overwritten", "layers-in-a-list", "missing-gradient", "not-optimized",
    "recomputed-otherwise", "inference-tensor", "unused-in-ddp",  # test_refused.py
    "second-derivative", "kinks", "zero-gradient",  # test_zeros.py
    "term-without-effect", "straight-through-loss", "td-target-gradient", "summed-before-mask", "summed-beside-mean",
    "log-prob-as-entropy",  # test_terms.py
}  # fmt: skip
"""Detectors that are tried with whole programs: in files of their own, and in ``remedies.py``."""


def test_every_detector_has_its_records() -> None:
    found = {row.slug for row in ROWS if row.severities}
    assert found == {row.slug for row in ROWS if not row.severities}
    assert found | WITH_PROGRAMS == {each.slug for each in DETECTORS}
    assert not found & WITH_PROGRAMS
