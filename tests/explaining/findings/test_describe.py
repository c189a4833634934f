"""The page about detectors is made from their words."""

from __future__ import annotations

from pathlib import Path

from retrograd.explaining.findings.describe import describe_findings
from retrograd.explaining.findings.detectors import DETECTORS

PAGE = Path(__file__).parents[3] / "docs" / "findings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == describe_findings(), "run `python docs/make_findings.py`"


def test_the_page_names_every_detector_and_whom_it_explains() -> None:
    page = describe_findings()
    slugs = {make.slug for make in DETECTORS}
    for make in DETECTORS:
        assert f"\n## {make.slug}\n" in page
        assert {*make.explains} <= {*slugs, "*"}, f"{make.slug} explains what nobody says"
