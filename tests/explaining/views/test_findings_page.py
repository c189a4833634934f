"""Findings on top of the report."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from retrograd.core.history.sink import Event
from retrograd.core.runs.findings import Explained, Finding, Findings
from retrograd.core.views.report import report, write_report
from retrograd.core.views.report.findings import describe_findings
from retrograd.core.views.report.scope import choose_scope
from tests.browser import Visit
from tests.core.views.invented import invent_training, make_history, name_resnet
from tests.core.views.test_page import HOSTILE
from tests.explaining.findings.made import MADE, SYMPTOM
from tests.explaining.findings.programs import make_optimizer


@pytest.mark.parametrize(
    ("site", "steps", "visit"),
    [
        ("blocks.1.conv1:output.grad", (3, 9), ("blocks.1.conv1:output.grad", 3, 9)),
        ("blocks.1.conv1", (3, None), ("blocks.1.conv1:output", 3, 3)),
        ("blocks.1.conv1:weight", (None, None), ("blocks.1.conv1:weight.grad", 0, 19)),
        ("blocks.1", (7, None), ("blocks.1:output", 7, 7)),
        ("blocks.1.conv1:input.x", (7, None), ("blocks.1.conv1:output", 7, 7)),
        ("SGD", (3, 9), ("blocks.1.conv1:weight.update", 3, 9)),
        ("SGD", (None, None), ("blocks.1.conv1:weight.update", 0, 19)),
        ("SGD_2", (3, 9), (None, 3, 9)),
        ("nowhere", (3, None), (None, 3, 3)),
        ("nowhere", (None, None), None),
        ("", (3, 9), (None, 3, 9)),
        ("", (None, None), (None, 0, 19)),
    ],
)
def test_a_finding_leads_to_the_curves_of_its_site_or_to_the_loss(
    site: str, steps: tuple[int | None, int | None], visit: object
) -> None:
    history = make_history(invent_training(name_resnet(), 20))
    made = make_optimizer(names=["gone:weight", "blocks.1.conv1:weight"])
    history.add_event(Event(made.moment, made.kind, made.name, made.value, made.text))
    scope = choose_scope(history, None, 1000, 8.0)
    finding = Finding(detector="a", severity="note", message="b", site=site, step=steps[0], last_step=steps[1])
    (described,) = describe_findings(Findings([finding]), scope)["listed"]
    assert described["visit"] == (visit and dict(zip(("site", "step", "last"), visit, strict=True)))


def test_without_a_loss_only_sites_are_shown() -> None:
    history = make_history(replace(invent_training(name_resnet(), 5), loss=None))
    found = [Finding(detector="a", severity="note", message="b", site=site, step=3) for site in ("", "SGD", "stem")]
    listed = describe_findings(Findings(found), choose_scope(history, None, 1000, 8.0))["listed"]
    assert [each["visit"] and each["visit"]["site"] for each in listed] == [None, None, "stem.conv:output"]


CARD = [
    {"topic": "loss", "label": "", "text": f"<b>mse</b> {HOSTILE}", "line": "/home/me/train.py:48", "details": ()},
    {"topic": "optimizer", "label": "Adam", "text": "lr 0.1", "line": "", "details": ("2 tensors", "<i>4</i> tensors")},
]


def write(path: Path, findings: Findings, monkeypatch: pytest.MonkeyPatch, card: Any = ()) -> Path:
    monkeypatch.setattr(report, "explain_for_page", lambda run, names: Explained(findings, card=card))
    return write_report(make_history(invent_training(name_resnet(), 400)), path / "report.html")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1440, 390])
def test_what_it_did_stands_on_top(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 900})
    visit.page.emulate_media(color_scheme="dark" if width < 400 else "light")
    page = visit.open(write(tmp_path, MADE, monkeypatch, CARD))
    expect(page.locator("#did dt")).to_have_text(["loss", "optimizer"])
    expect(page.locator("#did dd").first).to_have_text(f"<b>mse</b> {HOSTILE} train.py:48")
    second = page.locator("#did dd").nth(1)
    expect(second).to_contain_text("Adam: lr 0.1")
    expect(second.locator("li").first).not_to_be_visible()
    second.locator("summary").click()
    expect(second.locator("li")).to_have_text(["2 tensors", "<i>4</i> tensors"])
    top = page.locator("#did").bounding_box(), page.locator("#findings").bounding_box()
    assert top[0] is not None and top[1] is not None and top[0]["y"] < top[1]["y"]  # noqa: PT018
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.browser
def test_a_run_of_which_nothing_is_known_has_no_card(
    visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.open(write(tmp_path, MADE, monkeypatch))
    expect(page.locator("#did")).to_be_hidden()


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
    spike = replace(SYMPTOM, step=100, last_step=140)
    page = visit.open(write(tmp_path, Findings([spike, *MADE]), monkeypatch))
    page.get_by_role("button", name="Show the loss").click()
    expect(page.locator("#zoom")).to_have_text("steps 67–173")
    expect(page.locator("#loss-charts .reading")).to_be_in_viewport()
    expect(page).to_have_url(re.compile("range=full"))  # a spike is not cut off
    expect(page.locator(".panel")).to_have_count(0)
    page.get_by_role("button", name="Show it").first.click()
    expect(page.locator(".panel h3")).to_have_text("blocks.1.conv1:output")
    expect(page.locator("#zoom")).to_contain_text("279")
    expect(page.locator("#count")).to_contain_text(re.compile(r"steps 279–399 of 0–399"))
    expect(page.locator("#quantities [aria-pressed=true]")).to_have_text("Activations")


@pytest.mark.browser
@pytest.mark.parametrize(("first", "last"), [(0, None), (0, 399), (None, None)])
def test_what_concerns_all_of_a_run_shows_all_of_it(
    first: int | None, last: int | None, visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = replace(next(iter(MADE)), step=first, last_step=last)
    page = visit.open(write(tmp_path, Findings([finding]), monkeypatch))
    page.get_by_role("button", name="Show it").first.click()
    expect(page.locator(".panel h3")).to_have_text("blocks.1.conv1:output")
    expect(page.locator("#reset")).to_be_hidden()


@pytest.mark.browser
def test_a_healthy_run_says_so(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = Findings((), (), "400 steps at 60 sites", ["a", "b"])
    page = visit.open(write(tmp_path, healthy, monkeypatch))
    expect(page.locator("#findings-title")).to_have_text("No findings")
    expect(page.locator("#findings-about")).to_have_text("in 400 steps at 60 sites; 2 checks")
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
