"""Findings on top of the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from retrograd.findings.finding import Finding, Findings
from retrograd.views.report import report, write_report
from retrograd.views.report.findings import describe_findings
from retrograd.views.report.scope import choose_scope
from tests.findings.made import MADE, SYMPTOM
from tests.views.conftest import Visit
from tests.views.invented import invent_training, make_history, name_resnet
from tests.views.test_page import HOSTILE


@pytest.mark.parametrize(
    ("site", "step", "visit"),
    [
        ("blocks.1.conv1:output.grad", 3, {"site": "blocks.1.conv1:output.grad", "step": 3}),
        ("blocks.1.conv1", 3, {"site": "blocks.1.conv1:output", "step": 3}),
        ("blocks.1.conv1:weight", None, {"site": "blocks.1.conv1:weight.grad", "step": 0}),
        ("blocks.1", 7, {"site": "blocks.1:output", "step": 7}),
        ("SGD#1", 3, None),
        ("nowhere", 3, None),
        ("", 3, None),
    ],
)
def test_a_finding_leads_to_the_curves_of_its_site(site: str, step: int | None, visit: object) -> None:
    scope = choose_scope(make_history(invent_training(name_resnet(), 20)), None, 1000, 8.0)
    finding = Finding(detector="a", severity="note", message="b", site=site, step=step)
    (described,) = describe_findings(Findings([finding]), scope)["listed"]
    assert described["visit"] == visit


def write(path: Path, findings: Findings, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "explain_record", lambda record: findings)
    return write_report(make_history(invent_training(name_resnet(), 400)), path / "report.html")


@pytest.mark.browser
def test_each_is_told_with_what_it_rests_on(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = visit.open(write(tmp_path, MADE, monkeypatch))
    expect(page.locator("#findings-about")).to_have_text(MADE.headline)
    expect(page.locator("#findings-list .severity")).to_have_text(["critical", "warning"])
    first = page.locator("#findings-list .finding").first
    expect(first).to_contain_text("blocks.1.conv1, step 312")
    expect(first).to_contain_text("at blocks.1.conv1 · steps 312 to 399 · /home/me/train.py:48 · nan-origin")
    expect(first).to_contain_text("To do: Mask with a large negative number")
    evidence = first.locator("dd")
    expect(evidence.first).not_to_be_visible()
    first.locator("summary").click()
    expect(evidence).to_have_count(5)
    expect(evidence.first).to_be_visible()
    expect(evidence.first).to_have_text("rows that are all -inf: 3 (> 0)")
    page.locator("#findings-rest summary").click()
    expect(page.locator("#findings-rest dd")).to_have_text(["no learning rate was recorded"])


@pytest.mark.browser
def test_its_button_opens_the_curves_and_marks_the_step(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.open(write(tmp_path, MADE, monkeypatch))
    page.locator("#findings-list button").first.click()
    expect(page.locator(".panel h3")).to_have_text("blocks.1.conv1:output")
    expect(page.locator("#zoom")).to_contain_text("279")
    expect(page.locator("#quantities [aria-pressed=true]")).to_have_text("Activations")


@pytest.mark.browser
def test_a_healthy_run_says_so(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = Findings((), (), "400 steps at 60 sites", ["a", "b"])
    page = visit.open(write(tmp_path, healthy, monkeypatch))
    expect(page.locator("#findings-title")).to_have_text("No findings")
    expect(page.locator("#findings-about")).to_have_text("no findings in 400 steps at 60 sites; 2 checks")
    expect(page.locator("#findings-rest details")).to_have_count(0)


@pytest.mark.browser
def test_five_are_seen_and_text_stays_text(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = Finding(
        detector=HOSTILE, severity="note", message=HOSTILE, site=HOSTILE, line=HOSTILE, repair=HOSTILE, refute=HOSTILE
    )
    visit.page.set_viewport_size({"width": 390, "height": 800})
    page = visit.open(write(tmp_path, Findings([hostile, *[SYMPTOM] * 6]), monkeypatch))
    expect(page.locator("#findings-list > .finding")).to_have_count(5)
    expect(page.locator("#findings-list .said > p").first).to_have_text(HOSTILE)
    expect(page.locator("#findings-rest .tally")).to_have_text("2")
    page.locator("#findings-rest summary").first.click()
    expect(page.locator("#findings-rest .finding")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
