"""``retrograd mcp``, asked by the SDK's own client over standard input and output."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcp import Client, StdioServerParameters
from torch import nn

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.limits import LIMITS
from retrograd.explaining.launch.run_tools import RunTools
from tests.commands import ENVIRONMENT
from tests.explaining.launch.test_explaining import record_run

HOSTILE = '<img src=x onerror=alert(1)> "; drop'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, beside one that is not to be read."""
    home = tmp_path_factory.mktemp("home")
    record_run(home / "runs" / "well")
    record_run(home / "runs" / "ill", lr=1e30)
    record_run(home / "runs" / HOSTILE, steps=3)
    record_run(home / "secret", steps=3)
    (home / "runs" / "link").symlink_to(home / "secret")
    (home / "runs" / "plain").mkdir()
    return home / "runs"


def ask(root: Path, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[tuple[bool, Any]]]:
    """The tools of a server, and what it answers to calls: whether that is an error, and the answer."""

    async def talk() -> tuple[list[Any], list[tuple[bool, Any]]]:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "retrograd", "mcp", str(root)], env=ENVIRONMENT, cwd=root.parent
        )
        async with Client(command, read_timeout_seconds=200) as client:
            listed = (await client.list_tools()).tools
            answers = []
            for name, arguments in calls:
                found = await client.call_tool(name, arguments)
                [content] = found.content
                answers.append((bool(found.is_error), content.text if found.is_error else found.structured_content))
            return listed, answers

    with ThreadPoolExecutor(1) as beside:  # a browser of other tests has a loop that runs in this thread
        return beside.submit(asyncio.run, talk()).result()


def test_a_client_reads_runs(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.parent.rglob("*") if path.is_file()}
    listed, answers = ask(
        root,
        ("list_runs", {}),
        ("describe", {"run": "well"}),
        ("explain", {"run": "ill"}),
        ("series", {"run": "well", "name": "loss"}),
        ("compare", {"a": "well", "b": "ill"}),
        ("explain", {"run": "nowhere"}),
        ("explain", {}),
    )
    assert [each.name for each in listed] == ["list_runs", "describe", "explain", "series", "compare"]
    assert all(each.annotations.read_only_hint for each in listed)
    assert all("self" not in each.input_schema["properties"] and each.description for each in listed)
    assert [is_error for is_error, _ in answers] == [False] * 5 + [True] * 2
    runs, card, findings, series, difference, missing, wrong = (answer for _, answer in answers)
    assert {each["name"] for each in runs["runs"]} == {"well", "ill", HOSTILE}
    assert [each["text"] for each in card["lines"]] == list(map(str, rg.describe(root / "well").lines))
    assert card["sites"] == rg.open_run(root / "well").history.sites
    assert findings["findings"] == [each.as_dict() for each in rg.explain(root / "ill")]
    loss = rg.open_run(root / "well").history.loss
    [only] = series["series"]
    assert only["steps"] == loss.steps.tolist()
    assert np.allclose(only["values"], loss.values, rtol=1e-5)
    assert difference["verdict"] == "different"
    assert "'nowhere' is not a run. [not-a-run]" in missing
    assert "Try: call list_runs" in missing
    assert "run" in wrong
    assert {path: path.stat().st_mtime_ns for path in root.parent.rglob("*") if path.is_file()} == before


# ---- the tools themselves ----


@pytest.mark.parametrize("name", ["../secret", "link", "/etc", "..", "plain", "", "s3://bucket/run", "well\0"])
def test_nothing_else_is_read(root: Path, name: str) -> None:
    tools = RunTools(root)
    reads = (tools.describe, tools.explain, partial(tools.series, name="loss"), partial(tools.compare, b="ill"))
    for read in reads:
        with pytest.raises((rg.RetrogradError, ValueError)):
            read(name)


def test_a_name_may_be_anything(root: Path) -> None:
    assert RunTools(root).describe(HOSTILE)["run"] == HOSTILE


def test_runs_are_chosen(root: Path) -> None:
    tools = RunTools(root)
    assert [each["name"] for each in tools.list_runs(search="well")["runs"]] == ["well"]
    assert [each["name"] for each in tools.list_runs(sort="steps", conditions=("steps<10",))["runs"]] == [HOSTILE]
    with pytest.raises(rg.RetrogradError, match="did you mean"):
        tools.list_runs(sort="stepz")


def test_series_of_sites(root: Path) -> None:
    tools, history = RunTools(root), rg.open_run(root / "well").history
    found = tools.series("well", "*:weight.grad", "abs_max")
    assert [each["name"] for each in found["series"]] == ["0:weight.grad", "2:weight.grad"]
    for each in found["series"]:
        assert each["steps"] == history[each["name"]].steps.tolist()
        assert np.allclose(each["values"], history[each["name"]].abs_max, rtol=1e-5)
    for name, statistic in (("0:wait", "rms"), ("0:weight.grad", "rmz")):
        with pytest.raises(rg.RetrogradError):
            tools.series("well", name, statistic)


def test_what_is_not_finite_is_text(root: Path) -> None:
    values = RunTools(root).series("ill", "loss")["series"][0]["values"]
    assert "nan" in values
    json.dumps(values, allow_nan=False)


def test_answers_are_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "tool_steps", 7)
    monkeypatch.setattr(LIMITS, "tool_letters", 100)
    tools = RunTools(root)
    [loss] = tools.series("well", "loss")["series"]
    assert loss["steps"] == [0, 6, 13, 20, 26, 32, 39]  # of 40, the first and the last among them
    assert loss["recorded"] == 40
    sites = tools.describe("well")
    assert len(json.dumps(sites["sites"])) < 200
    assert len(sites["sites"]) + sites["left_out"] == sites["count"] == len(rg.open_run(root / "well").history.sites)
    findings = tools.explain("ill")
    assert len(findings["findings"]) == 1  # one at least, however long
    assert findings.get("left_out", 0) == findings["count"] - 1


def test_an_empty_run(tmp_path: Path) -> None:
    with rg.record(nn.Linear(1, 1), tmp_path / "run"):
        pass
    tools = RunTools(tmp_path)
    assert tools.explain("run")["findings"] == []
    assert tools.list_runs()["count"] == 1
    with pytest.raises(rg.RetrogradError):
        tools.series("run", "loss")


def test_where_the_sdk_is_missing_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("retrograd.core.libraries.version", find)
    assert main(["mcp", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "mcp is not installed. [missing-library]" in said
    assert "pip install 'retrograd[mcp]'" in said


def test_a_folder_that_is_not_there_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "nope"]) == 2
    assert "'nope' is not a folder" in capfd.readouterr().err
