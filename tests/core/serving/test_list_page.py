"""The list of runs in a browser: what is searched, sorted and ticked is in the address, and Back leads back to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from scipy.stats import spearmanr

from retrograd.core.history.sink import Event, Moment
from tests.core.runs.written import open_writer
from tests.core.serving.served import serving

HOSTILE = "<img src=x onerror=alert(1)>"
RATES = {"run2": 0.1, "run10": 0.01, "run1": 0.001, "run20": 1.0, HOSTILE: 0.5}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Five runs of as many rates, whose losses end at ten times the rate; that of run20 becomes NaN."""
    for number, (name, rate) in enumerate(RATES.items()):
        writer = open_writer(tmp_path / name)
        writer.describe(
            command=["python", "train.py", "--lr", str(rate), "--name", HOSTILE if rate == 0.5 else "plain"],
            started=f"2026-01-0{number + 1}T00:00:00+00:00",
        )
        for step in range(20):
            value = math.nan if rate == 1.0 and step > 10 else 10 * rate
            writer.add_event(Event(Moment(step, 0, 0), "loss", value=value, time=1.0))
        writer.close("failed" if rate == 0.01 else "finished")
    return tmp_path


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    yield page
    context.close()
    assert said == []


def names(page: Page) -> list[str]:
    return page.locator("#runs td.name a").all_inner_texts()


@pytest.mark.browser
def test_the_address_holds_what_is_listed_and_the_way_back_leads_to_it(page: Page, sweep: Path) -> None:
    with serving(sweep) as server:
        page.goto(server.address)
        expect(page.locator("#overlay .curve")).to_have_count(5)
        assert names(page) == [HOSTILE, "run20", "run1", "run10", "run2"]
        page.get_by_role("button", name="run", exact=True).click()
        assert names(page)[1:] == ["run1", "run2", "run10", "run20"]
        page.get_by_role("button", name="final loss").click()
        assert names(page) == ["run1", "run10", "run2", HOSTILE, "run20"]
        page.get_by_role("button", name="final loss").click()
        assert names(page) == [HOSTILE, "run2", "run10", "run1", "run20"]
        page.locator("#search").fill("lr<=0.1")
        assert names(page) == ["run2", "run10", "run1"]
        page.locator("#status").select_option("finished")
        expect(page.locator("#count")).to_have_text("2 of 5 runs")
        page.get_by_label("compare run2").check()
        page.get_by_label("compare run1").check()
        expect(page.locator("#overlay .curve")).to_have_count(2)
        address = page.url

        other = page.context.new_page()
        other.goto(address)
        assert names(other) == ["run2", "run1"]
        expect(other.locator("#picked")).to_have_text("run2, run1")
        other.close()

        page.get_by_role("link", name="run2").click()
        page.wait_for_selector("html[data-ready=yes]")
        page.get_by_role("link", name="← All runs").click()
        expect(page.locator("#count")).to_have_text("2 of 5 runs")
        assert page.url == address
        page.locator("#compare").click()
        expect(page.locator("#settings tr")).to_have_text(["final loss10.01", "--lr0.10.001"])
        expect(page.locator("#start-overlay .curve")).to_have_count(2)
        page.get_by_role("link", name="← All runs").click()
        assert page.url == address
        page.locator("#clear").click()
        expect(page.locator("#count")).to_have_text("5 runs")
        page.goto("about:blank")


@pytest.mark.browser
def test_a_wrong_column_is_answered_and_a_narrow_page_fits(page: Page, sweep: Path) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    with serving(sweep) as server:
        page.goto(f"{server.address}#q=rate%3D3")
        expect(page.locator("#wrong")).to_contain_text("No run has a column “rate”")
        page.locator("#search").fill('name="run20"')
        assert names(page) == ["run20"]
        page.locator("#search").fill("onerror")
        assert names(page) == [HOSTILE]
        page.locator("#search").fill("")
        page.locator("#sort").select_option("--lr")
        assert names(page) == ["run1", "run10", "run2", HOSTILE, "run20"]
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        expect(page.locator("#parallel .curve")).to_have_count(4)
        page.goto("about:blank")


