# ruff: noqa: INP001  # a folder of pages, not a package
"""Draws docs/images/report.png, the README's picture: the report of `make demo` with one panel open.

make demo && .venv/bin/python docs/make_picture.py
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
VIEW = "#open=blocks.4.relu%3Aoutput"
SETTLED = 800  # milliseconds until curves are drawn


def draw_picture(report: Path, target: Path) -> None:
    """A screenshot of a report, as a PNG file."""
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 880})
        page.goto(report.resolve().as_uri() + VIEW)
        page.wait_for_selector(".panel .uplot")
        page.wait_for_timeout(SETTLED)
        target.parent.mkdir(exist_ok=True)
        page.screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    draw_picture(ROOT / "runs" / "demo" / "report.html", ROOT / "docs" / "images" / "report.png")
