"""Calls of a module in a history: a name is all of them, merged exactly; a number is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrograd.core.errors import NoSuchSiteError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import make_batch

SITES = ["fc:output", "fc#2:output", "fc#3:output", "fc:output.grad", "once:output", "fc#2:input.x", "fc:weight.grad"]


def make_elements(step: int) -> dict[int, np.ndarray]:
    generator = np.random.default_rng(step)
    elements = {number: generator.standard_normal(5 + number) for number in range(len(SITES))}
    elements[1][0] = np.inf
    if step == 2:
        del elements[2]  # two calls only
    return elements


def make_calls(sink: History | RunWriter) -> None:
    sink.add_sites(SITES)
    for step in range(4):
        sink.add_rows(make_batch(Moment(step, 0, 0), make_elements(step)))


def write_calls(path: Path) -> None:
    writer = RunWriter(path)
    make_calls(writer)
    writer.close()


@pytest.fixture(params=["memory", "disk"])
def history(request: pytest.FixtureRequest, tmp_path: Path) -> History:
    if request.param == "memory":
        memory = History()
        make_calls(memory)
        return memory
    write_calls(tmp_path / "run")
    return open_run(tmp_path / "run").history


@pytest.mark.parametrize(("name", "number"), [("fc#1:output", 0), ("fc#2:output", 1), ("fc#3:output", 2)])
def test_a_number_is_one_call(history: History, name: str, number: int) -> None:
    steps = [step for step in range(4) if number in make_elements(step)]
    sums = [make_elements(step)[number][np.isfinite(make_elements(step)[number])].sum() for step in steps]
    series = history[name]
    assert (series.calls, series.steps.tolist()) == ([number + 1], steps)
    np.testing.assert_allclose(series.mean * (series.count - series.nonfinite), sums, rtol=1e-12)
    selected = history["fc:output"].select(call=number + 1)
    np.testing.assert_array_equal(selected.rms, series.rms)
    assert set(history["fc:output"].rows["call"]) == {1, 2, 3}


def test_it_says_so(history: History) -> None:
    assert "'fc:output': 3 calls merged, 4 steps" in repr(history["fc:output"])
    assert "merged" not in repr(history["fc#2:output"])
    assert "merged" not in repr(history["once:output"])


def test_the_first_of_several_calls_is_listed_with_its_number(history: History) -> None:
    listed = ["fc#1:output", "fc#2:output", "fc#3:output", "fc#1:output.grad", "once:output", "fc#2:input.x",
              "fc:weight.grad"]  # fmt: skip
    assert history.sites == listed
    assert [history[name].calls for name in listed] == [[1], [2], [3], [1], [1], [2], [1]]
    assert list(dict.fromkeys(history.table()["site"].to_pylist())) == listed
    assert history.select("fc:output") == ["fc#1:output", "fc#2:output", "fc#3:output"]
    assert history.select("fc#1:*") == ["fc#1:output", "fc#1:output.grad"]
    assert history.select(["*:outputs", "!fc#2"]) == ["fc#1:output", "fc#3:output", "once:output"]
    assert history.select("fc") == ["fc#1:output", "fc#2:output", "fc#3:output", "fc#1:output.grad", "fc:weight.grad"]
    assert history["fc:input.x"].calls == [2]


def test_what_was_not_recorded_is_not_there(history: History) -> None:
    assert "fc#1:output" in history
    assert "fc:output" in history
    for name in ("fc#4:output", "fc#1:input.x", "once#2:output", "fc#1:output.update"):
        assert name not in history
        with pytest.raises(NoSuchSiteError):
            history[name]


def test_a_matrix_has_lines_for_one_call_and_for_all(history: History) -> None:
    names = ["fc:output", "fc#2:output", "once:output", "fc#2:output"]
    matrix = history.matrix("l1", names)
    assert matrix.sites == names
    for line, name in zip(matrix.values, names, strict=True):
        np.testing.assert_array_equal(line[~np.isnan(line)], history[name].l1)
    whole = history.matrix("l1")
    for line, name in zip(whole.values, whole.sites, strict=True):
        np.testing.assert_array_equal(line[~np.isnan(line)], history[name].l1)


def test_files_have_the_first_call_without_a_number(tmp_path: Path) -> None:
    write_calls(tmp_path / "run")
    assert open_run(tmp_path / "run").manifest["sites"] == SITES


def test_why_something_is_not_there_is_told() -> None:
    history = History()
    history.describe(not_recorded=[{"site": "'fc#7:output'", "reason": "nothing matched"}, "odd"])
    with pytest.raises(NoSuchSiteError, match="nothing matched"):
        history["fc#7:output"]
