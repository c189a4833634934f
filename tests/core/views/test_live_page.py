"""The page of a run that is recorded meanwhile, is killed, and is resumed, in a browser."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from retrograd.core.history.sink import Event, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import open_run
from retrograd.core.serving import followed_run
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer
from tests.core.serving.served import Training, serving, write_runs

pytestmark = pytest.mark.browser


COMPARE_HISTOGRAMS = """async () => {
    const tell = (found) => found && describe(found); // null: it is on its way
    const describe = ({ first, bins, columns, merged, cells }) => ({
        columns, merged,
        cells: [...cells]
            .map((code, at) => [first + Math.floor(at / columns), at % columns, code].join(" "))
            .filter((_, at) => cells[at]),
    });
    const { freshenExponents, forgetExponents, histogramOf, loadExponents } = module_exponents;
    await freshenExponents([0]);
    const added = tell(histogramOf(0));
    forgetExponents();
    await loadExponents([0]);
    return [added, tell(histogramOf(0))];
}"""


def last_step(page: Page) -> int:
    return int(page.locator("#facts").inner_text().split(" to ")[1].split(")")[0].replace(",", ""))


def wait_for_steps(page: Page, more_than: int) -> int:
    """Wait until the page shows later steps, and return the last one."""
    for _ in range(300):
        if last_step(page) > more_than:
            return last_step(page)
        page.wait_for_timeout(100)
    raise AssertionError(f"the page stays at step {last_step(page)}")


def test_it_follows_a_run_that_is_killed_and_resumed(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = write_runs(tmp_path / "runs")
    monkeypatch.setattr(LIMITS, "flush_seconds", 0.2)
    monkeypatch.setattr(LIMITS, "page_look_seconds", 0.1)
    monkeypatch.setattr(LIMITS, "page_columns", 40)  # so that steps come to share columns soon
    training = Training(parent / "going")  # before there are threads
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: asked.append(request.url))
    try:
        with serving(parent) as server:
            page.goto(server.address)
            expect(page.locator("#runs tr")).to_have_count(3, timeout=30_000)
            expect(page.get_by_role("link", name="<img src=x onerror=alert(1)>")).to_be_visible()
            page.get_by_role("link", name="going").click()
            page.wait_for_url("**/run/going*")
            page.wait_for_selector("html[data-ready=yes]")
            loaded = page.evaluate("performance.timeOrigin")
            expect(page.locator("#waiting")).to_be_hidden()
            expect(page.locator("#findings-about")).to_contain_text("checks")  # looked for meanwhile
            expect(page.locator(".status")).to_have_text("running")
            page.locator(".label", has_text="a").first.click()
            expect(page.locator(".panel .uplot").first).to_be_visible()
            first = wait_for_steps(page, last_step(page))
            wait_for_steps(page, max(first, 100))  # more than twice the columns: each holds several steps
            expect(page.locator("#notice")).to_contain_text("extremes kept")
            page.locator("#strip-names").get_by_text("logged").click()  # it came with a later step
            expect(page.locator(".strip-chart .uplot")).to_have_count(2)
            blocks = [re.search(r"numbers\?names=%5B%22rms.*&step=(\d+)", url) for url in asked]
            begins = [int(match[1]) for match in blocks if match]
            assert begins[0] == 0
            assert max(begins) > 0  # later only what came since

            training.kill()
            expect(page.locator(".status")).to_have_text("stopped")
            seen = last_step(page)
            training = Training(parent / "going")
            expect(page.locator(".status")).to_have_text("running")
            wait_for_steps(page, seen)
            expect(page.locator(".panel")).to_have_count(1)
            told = page.evaluate(
                """async () => {
                    const frame = () => new Promise((done) => requestAnimationFrame(done));
                    const isWhole = (loss) => loss && module_payload.facts.columns.first.every((step, i) =>
                        Math.abs(loss[i] - (step + module_payload.facts.columns.last[i]) / 2) < 1e-3);
                    let line, loss, logged, tries = 0;
                    do {
                        await frame();
                        [line, loss] = [module_measures.lineOf("rms", "mean", 0), module_measures.scalarLine(0)];
                        const { listed } = module_payload.facts.scalars;
                        logged = module_measures.scalarLine(listed.findIndex(({ name }) => name === "logged"));
                    } while ((!line || !isWhole(loss)) && ++tries < 1000); // the last column may grow
                    const { first, last, total } = module_payload.facts.columns;
                    return [line.length, loss.length, first.length, isWhole(loss), total, last.at(-1),
                        first.every((step, i) => step < 20 || Math.abs(logged[i] - loss[i]) < 1e-3)];
                }"""
            )
            assert told[0] == told[1] == told[2] <= 80
            assert told[3]  # the loss of a step is its number: columns hold what their steps had
            assert told[6]
            training.kill()
            steps = open_run(parent / "going").history["a:output"].steps  # a kill leaves losses without rows
            assert told[4] == np.count_nonzero(steps <= told[5])
            expect(page.locator(".status")).to_have_text("stopped")
            deadline = time.monotonic() + 20  # the last columns may be under way
            added, whole = page.evaluate(COMPARE_HISTOGRAMS)
            while (added is None or added != whole) and time.monotonic() < deadline:
                page.wait_for_timeout(200)
                added, whole = page.evaluate(COMPARE_HISTOGRAMS)
            assert added == whole  # columns that were added one after the other are those that are read together
            assert added["cells"]
            assert page.evaluate("performance.timeOrigin") == loaded  # it was never loaded again
            assert all(url.startswith(server.address) for url in asked)
            page.close()
    finally:
        training.kill()
    assert said == []


def test_a_page_says_what_it_waits_for(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "flush_seconds", 0.1)
    monkeypatch.setattr(LIMITS, "page_look_seconds", 0.05)
    now = time.time()
    writer = open_writer(tmp_path / "run", flush_seconds=0.05)
    page = browser.new_page()
    try:
        with serving(tmp_path / "run") as server:
            page.goto(server.address)
            page.wait_for_selector("html[data-ready=yes]")
            expect(page.locator("#waiting")).to_have_text("Waiting for the first step…")
            expect(page.locator("#nothing")).to_be_hidden()
            add_step(writer, make_steps([0])[0])
            writer.add_event(Event(Moment(0), "scalar", name="a", value=1.0, time=now + 60))
            writer.flush()
            page.locator(".label").first.wait_for()
            expect(page.locator("#waiting")).to_be_hidden()
            clock = time.time
            monkeypatch.setattr(followed_run.time, "time", lambda: clock() + 60 + 41)
            expect(page.locator("#waiting")).to_have_text(re.compile(r"No new step for 4\d s; the process is alive\."))
            writer.close()
            expect(page.locator("#waiting")).to_be_hidden()
            page.close()
    finally:
        writer.close()
