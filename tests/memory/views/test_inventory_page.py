"""The page of an inventory: what it holds, and what a person can do with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from retrograd.core.errors import SavedTensorError
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.views.inventory_page import build_page, write_inventory
from tests.browser import Visit
from tests.core.views.test_contrast import luminance, read_colors
from tests.memory.views.invented_inventory import HOSTILE, invent_inventory, invent_large, make_inventory, saved

browser = pytest.mark.browser

GROUPS = ("good", "grad", "value", "update", "muted")
"""Colours of tiles, on which stands text."""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_inventory(invent_inventory(), tmp_path / "inventory.html")


def spot(page: Page, selector: str, x: float, y: float) -> tuple[float, float]:
    """A point within an element, by shares of its width and height."""
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["x"] + x * box["width"], box["y"] + y * box["height"]


def tensors(page: Page) -> list[str]:
    return page.locator("#tensors tbody tr td:first-child").all_inner_texts()


def test_names_and_notes_stay_text() -> None:
    rows = [saved(0, module=HOSTILE, resident=8, released=1)]
    assert HOSTILE not in build_page(make_inventory(rows, notes=(HOSTILE,)), HOSTILE)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SavedTensorError, match="cannot be written"):
        write_inventory(invent_inventory(), tmp_path / "nowhere" / "inventory.html")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("opacity", [0.42, 0.52])
@pytest.mark.parametrize("group", GROUPS)
def test_text_on_tiles_can_be_read(theme: str, opacity: float, group: str) -> None:
    colors = read_colors(theme)
    front, back = ([int(colors[name][i : i + 2], 16) for i in (1, 3, 5)] for name in (group, "surface"))
    blend = "#" + "".join(f"{round(opacity * f + (1 - opacity) * b):02x}" for f, b in zip(front, back, strict=True))
    light, dark = sorted((luminance(colors["ink"]), luminance(blend)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_the_opacities_are_those_of_the_page() -> None:
    assert "? 0.52 : 0.42" in build_page(invent_inventory(), "")


@browser
def test_it_shows_the_peak_first(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    expect(page.locator("h1")).to_have_text("Saved tensors")
    expect(page.locator("#about")).to_contain_text("3 storages saved, 7 kB (11 kB if no tensors shared memory)")
    expect(page.locator("#held-now")).to_have_text(
        "7 kB at position 2, after 2 ms: the forward creates head:AddmmBackward0"
    )
    expect(page.locator("#modules-count")).to_have_text("2 modules, 7 kB")
    assert tensors(page) == [
        "blocks.0:ReluBackward0 result",
        "blocks.0:ReluBackward0 self",
        "stem:ConvolutionBackward0 input",
    ]
    legend = page.locator("#kept-legend li").all_inner_texts()
    assert legend == [
        "cheap to recompute: 4 kB, 57 %",
        "product, convolution or attention: 2 kB, 29 %",
        "input of the model: 1 kB, 14 %",
    ]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440


@browser
def test_a_click_on_the_curve_shows_what_is_held_there(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.mouse.click(*spot(page, "#timeline", 0.07, 0.5))
    expect(page.locator("#held-now")).to_contain_text("1 kB at position 0")
    assert tensors(page) == ["stem:ConvolutionBackward0 input"]
    page.locator("#timeline").press("ArrowRight")
    expect(page.locator("#held-now")).to_contain_text("5 kB at position 1")
    expect(page.locator("#timeline")).to_have_attribute("aria-valuenow", "1")
    page.locator("#timeline").press("End")
    expect(page.locator("#held-now")).to_have_text("0 B at position 6: the end")
    assert tensors(page) == []
    page.get_by_role("button", name="Everything").click()
    assert len(tensors(page)) == 3
    page.get_by_role("button", name="At the peak").click()
    expect(page.locator("#timeline")).to_have_attribute("aria-valuenow", "2")


@browser
def test_pointing_at_the_curve_says_what_happens_there(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.mouse.move(*spot(page, "#timeline", 0.66, 0.5))
    expect(page.locator("#held-tip")).to_have_text(
        "5 kB at position 4, after 4 ms: the backward runs blocks.0:ReluBackward0"
    )


@browser
def test_a_tile_tells_all_that_is_known(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    details = page.locator("#details")
    page.mouse.move(*spot(page, "#treemap", 0.2, 0.5))
    expect(details.locator("h3")).to_have_text("blocks.0:ReluBackward0 result")
    for words in (
        "ReLU: output",
        "4,000 bytes", "float32[1000]", "position 1 to 4, 3 ms", "relu of its inputs", "saved by 2 nodes",
        "head:AddmmBackward0 mat1", "/home/me/model.py:11 in forward",
    ):  # fmt: skip
        expect(details).to_contain_text(words)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(5, 5)
    expect(details.locator(".kept")).to_be_visible()
    expect(page.locator("#tensors tr.kept")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(details).to_contain_text("Hover over a tile")


@browser
def test_a_module_can_be_gone_into(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator("#modules").get_by_role("button", name="stem").click()
    assert tensors(page) == ["stem:ConvolutionBackward0 input"]
    expect(page.locator("#kept-path")).to_contain_text("stem")
    page.locator("#kept-path").get_by_role("button", name="all modules").click()
    assert len(tensors(page)) == 3
    page.mouse.click(*spot(page, "#treemap", 0.05, 0.02))  # the heading of the largest module
    assert all(name.startswith("blocks.0") for name in tensors(page))


@browser
def test_tensors_are_filtered_by_all_that_is_known(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.keyboard.press("/")
    for text, wanted in (
        ("matrix product", 2),
        ("float32[1000]", 1),
        ("mat1", 1),
        ("first factor", 1),
        ("model.py", 3),
        ("nothing", 0),
    ):
        page.locator("#filter").fill(text)
        expect(page.locator("#tensors tbody tr")).to_have_count(wanted)
    expect(page.locator("#tensors-count")).to_have_text("0 of 3, 0 B")


@browser
@pytest.mark.parametrize("width", [360, 820])
def test_it_fits_on_small_screens(visit: Visit, small: Path, width: int) -> None:
    page = visit.page
    page.set_viewport_size({"width": width, "height": 800})
    visit.open(small)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#treemap").bounding_box()
    assert box is not None
    assert box["height"] > 300


@browser
def test_hostile_names_stay_text(visit: Visit, tmp_path: Path) -> None:
    rows = [saved(0, module=HOSTILE, slot=HOSTILE, file=HOSTILE, resident=8, released=1)]
    page = visit.open(
        write_inventory(make_inventory(rows, notes=(HOSTILE,)), tmp_path / "inventory.html", title=HOSTILE)
    )
    expect(page).to_have_title(HOSTILE)
    expect(page.locator("#notes li")).to_have_text(HOSTILE)
    assert HOSTILE in tensors(page)[0]


@browser
def test_an_inventory_of_nothing(visit: Visit, tmp_path: Path) -> None:
    page = visit.open(write_inventory(Inventory(), tmp_path / "inventory.html"))
    expect(page.locator("#about")).to_have_text("No backward pass was recorded.")
    expect(page.locator("#main")).to_be_hidden()
    expect(page.locator("#hint")).to_be_hidden()


@browser
@pytest.mark.slow
def test_twenty_thousand_tensors(visit: Visit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It stays a page that can be mailed and used. Times are printed, not judged."""
    inventory = invent_large(20_000)
    path = write_inventory(inventory, tmp_path / "inventory.html")
    assert path.stat().st_size < 2e6
    page = visit.open(path)
    expect(page.locator("#tensors-count")).to_contain_text("20,000 of 20,000")
    expect(page.locator("#tensors tbody tr")).to_have_count(200)
    page.get_by_role("button", name="Show more").click()
    expect(page.locator("#tensors tbody tr")).to_have_count(1000)
    page.locator("#filter").fill("stages.7.blocks.42.")
    expect(page.locator("#tensors tbody tr")).to_have_count(10)
    took = page.evaluate(
        """async () => {
            const frame = () => new Promise((done) => requestAnimationFrame(done));
            const begin = performance.now();
            document.getElementById("timeline").dispatchEvent(new KeyboardEvent("keydown", { key: "PageUp" }));
            await frame();
            await frame();
            return performance.now() - begin;
        }"""
    )
    with capsys.disabled():
        print(f"\na step along the curve of 20,000 tensors: {took:.0f} ms")
