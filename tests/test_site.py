"""The site: it builds without a warning, opens as files, fetches nothing, and names every public thing."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import retrograd as rg
from tests.test_public_names import ROOMS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parents[1]
API = sorted((ROOT / "docs" / "api").glob("*.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not find_spec("mkdocs"):
        pytest.skip("mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, cwd=ROOT, env=quiet, stderr=subprocess.PIPE, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_pages_show_what_is_written_and_hide_what_a_page_prepares(site: Path) -> None:
    recording = (site / "recording.html").read_text()
    assert "class Attention" not in recording  # is in a comment
    assert 'href="concepts.html#site"' in recording
    assert "csv | parquet" in re.sub("<[^>]*>", "", (site / "commands.html").read_text())
    assert "Record the history" in (site / "api" / "record.html").read_text()  # the docstring of rg.record
    assert "load_digits" in (site / "examples" / "train_digits.html").read_text()
    assert not [page for page in site.rglob("*.html") if ":func:<code>" in page.read_text()]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 390])
def test_pages_that_are_files_fetch_nothing_and_are_searched(site: Path, browser: Browser, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
    pages = sorted({*site.glob("*.html"), *site.glob("api/*.html")} - {site / "404.html"})
    for path in pages if width < 400 else pages[:3]:
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path.name} is too wide"
    page.goto((site / "index.html").as_uri())
    page.locator("input[name=query]").focus()
    page.keyboard.type("zero_grad")
    page.locator(".md-search-result__item").first.wait_for(timeout=20_000)
    assert said == []
    page.close()


def test_the_reference_has_every_public_name_once() -> None:
    named = [name for page in API for name in re.findall(r"^::: retrograd\.(\S+)$", page.read_text(), re.MULTILINE)]
    rooms = {room: getattr(rg, room) for room in (*ROOMS, "testing")}
    public = {name for name in rg.__all__ if name not in rooms}
    for room, module in rooms.items():
        things = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
        public |= {
            f"{room}.{name}"
            for name, thing in things.items()
            if not inspect.ismodule(thing) and thing is not getattr(rg, name, None)
        }
    assert sorted(named) == sorted(public)
