"""A headless Chromium that opens reports."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from retrograd.core.history.history import History
from retrograd.core.views.report import write_report
from tests.core.views.invented import invent_training, make_history, name_resnet

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


expect.set_options(timeout=20_000)  # a busy machine is not a fault of the page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page in the browser, and what it said and asked for.

    Attributes:
        page: the page.
        said: errors, warnings and dialogs.
        requests: addresses that were asked for.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path, view: str = "") -> Page:
        """Go to a report and wait until it is drawn."""
        self.page.goto(path.as_uri() + view)
        self.page.wait_for_selector("html[data-ready=yes]")  # no polled function: the policy of the page forbids eval
        return self.page


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """A fresh page of 1440 × 900, checked at its end: it was silent and asked for nothing but its own file."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    visit = Visit(page)
    yield visit
    page.close()
    assert visit.said == []
    assert {address.split("#")[0].split(":")[0] for address in visit.requests} <= {"file", "data", "blob"}
    assert len([address for address in visit.requests if address.startswith("file")]) <= 2


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small residual net, 400 steps."""
    return report_of(make_history(invent_training(name_resnet(), 400)), tmp_path_factory)


def report_of(history: History, factory: pytest.TempPathFactory) -> Path:
    return write_report(history, factory.mktemp("report") / "report.html")


Reporter = Callable[[History], Path]


@pytest.fixture
def report(tmp_path_factory: pytest.TempPathFactory) -> Reporter:
    """A function that writes the report of a history somewhere."""
    return lambda history: report_of(history, tmp_path_factory)
