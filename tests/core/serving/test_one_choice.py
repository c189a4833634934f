"""The page of a folder and ``retrograd ls`` choose and order the same runs: one table of questions goes to both."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from retrograd.core.history.sink import Event, Moment
from retrograd.core.runs.listed import choose_listed, list_columns, read_listed
from tests.core.runs.written import open_writer
from tests.core.serving.served import serving
from tests.core.serving.test_list_page import page  # noqa: F401  # a fixture

RUNS = {
    "run2": (["--lr", "0.1", "--name", "straße", "--acc", "0.25"], 0.5),
    "run10": (["--lr", "1e-05", "--name", "inf", "--on"], math.nan),
    "run-1": (["--lr", "1", "--name", "1_000", "--seed", "9007199254740993"], math.inf),
    "run_1": (["--lr", "0x10", "--name", "", "--seed", "12"], 0.0),
    "Run1": (["--lr", "nan", "--name", "12"], -3.0),
    "9": (["--lr", "0.0", "--name", "none", "--seed", "1e400", "--tiny", "1e-07"], 1e-9),
}
VALUES = [
    "",
    "none",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "Infinity",
    "0",
    "-0",
    ".5",
    "1.",
    "1e-5",
    "0.00001",
    "1_000",
    "0x10",
]
VALUES += ["true", "false", "abc", "run2", "9", "finished", "12", "9007199254740993", "straße", "STRASSE", "+0.5"]
WORDS = ["=1", "=0.00001", "1e-05", "=1e-7", "RUN", "finished", "=12", "=true", "none", "=0.0", "straSSe"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Runs with what a command line can hold: numbers of all kinds, texts that nearly are one, nothing."""
    for number, (name, (words, loss)) in enumerate(RUNS.items()):
        writer = open_writer(tmp_path / name)
        started = f"2026-01-0{number // 2 + 1}T00:00:00+00:00"
        writer.describe(command=["python", "train.py", *words], started=started)
        for step in range(3):
            writer.add_event(Event(Moment(step, 0, 0), "loss", value=loss, time=1.0))
            writer.add_event(Event(Moment(step, 0, 0), "scalar", name="acc", value=float(number % 3), time=1.0))
        writer.close("failed" if name == "run10" else "finished")
    return tmp_path


@pytest.mark.browser
def test_the_page_and_the_command_answer_alike(page: Page, folder: Path) -> None:  # noqa: F811
    runs = read_listed(folder)
    columns = list_columns(runs)
    asked = [
        f"{name}{sign}{value}" for name in columns for sign in ("=", "!=", "<", "<=", ">", ">=") for value in VALUES
    ]
    expected = [sorted(run.line.name for run in choose_listed(runs, "name", [each])) for each in asked]
    assert len({tuple(each) for each in expected}) > 20
    with serving(folder) as server:
        page.goto(server.address)
        expect(page.locator("#overlay .curve")).to_have_count(len(RUNS))
        found = page.evaluate(
            "asked => asked.map(q => module_query.chooseRuns({ q }, module_columns.listColumns()).runs)"
            ".map(runs => runs.map(({ name }) => name).toSorted())",
            asked,
        )
        assert dict(zip(asked, found, strict=True)) == dict(zip(asked, expected, strict=True))
        for word in WORDS:
            named = page.evaluate(
                "q => module_query.chooseRuns({ q }, []).runs.map(({ name }) => name).toSorted()", word
            )
            assert named == sorted(run.line.name for run in choose_listed(runs, "name", search=word)), word
        for name in columns:
            for turned in (False, True):
                ordered = page.evaluate(
                    "([name, turned]) => { const columns = module_columns.listColumns();"
                    " const column = module_columns.findColumn(name, columns);"
                    " const runs = module_columns.sortRuns(module_payload.facts.runs, column, turned);"
                    " return runs.map(({ name }) => name); }",
                    [name, turned],
                )
                assert ordered == [run.line.name for run in choose_listed(runs, name, is_reversed=turned)], name
