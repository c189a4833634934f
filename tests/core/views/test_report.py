"""What a report holds, read from the file."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from retrograd.core.errors import RunWriteError
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment, RowBatch
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from retrograd.core.views.report import write_report
from tests.core.views.invented import Numbers, invent_training, make_history, make_rows, name_resnet
from tests.core.views.unpacking import Page
from tests.memory.views.invented_inventory import invent_inventory


def write(history: History, tmp_path: Path, **options: object) -> Page:
    return Page(write_report(history, tmp_path / "report.html", **options))


def test_few_steps_are_all_there_in_full_precision(tmp_path: Path) -> None:
    numbers = invent_training(name_resnet(1), 50)
    page = write(make_history(numbers), tmp_path)
    assert page.facts["columns"] == {"first": [*range(50)], "last": [*range(50)], "width": 1, "total": 50}
    assert page.facts["digits"] is None
    row = numbers.sites.index("blocks.0.conv1:output.grad")
    np.testing.assert_allclose(page.line("rms", "low", numbers.sites[row]), numbers.rms[row], rtol=1e-6)


def test_many_steps_share_columns_that_keep_their_extremes(tmp_path: Path) -> None:
    rms = np.full((1, 5000), 1.0)
    rms[0, 1234], rms[0, 4321] = 1e6, 1e-6
    page = write(make_history(Numbers(["a:output.grad"], rms)), tmp_path)
    assert page.facts["columns"]["width"] == 5
    assert len(page.facts["columns"]["first"]) == 1000
    high, low = (page.line("rms", band, "a:output.grad") for band in ("high", "low"))
    assert np.flatnonzero(high > 2).tolist() == [1234 // 5]
    assert np.flatnonzero(low < 0.5).tolist() == [4321 // 5]
    assert high.max() == pytest.approx(1e6)
    assert low.min() == pytest.approx(1e-6)


def test_a_small_file_is_bought_with_digits_and_columns(tmp_path: Path) -> None:
    history = make_history(invent_training(name_resnet(2), 3000, bins=0))
    target = tmp_path / "report.html"
    sizes = [write_report(history, target, megabytes=size).stat().st_size for size in (20, 2, 1)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[1] < 2e6
    assert Page(target).facts["digits"] == 3


def test_a_step_without_record_is_no_number(tmp_path: Path) -> None:
    recorded = np.ones((2, 6), dtype=bool)
    recorded[1, 2:4] = False
    numbers = Numbers(["a:output", "b:output"], np.full((2, 6), 2.0), recorded=recorded)
    page = write(make_history(numbers), tmp_path)
    assert np.isnan(page.line("rms", "low", "b:output")).tolist() == [False, False, True, True, False, False]


def test_what_autograd_keeps_is_in_the_run_or_given(tmp_path: Path) -> None:
    """Three pieces of memory, held at once at position 2: see ``invent_inventory``."""
    writer = RunWriter(tmp_path / "run")
    writer.close()
    run = open_run(tmp_path / "run")
    assert Page(write_report(run)).facts["inventory"] is None
    invent_inventory().save(run.ranks[0].folder / "inventory.parquet")
    pages = [Page(write_report(run)), write(History(), tmp_path, inventory=invent_inventory())]
    for page in pages:
        assert page.facts["inventory"]["peak"] == 2
        kept = json.loads(gzip.decompress(base64.b64decode(page.scripts["block-inventory"])))
        assert max(kept["held"]) == 7000


def test_a_value_and_its_gradient_and_update_are_one_place(tmp_path: Path) -> None:
    sites = ["fc:output", "fc:output.grad", "fc:weight.grad", "fc:weight.update", "watch/logits", "rnn#2:output"]
    page = write(make_history(Numbers(sites, np.ones((6, 3)))), tmp_path)
    places = {place["name"]: (place["kind"], place["label"], place["series"]) for place in page.facts["places"]}
    assert places == {
        "fc:output": ("activation", "output", {"value": 0, "grad": 1}),
        "fc:weight": ("parameter", "weight", {"grad": 2, "update": 3}),
        "watch/logits": ("activation", "", {"value": 4}),
        "rnn#2:output": ("activation", "#2:output", {"value": 5}),
    }


def test_another_phase_is_shown_when_there_was_no_training(tmp_path: Path) -> None:
    history = make_history(Numbers(["a:output"], np.ones((1, 3))), phase="eval")
    history.add_sites(["b:output"])
    page = write(history, tmp_path)
    assert page.facts["sites"] == ["a:output"]
    assert ["shown here", "phase “eval”, micro-batches and ranks merged"] in page.facts["recorded"]
    assert page.facts["troubles"] == []  # of what nothing was recorded nothing is listed


def test_statistics_of_the_user_are_there_too(tmp_path: Path) -> None:
    history = make_history(Numbers(["a:output"], np.ones((1, 1)), bins=0))
    row = make_rows(Numbers(["a:output"], np.ones((1, 1)), bins=0))[0].tobytes()
    history.add_rows(RowBatch(Moment(1), row, custom={"skew": ([0], [-2.5])}))
    history.describe(statistics=["skew", "never_came"])
    page = write(history, tmp_path)
    assert page.line("skew", "low", "a:output")[-1] == -2.5
    assert [measure["signed"] for measure in page.facts["measures"] if measure["name"] == "skew"] == [True]


def test_losses_of_steps_between_recorded_ones_are_kept(tmp_path: Path) -> None:
    history = make_history(Numbers(["a:output"], np.ones((1, 3)), every=10))
    for step, loss in enumerate([5.0, 9.0, 1.0, 4.0]):
        history.add_event(Event(Moment(step * 5), "loss", value=loss))
    page = write(history, tmp_path)
    low, mean, high = page.scalar("loss")
    assert np.array_equal(low, [5.0, 1.0, np.nan], equal_nan=True)
    assert np.array_equal(mean, [7.0, 2.5, np.nan], equal_nan=True)
    assert np.array_equal(high, [9.0, 4.0, np.nan], equal_nan=True)


def test_a_run_folder_names_the_page_and_gets_the_file(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "digits")
    writer.add_sites(["a:output"])
    writer.add_rows(RowBatch(Moment(0), make_rows(Numbers(["a:output"], np.ones((1, 1)), bins=0))[0].tobytes()))
    writer.describe(schedule="every(1)")
    writer.close()
    target = write_report(open_run(tmp_path / "digits"))
    assert target == tmp_path / "digits" / "report.html"
    page = Page(target)
    assert page.facts["title"] == "digits"
    assert page.facts["status"] == {"text": "finished", "kind": "good"}
    assert ["ranks", "1"] in page.facts["header"]
    assert ["schedule", "every(1)"] in page.facts["recorded"]


def test_an_empty_history_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page = write(History(), tmp_path)
    assert page.facts["places"] == []
    assert "Nothing was recorded" in page.text


def test_a_file_that_cannot_be_written_is_an_error_with_a_repair(tmp_path: Path) -> None:
    with pytest.raises(RunWriteError, match="Try: give a file in a folder that exists"):
        write_report(History(), tmp_path / "missing" / "report.html")
