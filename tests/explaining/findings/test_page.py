"""The page about detectors is made from their words."""

from __future__ import annotations

import runpy
from pathlib import Path

from retrograd.explaining.findings.detectors import DETECTORS

DOCS = Path(__file__).parents[3] / "docs"
describe_findings = runpy.run_path(str(DOCS / "make_findings.py"))["describe_findings"]


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "findings.md").read_text() == describe_findings(), "run `python docs/make_findings.py`"


def test_the_page_names_every_detector_and_whom_it_explains() -> None:
    page = describe_findings()
    slugs = {make.slug for make in DETECTORS}
    for make in DETECTORS:
        assert f"\n## {make.slug}\n" in page
        assert {*make.explains} <= {*slugs, "*"}, f"{make.slug} explains what nobody says"
