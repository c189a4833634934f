"""The report in a browser: what a person can do with it."""

from __future__ import annotations

import csv
import io
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from retrograd.core.history.history import History
from retrograd.core.recording.record import record
from retrograd.core.views.report import write_report
from tests.browser import Reporter, Visit
from tests.core.views.invented import Numbers, invent_training, make_history, name_resnet
from tests.core.views.test_page import HOSTILE
from tests.memory.views.invented_inventory import invent_inventory

pytestmark = pytest.mark.browser

BAD = (217, 58, 22)
"""The light theme's colour of what is not finite."""


def rows(page: Page) -> list[str]:
    return page.eval_on_selector_all("#labels .label", "labels => labels.map(label => label.title)")


def pixel(page: Page, x: float, row: int) -> tuple[int, ...]:
    """Colour of a cell, at a share of the width and in the n-th row of the map."""
    return tuple(
        page.evaluate(
            """([x, row]) => {
                const cells = document.getElementById("cells");
                const height = document.querySelector(".label").offsetHeight * devicePixelRatio;
                const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
                copy.drawImage(cells, -Math.floor(x * cells.width), -Math.floor((row + 0.4) * height));
                return [...copy.getImageData(0, 0, 1, 1).data];
            }""",
            [x, row],
        )
    )


def test_it_opens_from_disk_and_asks_for_nothing(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    expect(page.locator("h1")).to_have_text("history in memory")
    expect(page.locator("#facts")).to_contain_text("400 (0 to 399)")
    expect(page.locator("#map-title")).to_have_text("rms of gradients of activations")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1440


def test_rows_stand_in_call_order_under_their_modules(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    first = ["stem", "stem.conv:output", "stem.bn:output", "stem.act:output", "blocks", "blocks.0:output"]
    assert rows(page)[:7] == [*first, "blocks.0.conv1:output"]


def test_a_click_on_a_row_opens_its_curves_and_histograms(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator(".label", has_text="conv1").first.click()
    panel = page.locator(".panel")
    expect(panel.locator("h3")).to_have_text("blocks.0.conv1:output")
    expect(panel.locator(".side h4")).to_contain_text(["value", "gradient"])
    expect(panel.locator(".uplot")).to_have_count(6)
    expect(panel.locator("canvas.exponents")).to_have_count(2)
    page.locator(".label", has_text="head").click()
    expect(panel.locator("h3")).to_have_text("head:output")


def test_lists_keep_their_names_where_a_panel_takes_the_room_of_their_labels(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator(".label", has_text="conv1").first.click()
    expect(page.locator(".panel .uplot").first).to_be_visible()
    for name in ("Statistic", "Scale of the colours"):
        expect(page.get_by_role("combobox", name=name)).to_be_visible()


def test_pinned_panels_stay_and_escape_closes(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator(".label", has_text="conv1").first.click()
    page.get_by_role("button", name="keep this panel open").click()
    page.locator(".label", has_text="head").click()
    expect(page.locator(".panel h3")).to_have_text(["blocks.0.conv1:output", "head:output"])
    page.keyboard.press("Escape")
    expect(page.locator(".panel h3")).to_have_text(["blocks.0.conv1:output"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("blocks.*.act1:output", [f"blocks.{i}.act1:output" for i in range(4)]),
        ("/act1?:/", [f"blocks.{i}.act1:output" for i in range(4)] + ["stem.act:output"]),
        ("CONV2", [f"blocks.{i}.conv2:output" for i in range(4)]),
        ("blocks.[!012].bn?:*", ["blocks.3.bn1:output", "blocks.3.bn2:output"]),
    ],
)
def test_a_filter_filters(visit: Visit, small: Path, text: str, wanted: list[str]) -> None:
    page = visit.open(small)
    page.locator("#filter").fill(text)
    expect(page.locator("#count")).to_have_text(f"{len(wanted)} sites of 30")
    leaves = page.eval_on_selector_all("#labels .label:not(.folder)", "labels => labels.map(label => label.title)")
    assert sorted(leaves) == sorted(wanted)


def test_a_broken_filter_says_so_and_hides_nothing(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator("#filter").fill("/(/")
    expect(page.locator("#count")).to_contain_text("not a regular expression")
    assert len(rows(page)) > 20
    page.locator("#filter").fill("nowhere")
    expect(page.locator("#empty")).to_be_visible()


def test_folding_merges_rows_and_says_how(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator("#fold").click()
    expect(page.locator("#labels .label")).to_have_count(5)
    expect(page.locator(".label.folder .merged").first).to_have_text("3")
    expect(page.locator("#notice")).to_contain_text("A folded module shows the largest of its sites")
    page.locator(".label", has_text="blocks").click()
    expect(page.locator("#labels .label")).to_have_count(9)


def test_the_theme_toggles_and_follows_the_system(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_the_address_restores_the_view(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.get_by_role("button", name="Activations").click()
    page.locator("#statistic").select_option("zero_share")
    page.locator("#filter").fill("*act*")
    page.locator(".label", has_text="act1").first.click()
    page.locator("#theme").click()
    expect(page.locator(".panel")).to_have_count(1)
    expect(page).to_have_url(re.compile("open="))
    expect(page).to_have_url(re.compile("theme=dark"))  # the address follows a moment later
    view = page.evaluate("location.hash")

    page.goto("about:blank")
    page = visit.open(small, view)
    expect(page.locator("#map-title")).to_have_text("share of zeros of activations")
    expect(page.locator("#filter")).to_have_value("*act*")
    expect(page.locator(".panel h3")).to_have_text("blocks.0.act1:output")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


DOUBLE_CLICK = """([clientX, clientY]) => document.elementFromPoint(clientX, clientY)
    .dispatchEvent(new MouseEvent("dblclick", { clientX, clientY, bubbles: true }))"""
"""On a busy machine two clicks can be too far apart for a double one."""


def test_dragging_zooms_map_and_curves_alike_and_a_double_click_goes_back(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    box = page.locator("#cells").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30, steps=4)
    page.mouse.up()
    expect(page.locator("#zoom")).to_contain_text("steps 100–")
    first, last = (int(number) for number in page.evaluate("location.hash.match(/zoom=(\\d+)-(\\d+)/).slice(1)"))
    assert (first, last) == (pytest.approx(100, abs=1), pytest.approx(200, abs=1))
    page.evaluate(DOUBLE_CLICK, [box["x"] + 100, box["y"] + 30])
    expect(page.locator("#zoom")).to_be_hidden()


def test_hovering_names_site_step_and_value(visit: Visit, report: Reporter) -> None:
    rms = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.5, 8.0]])
    page = visit.open(report(make_history(Numbers(["a:output.grad", "b:output.grad"], rms, every=10))))
    box = page.locator("#cells").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 27)
    expect(page.locator("#tooltip div")).to_have_text(["b:output.grad", "step 20", "rms 7.5"])


def test_the_first_bad_step_is_named_and_leads_there(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    expect(page.locator("#banner")).to_contain_text("step 248, stem.act:output.grad (17 NaN of 4,096 elements)")
    assert pixel(page, 248.5 / 400, 3)[:3] == BAD
    assert pixel(page, 200.5 / 400, 3)[:3] != BAD
    page.locator("#visit").click()
    expect(page.locator(".panel h3")).to_have_text("stem.act:output")
    expect(page.locator(".panel .alarm")).to_contain_text("NaN or infinite elements in 2 steps")
    expect(page.locator("#zoom")).to_be_visible()


def test_what_was_not_recorded_shows_the_ground(visit: Visit, report: Reporter) -> None:
    recorded = np.ones((2, 10), dtype=bool)
    recorded[1, 4:6] = False
    page = visit.open(
        report(make_history(Numbers(["a:output.grad", "b:output.grad"], np.ones((2, 10)), recorded=recorded)))
    )
    cells = [pixel(page, (column + 0.5) / 10, 1) for column in range(10)]
    assert cells[0] == cells[9] != cells[4]
    page.locator("#cells").hover(position={"x": 10, "y": 30})
    expect(page.locator("#tooltip")).to_contain_text("b:output.grad")
    box = page.locator("#cells").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30)
    expect(page.locator("#tooltip")).to_contain_text("not recorded")


def test_keys_move_open_and_go_back(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator("#viewport").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.locator("#tooltip .where")).to_have_text("stem.conv:output.grad")
    expect(page.locator("#tooltip .when")).to_have_text("step 397")
    page.keyboard.press("Enter")
    expect(page.locator(".panel h3")).to_have_text("stem.conv:output")
    page.keyboard.press("Escape")
    expect(page.locator(".panel")).to_have_count(0)
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()


def test_on_paper_there_are_no_controls_and_the_colours_are_kept(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator("#labels .label:not(.folder)").first.click()
    expect(page.locator(".panel h3")).to_be_visible()
    page.emulate_media(media="print")
    for hidden in page.locator(".toolbar, .finding > button, .panel .icon, #theme").all():
        expect(hidden).to_be_hidden()
    expect(page.locator("#cells")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('.swatch i')).printColorAdjust") == "exact"


def test_what_a_key_chose_stays_while_the_mouse_rests_on_a_name(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    page.locator("#unfold").click()
    page.locator("#labels .label:not(.folder)").last.click()
    expect(page.locator(".panel h3")).to_be_visible()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#tooltip .when")).to_have_text("step 399")
    page.wait_for_timeout(300)  # what the browser tells of a mouse under which names were drawn anew
    expect(page.locator("#tooltip .when")).to_have_text("step 399")
    page.locator("#cells").hover(position={"x": 50, "y": 8})
    expect(page.locator("#tooltip .when")).not_to_have_text("step 399")
    page.mouse.move(2, 2)
    expect(page.locator("#tooltip")).to_be_hidden()


def test_every_choice_of_what_and_which_statistic_draws(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    scales = page.evaluate(
        """async () => {
            const find = (id) => document.getElementById(id);
            const frame = () => new Promise((done) => requestAnimationFrame(done));
            const settle = () => frame().then(frame).then(frame);
            const choose = (id, value) => {
                find(id).value = value;
                find(id).dispatchEvent(new Event("change"));
                return settle();
            };
            const scales = [];
            for (const button of find("quantities").children) {
                button.click();
                await settle();
                for (const name of [...find("statistic").options].map((option) => option.value)) {
                    await choose("statistic", name);
                    for (const scale of ["linear", "log"]) {
                        await choose("scale", scale);
                        scales.push([find("map-title").textContent, find("scale-bar").innerText]);
                    }
                }
            }
            return scales;
        }"""
    )
    assert len(scales) == 2 * (3 * 8 + 9)
    assert len({title for title, _ in scales}) == 3 * 8 + 9
    assert not [title for title, ticks in scales if "–" in ticks or len(ticks.split()) < 5]


def test_the_numbers_on_show_can_be_taken_away_as_csv(visit: Visit, small: Path) -> None:
    page = visit.open(small, "#filter=head*&zoom=10-12")
    with page.expect_download() as waiting:
        page.locator("#csv").click()
    lines = list(csv.reader(io.StringIO(waiting.value.path().read_text(encoding="utf-8"))))
    numbers = invent_training(name_resnet(), 400)
    expected = numbers.rms[numbers.sites.index("head:output.grad"), 10:13]
    assert lines[0] == ["rms of gradients of activations", "10", "11", "12"]
    assert lines[1][0] == "head:output"
    np.testing.assert_allclose([float(field) for field in lines[1][1:]], expected, rtol=1e-6)


def test_the_map_can_be_taken_away_as_png(visit: Visit, small: Path) -> None:
    page = visit.open(small)
    with page.expect_download() as waiting:
        page.locator("#png").click()
    assert waiting.value.suggested_filename.endswith("grad-rms.png")
    assert waiting.value.path().read_bytes().startswith(b"\x89PNG")


def test_hostile_names_are_shown_and_not_run(visit: Visit, report: Reporter) -> None:
    history = make_history(Numbers([f"{HOSTILE}:output", f"{HOSTILE}:output.grad"], np.ones((2, 3)), nan=1))
    history.describe(command=[HOSTILE], not_recorded=[{"site": HOSTILE, "reason": HOSTILE}], statistics=[HOSTILE])
    page = visit.open(report(history))
    page.locator(".label:not(.folder)").first.click()
    expect(page.locator(".panel h3")).to_have_text(f"{HOSTILE}:output")
    page.locator("#cells").hover(position={"x": 50, "y": 8})
    expect(page.locator("#tooltip")).to_contain_text("alert")
    assert page.locator("img").count() == 0


def test_an_empty_history_opens_too(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(History()))
    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#map")).to_be_hidden()


def test_a_loss_alone_is_drawn_and_watch_is_named(visit: Visit, report: Reporter) -> None:
    with record() as recording:
        for step in range(30):
            weight = torch.tensor(1.0 + step, requires_grad=True)
            (weight * 2).square().backward()
    page = visit.open(report(recording.history))
    expect(page.locator("#nothing")).to_contain_text("rg.watch")
    expect(page.locator(".loss .uplot")).to_be_visible()
    expect(page.locator(".loss-title")).to_contain_text("3,600")
    expect(page.locator("#quantities")).to_be_hidden()
    expect(page.locator("#facts")).to_contain_text("30 (0 to 29)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit: Visit, small: Path, scheme: str) -> None:
    page = visit.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=scheme)
    visit.open(small, "#open=head:output")
    expect(page.locator(".panel .uplot")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for canvas in page.locator("canvas:visible").all():
        box = canvas.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390
    cut = "each => each.scrollWidth > each.clientWidth || each.getBoundingClientRect().right > innerWidth"
    for chip in page.locator(".chips button, .modules td").all():
        assert not chip.evaluate(cut), chip.text_content()


def test_a_finger_reads_first_and_opens_then(browser: Browser, small: Path) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, has_touch=True)
    Visit(page).open(small)
    page.locator("#cells").tap(position={"x": 40, "y": 30})
    expect(page.locator("#tooltip .where")).to_have_text("stem.conv:output.grad")
    expect(page.locator(".panel")).to_have_count(0)
    page.locator("#cells").tap(position={"x": 40, "y": 30})
    expect(page.locator(".panel h3")).to_have_text("stem.conv:output")
    page.locator(".label", has_text="bn").first.tap()
    expect(page.locator(".panel h3")).to_have_text("stem.bn:output")
    page.close()


def test_what_autograd_keeps_stands_below_the_map(visit: Visit, tmp_path: Path) -> None:
    history = make_history(invent_training(name_resnet(1), 20))
    page = visit.open(write_report(history, tmp_path / "without.html"))
    expect(page.locator("#kept")).to_be_hidden()
    page = visit.open(write_report(history, tmp_path / "with.html", inventory=invent_inventory()))
    expect(page.locator("#kept-about")).to_contain_text("Peak: 7 kB.")
    expect(page.locator("#held-now")).to_have_text(
        "7 kB at position 2, after 2 ms: the forward creates head:AddmmBackward0"
    )
    page.locator("#timeline").press("ArrowRight")
    expect(page.locator("#timeline")).to_have_attribute("aria-valuenow", "3")
    expect(page.locator("#map-title")).to_have_text("rms of gradients of activations")
    page.locator("#treemap").click()
    expect(page.locator("#details h3")).not_to_be_empty()


def test_what_autograd_keeps_without_any_record(visit: Visit, tmp_path: Path) -> None:
    page = visit.open(write_report(History(), tmp_path / "report.html", inventory=invent_inventory()))
    expect(page.locator("#nothing")).to_be_visible()
    expect(page.locator("#treemap")).to_be_visible()


def test_a_first_view_of_one_folded_row_opens_its_worst_part(visit: Visit, report: Reporter) -> None:
    sites = [f"blocks.{i}.{name}:output.grad" for i in range(80) for name in ("fc", "act")]
    rms = np.full((160, 6), 1.0)
    rms[2 * 57 + 1, 3] = 900.0
    page = visit.open(report(make_history(Numbers(sites, rms))))
    expect(page.locator(".label.current")).to_have_attribute("title", "blocks.57.act:output")
    expect(page.locator(".label.current")).to_be_in_viewport()
    expect(page.locator("#count")).to_have_text("160 sites")
    expect(page.locator("#axis-above")).to_be_visible()  # a long map says its steps on both sides


def test_a_first_view_goes_where_numbers_were_first_not_finite(visit: Visit, report: Reporter) -> None:
    sites = [f"blocks.{i}.{name}:output.grad" for i in range(80) for name in ("fc", "act")]
    nan, rms = np.zeros((160, 6), np.int64), np.full((160, 6), 1.0)
    rms[0], nan[2 * 11, 4:], nan[2 * 30, 2:] = 900.0, 1, 1
    page = visit.open(report(make_history(Numbers(sites, rms, nan=nan))))
    expect(page.locator(".label.current")).to_have_attribute("title", "blocks.30.fc:output")


def test_a_short_map_has_one_axis(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(make_history(Numbers(["a:output.grad"], np.ones((1, 4))))))
    expect(page.locator("#axis-above")).to_be_hidden()
    expect(page.locator("#axis")).to_be_visible()


def test_neighbouring_ticks_of_an_axis_are_called_differently(browser: Browser) -> None:
    """0.4 and 0.405 were both 0.40; read from the modules themselves, whose imports are put together by hand."""
    scripts = resources.files("retrograd.core.views")
    modules = ["page/js/counts.js", "report/js/format.js", "report/js/scale.js", "report/js/chart.js"]
    source = "\n".join(scripts.joinpath(each).read_text() for each in modules)
    plain = re.sub(r"^import .*$|^export ", "", source, flags=re.MULTILINE)
    page = browser.new_page()
    ends = "[[0.393, 0.408], [-4.1e-4, 6e-4], [0.9998, 1.0003]]"
    ticks = page.evaluate(f"() => {{ {plain}\nreturn {ends}.map((each) => linearTicks(...each).map(formatTick)); }}")
    assert ticks == [["0.395", "0.4", "0.405"], ["0", "5e−4"], ["0.9998", "1", "1.0002"]]
    page.close()
