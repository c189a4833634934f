"""The order of rows, a pinned cell, sites over each other, help and print, in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, expect
from torch import nn

from retrograd.core.history.history import History
from retrograd.core.recording.record import record
from retrograd.core.views.report import write_report
from tests.browser import Reporter, Visit
from tests.core.views.invented import Numbers, invent_training, make_history, name_resnet
from tests.core.views.test_browser import rows
from tests.core.views.test_page import HOSTILE

pytestmark = pytest.mark.browser

SITES = [f"{name}:output" for name in ("a", "b", "c")]
RMS = np.array([[1.0, 4.0, 2.0], [3.0, 2.0, np.nan], [2.0, 8.0, 1.0]])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites in three steps; the second was not recorded at the last."""
    numbers = Numbers(SITES, np.nan_to_num(RMS, nan=1.0), recorded=~np.isnan(RMS), bins=0)
    return write_report(make_history(numbers), tmp_path_factory.mktemp("three") / "report.html")


def train_encoder() -> History:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with record(net) as recording:
        for _ in range(3):
            net(torch.randn(2, 3, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording.history


def table(page: Page) -> list[list[str]]:
    """The cells of the pinned table, the head first."""
    found: list[list[str]] = page.locator("#pinned tr").evaluate_all(
        "lines => lines.map(line => [...line.children].map(cell => cell.textContent))"
    )
    return found


def test_rows_are_sorted_by_their_value_at_the_cursor(visit: Visit, three: Path) -> None:
    page = visit.open(three)
    assert rows(page) == SITES
    page.locator("#order").select_option("value")
    expect(page.locator("#notice")).to_contain_text("sorted by their value at step 2")
    assert rows(page) == ["a:output", "c:output", "b:output"]  # what was not recorded comes last
    page.locator("#viewport").focus()
    page.evaluate("module_state.change({ cursor: 1 })")
    page.keyboard.press("s")
    expect(page.locator("#notice")).to_contain_text("sorted by their value at step 1")
    assert rows(page) == ["c:output", "a:output", "b:output"]
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]")
    assert rows(page) == ["c:output", "a:output", "b:output"]


def test_rows_are_grouped_by_types_of_layers(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(train_encoder()), "#quantity=wgrad&order=type")
    folders = page.locator(".label.folder .name").all_inner_texts()
    assert folders == ["MultiheadAttention", "NonDynamicallyQuantizableLinear", "Linear", "LayerNorm"]
    assert len(rows(page)) == 4 + 2 + 2 + 4 + 4
    page.locator(".label.folder", has_text="LayerNorm").click()
    expect(page.locator("#labels .label")).to_have_count(4 + 2 + 2 + 4)


def test_a_pinned_cell_stands_beside_another_with_their_ratio(visit: Visit, three: Path) -> None:
    page = visit.open(three)
    page.locator("#viewport").focus()
    page.evaluate("module_state.change({ cursor: 0, current: 'a:output' })")
    page.keyboard.press("p")
    expect(page.locator("#pinned")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pinned thead th").nth(2)).to_have_text("step 1")
    assert table(page)[1] == ["rms", "1", "4", "×4"]
    page.keyboard.press("ArrowDown")
    expect(page.locator("#pinned thead th").nth(2)).to_have_text("step 1, b:output")
    assert table(page)[1] == ["rms", "1", "2", "×2"]
    assert "pin=0+a%3Aoutput" in page.url
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#pinned thead th").nth(2)).to_have_text("step 2")  # the last in view
    assert table(page)[1] == ["rms", "1", "2", "×2"]
    page.keyboard.press("Escape")
    expect(page.locator("#pinned")).to_be_hidden()


def test_alt_and_a_click_pin(visit: Visit, three: Path) -> None:
    page = visit.open(three)
    box = page.locator("#cells").bounding_box()
    assert box is not None
    page.keyboard.down("Alt")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 5)
    page.keyboard.up("Alt")
    expect(page.locator("#pinned thead th").nth(1)).to_have_text("step 1 (pinned)")
    expect(page.locator(".panel")).to_have_count(0)


def test_open_sites_are_drawn_over_each_other(visit: Visit, three: Path) -> None:
    page = visit.open(three, "#open=a%3Aoutput&open=c%3Aoutput&pinned=a%3Aoutput")
    expect(page.locator(".panel")).to_have_count(2)
    page.locator("#overlay").click()
    expect(page.locator(".panel")).to_have_count(1)
    expect(page.locator(".overlaid li")).to_have_text(["A a:output✕", "B c:output✕"])
    readings = page.locator(".panel .plot-title").first.locator(".reading")
    expect(readings).to_have_text(["A 2", "B 1"])
    page.evaluate("module_state.change({ cursor: 1 })")
    expect(readings).to_have_text(["A 4", "B 8"])
    page.get_by_role("button", name="close c:output").click()
    expect(page.locator(".panel h3")).to_have_text("a:output")
    expect(page.locator("#overlay")).to_be_hidden()


def test_each_line_of_a_panel_has_its_key(visit: Visit, small: Path) -> None:
    page = visit.open(small, "#open=head%3Aoutput")
    first = page.locator(".panel .plot-title").first
    expect(first.locator(".reading i.line")).to_have_count(3)
    expect(first).to_contain_text("std")
    expect(first).to_contain_text("|max|")


def test_a_question_mark_explains_and_escape_closes_it_alone(visit: Visit, small: Path) -> None:
    page = visit.open(small, "#open=head%3Aoutput")
    page.keyboard.press("?")
    for words in ("Fit all", "Fold, Unfold", "Pin a cell", "Esc"):
        expect(page.locator("#help")).to_contain_text(words)
    expect(page.locator("#help-title")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    expect(page.locator(".panel")).to_have_count(1)
    page.locator("#filter").fill("?")
    expect(page.locator("#help")).to_be_hidden()
    page.locator("#ask").click()
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.locator("#help")).to_be_hidden()


@pytest.mark.parametrize(("count", "every"), [(8, 1), (8, 3), (6000, 1)])
def test_steps_that_were_not_recorded_are_marked_on_the_axis(
    visit: Visit, report: Reporter, count: int, every: int
) -> None:
    sites = ["a:output", "a:output.grad"]
    page = visit.open(report(make_history(Numbers(sites, np.ones((2, count)), every=every))))
    marks = page.evaluate("module_payload.facts.columns.first.map((_, column) => module_steps.skipsSteps(column))")
    assert marks == [every > 1 and column > 0 for column in range(len(marks))]
    said = page.locator("#notice").get_by_text("Only recorded steps have columns")
    expect(said).to_have_count(int(every > 1))


def test_in_a_frame_of_a_notebook_it_is_silent(visit: Visit, small: Path) -> None:
    page = visit.page
    page.set_viewport_size({"width": 900, "height": 500})
    frame = small.with_name("frame.html")
    frame.write_text(f'<title>a notebook</title><iframe src="{small.name}" width="100%" height="400"></iframe>')
    page.goto(frame.as_uri())
    inner = page.frame_locator("iframe")
    expect(inner.locator(".label").first).to_be_visible()
    expect(inner.locator("#help")).to_be_hidden()


def test_all_rows_are_printed(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(make_history(invent_training(name_resnet(40), 20))), "#depth=99")
    seen = len(rows(page))
    count = page.evaluate("module_rows.shown.rows.length")
    assert seen < count == 40 * 6 + 3 + 5
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(rows(page)) == count
    assert page.evaluate("document.getElementById('cells').offsetHeight") == page.evaluate(
        "document.getElementById('viewport').scrollHeight"
    )
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert len(rows(page)) == seen


def test_shapes_of_parameters_are_told_where_they_are_known(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(train_encoder()), "#quantity=wgrad&open=linear1%3Aweight")
    expect(page.locator(".panel h4").first).to_contain_text("128 elements: 16 × 8")
    expect(page.locator("#model")).to_contain_text("weight 16 × 8, bias 16")
    expect(page.locator("#model")).to_contain_text("(in_features=8, out_features=16, bias=True)")
    expect(page.locator("#troubles")).to_contain_text("used by its parent, an nn.MultiheadAttention")
    expect(page.locator("#troubles")).not_to_contain_text("never called")


def test_hostile_names_are_text_in_all_of_them(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(make_history(Numbers([f"{HOSTILE}:output", "a:output"], np.ones((2, 3)), bins=0))))
    page.evaluate(
        "([name]) => module_state.change({ pin: `0 ${name}`, open: [name, 'a:output'], overlay: 'on' })",
        [f"{HOSTILE}:output"],
    )
    expect(page.locator(".overlaid li")).to_have_count(2)
    expect(page.locator("#pinned caption")).to_contain_text(HOSTILE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_has_room_for_them(visit: Visit, three: Path, scheme: str) -> None:
    page = visit.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=scheme)
    visit.open(three, "#open=a%3Aoutput&open=c%3Aoutput&overlay=on&pin=0+a%3Aoutput&order=value")
    expect(page.locator(".overlaid")).to_be_visible()
    page.evaluate("document.getElementById('help').showModal()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_rows_are_sorted_by_what_was_not_finite_first(visit: Visit, report: Reporter) -> None:
    """Of one step, outputs in the order of the forward and gradients in that of the backward."""
    sites = [f"{name}:output{part}" for part in ("", ".grad") for name in ("a", "b", "c", "d")]
    nan = np.zeros((8, 6), dtype=np.int64)
    nan[[1, 2, 4, 5, 6], [4, 2, 5, 3, 3]] = 1
    page = visit.open(report(make_history(Numbers(sites, np.ones((8, 6)), nan=nan, bins=0))), "#quantity=value")
    page.get_by_role("button", name="Rows by their first").click()
    expect(page.locator("#labels .label").first).to_have_attribute("title", "c:output")
    assert rows(page) == ["c:output", "b:output", "a:output", "d:output"]
    page.locator("#quantities button", has_text="Gradients").click()
    expect(page.locator("#map-title")).to_contain_text("gradients")
    assert rows(page) == ["c:output", "b:output", "a:output", "d:output"]


def test_help_opens_at_its_beginning_on_a_phone(visit: Visit, three: Path) -> None:
    page = visit.open(three)
    page.set_viewport_size({"width": 390, "height": 600})
    page.locator("#ask").click()
    assert page.locator("#help").evaluate("help => [help.scrollTop, help.scrollHeight > help.clientHeight]") == [
        0,
        True,
    ]


def test_the_tooltip_is_hidden_where_a_chart_moves_the_cursor(visit: Visit, three: Path) -> None:
    page = visit.open(three, "#open=a%3Aoutput")
    page.locator("#viewport").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tooltip")).to_be_visible()
    page.locator(".panel .u-over").first.hover()
    expect(page.locator("#tooltip")).to_be_hidden()
