"""A run followed in the terminal, against the losses and rows that were written."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from retrograd.core.history.sink import Event, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import Finding
from retrograd.core.runs.reader import open_run
from retrograd.core.views import followed
from retrograd.core.views.table import format_table
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer


def test_a_line_a_flush_until_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = open_writer(tmp_path / "run")
    for batch in make_steps([1, 2]):
        add_step(writer, batch)
    writer.flush()
    run = open_run(tmp_path / "run")
    glance = followed.glance_at(run)
    assert (glance.status, glance.step, glance.rate) == ("running", 2, 1.0)
    rms = run.history.matrix("rms")
    ratios = {site: values[1] / values[0] for site, values in zip(rms.sites, rms.values, strict=True)}
    for site, value, ratio in glance.changed:
        assert value == rms.values[rms.sites.index(site), 1]
        assert ratio == ratios[site]
    sizes = [abs(math.log2(ratio)) for _, _, ratio in glance.changed]
    assert sizes == sorted(sizes, reverse=True)

    coming = [3, 4]

    def go_on(seconds: float) -> None:
        if coming:
            add_step(writer, make_steps([coming.pop(0)])[0])
            writer.flush()
        else:
            writer.add_event(Event(Moment(5, 0, 0), "loss", value=math.nan, time=5.0))
            writer.close()

    monkeypatch.setattr(followed, "sleep", go_on)
    page = io.StringIO()
    followed.follow_run(run, file=page)
    lines = page.getvalue().splitlines()
    assert [line.split(", ")[:2] for line in lines] == [
        ["running", "step 2"],
        ["running", "step 3"],
        ["running", "step 4"],
        ["finished", "step 5"],
    ]
    assert "loss 4" in lines[2]
    assert "loss NaN" in lines[3]
    assert "loss NaN since step 5" in format_table(run)

    seen = io.StringIO()
    console = Console(file=seen, force_terminal=True, width=100, color_system=None)
    console.print(followed._draw(console, glance))
    assert "▁" in seen.getvalue()
    assert all(site in seen.getvalue() for site, _, _ in glance.changed)


def test_a_record_too_long_to_explain_shows_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(detector="dead-units", severity="critical", message="all units of a are dead", site="a:output")
    writer = open_writer(tmp_path / "run")
    for batch in make_steps([1, 2]):
        add_step(writer, batch)
    writer.add_event(Event(Moment(2), "finding", text=finding.as_json(), time=2.0))
    writer.close()
    monkeypatch.setattr(LIMITS, "explained_rows", 0)
    (said,) = followed.glance_at(open_run(tmp_path / "run")).findings
    assert said == "critical  all units of a are dead"
