"""What is printed for tools is as the schema says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from torch import nn

import retrograd as rg
from retrograd.core.cli import main
from tests.explaining.findings.made import MADE
from tests.explaining.launch.test_explaining import record_run

MADE_BY = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "make_json_schema.py"))
SCHEMA: Path = MADE_BY["SCHEMA"]


def check(value: object) -> None:
    """Hold a value to the schema with a library that knows these."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(value)


def test_the_schema_is_that_of_the_classes() -> None:
    assert SCHEMA.read_text() == MADE_BY["describe_json"](), "run `python docs/make_json_schema.py`"


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--schema"]) == 0
    assert capsys.readouterr().out == SCHEMA.read_text()


def test_what_the_command_prints_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(record_run(tmp_path / "run", lr=1e30))
    assert main(["explain", "--json", run]) == 0
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert findings
    assert main(["explain", "--card", "--json", run]) == 0
    [card] = map(json.loads, capsys.readouterr().out.splitlines())
    assert card == rg.describe(run).as_dict()
    for each in (card, *findings, *(finding.as_dict() for finding in MADE)):
        check(each)


@pytest.mark.parametrize("change", [{"severity": "bad"}, {"step": "3"}, {"line": None}])
def test_the_schema_refuses_what_is_none(change: dict[str, object]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        check({**MADE[0].as_dict(), **change})


def test_a_card_in_a_notebook_is_plain_markup() -> None:
    with rg.record(nn.Linear(4, 2)) as recording:
        pass
    assert "<script" not in rg.describe(recording)._repr_html_()
