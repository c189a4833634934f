# ruff: noqa: INP001  # a folder of pages, not a package
"""Draws docs/images/report.png, the report of `make demo`, and served.png, the page of its script while it trains.

make demo && .venv/bin/python docs/make_picture.py

compared.png is the page of `retrograd compare healthy fast deeper --report`, scrolled to its map: three runs of
examples/train_digits.py, as it is, with --learning-rate 0.3, and with a seventh block and zeros for weights of the
fourth.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).with_name("retrograd")
VIEW = "#open=blocks.4.conv1%3Aoutput"
SETTLED = 800  # milliseconds until curves are drawn
LONG_ENOUGH = re.compile(
    r"^(1[2-9]|[2-9]\d)\d \(0 to"
)  # steps of a run that is followed: 120 or more, for a page skips some
RUNS = {"healthy": [], "fast": ["--learning-rate", "0.3"], "deeper": []}
SEVENTH = ("            ResidualBlock(4 * width, 4 * width),\n", "        self.dropout = nn.Dropout(0.1)\n")
ZEROS = "        nn.init.zeros_(self.blocks[4].conv2.weight)\n"


def draw_picture(browser: Browser, address: str, target: Path) -> None:
    """A screenshot of a report, as a PNG file."""
    page = browser.new_page(viewport={"width": 1440, "height": 880})
    page.goto(address + VIEW)
    page.wait_for_selector(".panel .uplot")
    page.wait_for_timeout(SETTLED)
    show_map(page)
    target.parent.mkdir(exist_ok=True)
    page.screenshot(path=target)
    page.close()


def draw_served(browser: Browser, target: Path) -> None:
    """The page of a run that is recorded meanwhile, in the dark theme."""
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "digits"
        words = [PROGRAM, "run", "--live", "-o", run, "examples/train_digits.py"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(words, cwd=ROOT, stdout=nowhere, stderr=pipe, text=True) as training:
            assert training.stderr is not None
            address = next(word for line in training.stderr for word in line.split() if word.startswith("http://"))
            page = browser.new_page(viewport={"width": 1440, "height": 880}, color_scheme="dark")
            page.goto(address)
            page.wait_for_selector("html[data-ready=yes] .label", timeout=60_000)
            page.locator(".label", has_text="relu").first.click()
            page.wait_for_selector(".panel .uplot")
            page.get_by_text(LONG_ENOUGH).wait_for(timeout=300_000)
            page.wait_for_timeout(5 * SETTLED)  # its curves come a little later
            show_map(page)
            page.screenshot(path=target)
            page.close()
            training.terminate()


def draw_compared(browser: Browser, target: Path) -> None:
    """The page of three runs over each other, at its map."""
    with tempfile.TemporaryDirectory() as home:
        plain = (ROOT / "examples" / "train_digits.py").read_text()
        block, after = SEVENTH
        assert block in plain
        assert after in plain
        for name, words in RUNS.items():
            script = Path(home, "train_digits.py")
            is_deeper = name == "deeper"
            script.write_text(plain.replace(block, 2 * block).replace(after, ZEROS + after) if is_deeper else plain)
            command = [PROGRAM, "run", "-q", "-o", name, script, "--epochs", "8", *words]
            subprocess.run(command, cwd=home, check=True, stdout=subprocess.DEVNULL)
        words = [PROGRAM, "compare", *RUNS, "--report", "-o", "compared.html"]
        found = subprocess.run(words, cwd=home, check=False, stdout=subprocess.DEVNULL)
        assert found.returncode == 1  # they differ
        page = browser.new_page(viewport={"width": 1440, "height": 880})
        page.goto(Path(home, "compared.html").as_uri())
        page.wait_for_selector("html[data-ready=yes] .label")
        page.wait_for_timeout(SETTLED)
        show_map(page)
        page.screenshot(path=target)
        page.close()


def show_map(page: Page) -> None:
    """Scroll to the scalars and the map, below what the page says of the run."""
    page.locator("#map").evaluate("map => scrollTo(0, map.getBoundingClientRect().top + scrollY - 12)")
    page.wait_for_timeout(SETTLED)


if __name__ == "__main__":
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        images = ROOT / "docs" / "images"
        draw_picture(browser, (ROOT / "runs" / "demo" / "report.html").resolve().as_uri(), images / "report.png")
        draw_compared(browser, images / "compared.png")
        draw_served(browser, images / "served.png")
        browser.close()