@pytest.mark.browser
@pytest.mark.parametrize("diverges", [False, True])
def test_runs_that_diverge_leave_room_for_the_others(page: Page, tmp_path: Path, *, diverges: bool) -> None:
    for number in range(5):
        writer = open_writer(tmp_path / f"run{number}")
        for step in range(40):
            is_lost = diverges and number == 0 and step > 36
            writer.add_event(Event(Moment(step), "loss", value=10.0**step if is_lost else 1 + number / 10, time=1.0))
        writer.close("finished")
    with serving(tmp_path) as server:
        page.goto(server.address)
        expect(page.locator("#overlay .curve")).to_have_count(5)
        said = page.locator("#overlay .reading-line")
        expect(said).to_have_text(f"Point at a line to read it.{' Losses above 1.4 are left out.' * diverges}")
        boxes = [box for line in page.locator("#overlay .curve").all()[1:] if (box := line.bounding_box())]
        assert max(box["y"] for box in boxes) - min(box["y"] for box in boxes) > 100  # pixels
        page.goto("about:blank")


@pytest.mark.browser
def test_a_number_is_short_however_large(page: Page, sweep: Path) -> None:
    with serving(sweep) as server:
        page.goto(server.address)
        expect(page.locator("#overlay .curve")).to_have_count(5)
        given = [0.001, 1234.56, 9_999_999, 1e9, -1.23456e15, 1e30]
        printed = page.evaluate("numbers => numbers.map(module_overlay.printShort)", given)
        assert printed == ["0.001", "1235", "1e+7", "1e+9", "-1.235e+15", "1e+30"]
        page.goto("about:blank")


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1400])
def test_axes_are_settings_with_the_values_that_runs_have(page: Page, tmp_path: Path, width: int) -> None:
    """The oracle is scipy: of nine settings those seven are drawn that order the runs most like the final loss."""
    settings, losses = {}, []
    generator = np.random.default_rng(0)
    for number in range(12):
        values = generator.integers(1, 4, 9)
        words = [word for k in range(9) for word in (f"--gradient-accumulation-steps-{k}", str(values[k]))]
        settings[number], loss = values, float(values[4] - values[7] + generator.random() + 3)
        writer = open_writer(tmp_path / f"run{number}")
        writer.describe(command=["python", "train.py", *words])
        writer.add_event(Event(Moment(0, 0, 0), "loss", value=loss, time=1.0))
        writer.add_event(Event(Moment(0, 0, 0), "scalar", name="accuracy", value=-loss, time=1.0))
        writer.close("finished")
        losses.append(loss)
    agreement = [abs(spearmanr([settings[n][k] for n in range(12)], losses).statistic) for k in range(9)]
    kept = sorted(sorted(range(9), key=lambda k: agreement[k])[2:])
    page.set_viewport_size({"width": width, "height": 900})
    with serving(tmp_path) as server:
        page.goto(server.address)
        expect(page.locator("#parallel .curve")).to_have_count(12)
        titles = page.locator("#parallel .axis-title")
        assert titles.all_text_contents() == [f"--gradient-accumulation-steps-{k}" for k in kept] + ["final loss"]
        ticks = page.locator("#parallel text:not(.axis-title)").all_text_contents()
        assert ticks[:21] in (["1", "3", "2"] * 7, ["1", "2", "3"] * 7)
        boxes = page.locator("#parallel text").evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().toJSON())"
        )
        assert not [
            (a, b)
            for a, b in itertools.combinations(boxes, 2)
            if min(a["right"], b["right"]) > max(a["left"], b["left"]) + 1
            and min(a["bottom"], b["bottom"]) > max(a["top"], b["top"]) + 1
        ]
        assert all(box["left"] >= 0 and box["right"] <= width for box in boxes)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.goto("about:blank")


@pytest.mark.browser
def test_the_file_that_a_browser_is_given_leads_to_the_page(page: Page, sweep: Path) -> None:
    with serving(sweep) as server:
        path = server.write_redirect()
        page.goto(path.as_uri())
        page.wait_for_url(server.address)
        expect(page.get_by_role("link", name="run10")).to_be_visible()
        assert not path.exists()  # a server that is killed would leave it
