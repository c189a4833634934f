"""Findings as data: how many are said, what they survive, and what a notebook is given."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import retrograd as rg
from retrograd.core.errors import ExplainError, NotARunError
from retrograd.core.runs.findings import SHOWN, Evidence, Finding, Findings
from retrograd.explaining.findings.detector import Detector, Words
from retrograd.explaining.findings.record import CannotTell, Record
from tests.explaining.findings.made import BORN, DEAD, MADE, SYMPTOM

HOSTILE = '</dd><script>alert("owned")</script><img src=x onerror=alert(1)>'


class Always(Detector):
    slug = "always"
    words = Words(*["x"] * 6)

    def check(self, record: Record) -> list[Finding]:
        return [self.find("note", f"{len(record.loss.values)} losses were seen.", step=0)]


class Never(Always):
    slug = "never"

    def check(self, record: Record) -> list[Finding]:
        raise CannotTell("it is not told")


class Broken(Always):
    slug = "broken"

    def check(self, record: Record) -> list[Finding]:
        raise KeyError("a fault of ours")


def train(model: torch.nn.Module) -> None:
    model(torch.ones(4, 2)).sum().backward()


def test_json_carries_every_field() -> None:
    (line, other) = MADE.as_json_lines().splitlines()
    assert tuple(map(Finding.of_dict, map(json.loads, (line, other)))) == (BORN, DEAD)
    found = json.loads(line)
    assert found["causes"][0]["detector"] == "flat-loss"
    assert found["evidence"][0] == {"name": "rows that are all -inf", "value": 3, "threshold": "> 0"}


def test_a_number_that_is_not_finite_is_text_in_json() -> None:
    finding = Finding(detector="a", severity="note", message="b", evidence=(Evidence("rms", float("nan")),))
    assert json.loads(finding.as_json(), parse_constant=pytest.fail)["evidence"][0]["value"] == "nan"


def test_at_most_five_are_said() -> None:
    assert len(Findings([SYMPTOM] * 7).said) == SHOWN == 5


def test_a_severity_is_reached_by_what_is_explained_too() -> None:
    cause = Finding(detector="a", severity="warning", message="b", causes=(BORN,))
    assert Findings([cause]).reach("critical")
    assert not Findings([DEAD]).reach("critical")
    assert Findings([DEAD]).reach("note")
    assert not Findings().reach("note")


def test_a_line_that_the_sentence_names_is_not_said_again() -> None:
    finding = Finding(
        detector="nan", severity="critical", message="log of 0 (train.py:3), step 4.", line="/home/me/train.py:3"
    )
    assert str(finding) == "log of 0 (train.py:3), step 4"
    assert str(replace(finding, line="/home/me/train.py:9")) == "log of 0 (train.py:3), step 4 (train.py:9)"


def test_the_headline_counts() -> None:
    assert MADE.headline == "2 findings in 400 steps at 60 sites; 2 of 3 checks applied"
    assert MADE.of("dead-units").headline.startswith("1 finding in 400 steps")
    assert Findings().headline == "no findings"


def test_a_notebook_is_given_text_and_no_markup_of_the_runs() -> None:
    hostile = Finding(
        detector="a", severity="note", message=HOSTILE, site=HOSTILE, line=HOSTILE, repair=HOSTILE, refute=HOSTILE
    )
    html = Findings([hostile], about=HOSTILE)._repr_html_()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(html)
    assert not {"script", "img"} & set(tags)
    assert "dead-units" in MADE._repr_html_()


def test_detectors_of_ones_own_are_asked(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with rg.record(model, tmp_path / "run") as recording:
        train(model)
        assert rg.explain(recording, detectors=[Always()]).asked == ("always",)
    for what in (recording, recording.history, tmp_path / "run", str(tmp_path / "run"), rg.open_run(tmp_path / "run")):
        found = rg.explain(what, detectors=[Always(), Never(), Broken()])
        assert [each.message for each in found] == ["1 losses were seen."]
        assert [(each.detector, each.reason) for each in found.not_checked] == [
            ("never", "it is not told"),
            ("broken", "it failed: KeyError: 'a fault of ours'"),
        ]
        assert found.asked == ("always", "never", "broken")


def test_what_was_not_recorded_cannot_be_explained(tmp_path: Path) -> None:
    with pytest.raises(ExplainError, match="Linear is not a run, a recording or a history"):
        rg.explain(torch.nn.Linear(2, 1))  # type: ignore[arg-type]
    with pytest.raises(NotARunError):
        rg.explain(tmp_path)
