"""The strip of scalars above the map, in a browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment
from retrograd.core.views.report import write_report
from tests.browser import Reporter, Visit
from tests.core.views import unpacking
from tests.core.views.invented import invent_training, make_history, name_resnet
from tests.core.views.test_page import HOSTILE

pytestmark = pytest.mark.browser

STEPS = 120
NOISE = np.random.default_rng(3).standard_normal(STEPS)
SERIES = {
    "lr[0]": np.linspace(1e-3, 1e-4, STEPS),
    "lr[1]": np.linspace(1e-2, 1e-3, STEPS),
    "grad_norm": np.exp(0.3 * NOISE),
    "epoch": np.arange(STEPS) // 30,
    "accuracy": NOISE,
}


def make_run(series: dict[str, np.ndarray] | None = None, evaluated: int = 30) -> History:
    """A training with a loss each step, one of evaluation every so many steps, and other scalars, 0.5 s a step."""
    numbers = invent_training(name_resnet(), STEPS)
    numbers.loss = None
    history = make_history(numbers)
    generator = np.random.default_rng(1)
    for step in range(STEPS):
        moment, time = Moment(step), 1.75e9 + 0.5 * step
        history.add_event(Event(moment, "loss", value=float(np.exp(-step / 40) + 0.1 * generator.random()), time=time))
        found = {name: values[step] for name, values in (SERIES if series is None else series).items()}
        if step % evaluated == evaluated - 1:
            found["eval_loss"] = 2 * np.exp(-step / 40)
        for name, value in found.items():
            history.add_event(Event(moment, "scalar", name=name, value=float(value), time=time))
    return history


def names(page: Page) -> list[str]:
    """The charts that are open."""
    return page.locator(".strip-chart").evaluate_all("charts => charts.map(chart => chart.ariaLabel)")


def lines(page: Page, chart: int, member: int = 0) -> list[list[float]]:
    """What is drawn of one scalar: raw, then smoothed."""
    found: list[list[float]] = page.evaluate(
        "([chart, member]) => module_scalars.linesOf([...module_scalars.listCharts().values()][chart])"
        ".filter(({ name }, i, all) => name === [...new Set(all.map(each => each.name))][member])"
        ".map(({ line }) => [...line].map(Number))",
        [chart, member],
    )
    return found


@pytest.fixture(scope="module")
def strip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(), tmp_path_factory.mktemp("strip") / "report.html")


def test_the_loss_is_open_and_others_are_chosen_and_remembered(visit: Visit, strip: Path) -> None:
    page = visit.open(strip)
    assert names(page) == ["loss"]
    expect(page.locator("#strip-names button")).to_have_text(
        ["loss", "lr", "grad_norm", "step_time", "epoch", "accuracy"]
    )
    page.locator("#strip-names").get_by_text("lr").click()
    page.locator("#strip-names").get_by_text("grad_norm").click()
    expect(page.locator(".strip-chart")).to_have_count(3)
    page.locator("#strip-names").get_by_text("loss").click()
    expect(page.locator(".strip-chart")).to_have_count(2)
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-ready=yes]")
    assert names(page) == ["lr", "grad_norm"]
    page.locator("#strip-names").get_by_text("lr").click()
    page.locator("#strip-names").get_by_text("grad_norm").click()
    expect(page.locator(".strip-chart")).to_have_count(0)


def test_smoothing_is_that_of_tensorboard(visit: Visit, strip: Path) -> None:
    page = visit.open(strip, "#smooth=0.9")
    raw, smoothed = lines(page, 2)
    last, wanted = 0.0, []
    for n, value in enumerate(raw, 1):  # as tensorboard/webapp/widgets/line_chart_v2/data_transformer.ts
        last = last * 0.9 + 0.1 * value
        wanted.append(last / (1 - 0.9**n))
    np.testing.assert_allclose(raw, SERIES["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(smoothed, wanted, rtol=1e-5)
    assert len(lines(page, 1)) == 1  # a rate is set, not measured
    assert len(lines(page, 0, 1)) == 1  # and few points stay points
    expect(page.locator(".strip-chart .note").first).to_contain_text("smoothed")
    page.locator("#smooth").fill("0")
    expect(page.locator("#smooth-value")).to_have_text("off")
    assert len(lines(page, 2)) == 1


def test_values_at_the_cursor_are_read_with_step_epoch_and_time(visit: Visit, strip: Path) -> None:
    page = visit.open(strip, "#scalars=loss&scalars=lr&scalars=grad_norm")
    page.evaluate("module_state.change({ cursor: 59 })")
    expect(page.locator("#strip-where")).to_have_text("step 59 · epoch 1 · 29.5 s")
    readings = page.locator(".strip-chart .reading")
    expect(readings.nth(1)).to_have_text(f"eval{2 * np.exp(-59 / 40):.3f}")
    expect(readings.nth(2)).to_have_text(f"[0]{SERIES['lr[0]'][59]:.3g}".replace("0.000554", "5.54e−4"))
    page.evaluate("module_state.change({ cursor: 70 })")
    expect(readings.nth(1)).to_have_text(f"eval{2 * np.exp(-59 / 40):.3f}")  # that of the last evaluation before


def test_a_scale_is_said_and_switched_and_logarithmic_only_of_positive_numbers(visit: Visit, strip: Path) -> None:
    page = visit.open(strip, "#scalars=loss&scalars=lr&scalars=accuracy")
    scales = page.locator(".strip-chart .small")
    expect(scales).to_have_text(["log", "linear", "linear"])
    scales.nth(1).click()
    expect(scales).to_have_text(["log", "log", "linear"])
    assert "scales=lr" in page.url
    expect(scales.nth(2)).to_be_disabled()
    expect(scales.nth(2)).to_have_attribute("title", "linear: some numbers are not positive")


@pytest.mark.parametrize(("key", "last"), [("step", STEPS), ("epoch", 3 + 29 / 30), ("time", (STEPS - 1) / 2)])
def test_the_axis_is_steps_epochs_or_time_and_the_cursor_follows(
    visit: Visit, strip: Path, key: str, last: float
) -> None:
    page = visit.open(strip, f"#x={key}")
    range_, column = page.evaluate(
        """() => {
            const axis = module_strip_axis.makeAxis(true);
            return [axis.range(), [...Array(120).keys()].filter((i) => axis.columnAt(axis.placeOf(i)) !== i)];
        }"""
    )
    assert range_ == pytest.approx([0, last], abs=1e-5)
    assert column == []
    box = page.locator(".strip-chart .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    expect(page.locator("#strip-where")).to_contain_text("step")
    middle = page.evaluate("module_state.state.cursor")
    assert abs(middle - STEPS / 2) <= 1
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 20)
    page.mouse.up()
    expect(page.locator("#reset")).to_contain_text(f"steps {middle}–")  # the map shows the same steps


def test_what_is_not_finite_is_marked_and_said(visit: Visit, report: Reporter) -> None:
    broken = np.where(np.arange(STEPS) < 100, 1.0, np.nan)
    broken[40] = np.inf
    page = visit.open(report(make_run({"broken": broken})), "#scalars=broken&smooth=0.5")
    expect(page.locator(".reading b")).to_have_text("NaN since step 100")
    bad = page.evaluate(
        "[...module_scalars.badOf(module_scalars.listCharts().get('broken'))].flatMap((is, i) => (is ? [i] : []))"
    )
    assert bad == [40, *range(100, STEPS)]


def test_arrow_keys_move_the_cursor_of_all(visit: Visit, strip: Path) -> None:
    page = visit.open(strip)
    page.locator("#loss-charts").focus()
    for key in ("ArrowRight", "Shift+ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
        page.wait_for_timeout(40)
    expect(page.locator("#strip-where")).to_contain_text("step 10 ·")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_twenty_scalars_fit_a_phone(visit: Visit, report: Reporter, scheme: str) -> None:
    many = {f"a_rather_long_name_of_a_scalar_{i}": NOISE + i for i in range(20)}
    page = visit.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=scheme)
    visit.open(report(make_run(many)), "#" + "&".join(f"scalars={name}" for name in many))
    expect(page.locator(".strip-chart .uplot")).to_have_count(20)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_names_are_text(visit: Visit, report: Reporter) -> None:
    page = visit.open(report(make_run({HOSTILE: NOISE})))
    page.locator("#strip-names button").last.click()
    expect(page.locator(".strip-chart")).to_have_count(2)
    expect(page.locator(".strip-chart .name").last).to_have_text(HOSTILE)


def test_steps_between_recorded_ones_and_the_clock_are_in_the_file(tmp_path: Path) -> None:
    history = make_run()
    page = unpacking.Page(write_report(history, tmp_path / "page.html", columns=40))
    low, mean, high = page.scalar("grad_norm")
    wanted = SERIES["grad_norm"].reshape(40, 3)
    np.testing.assert_allclose(low, wanted.min(axis=1), rtol=1e-6)
    np.testing.assert_allclose(mean, wanted.mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(high, wanted.max(axis=1), rtol=1e-6)
    np.testing.assert_allclose(page.scalar("")[1], np.arange(STEPS).reshape(40, 3).mean(axis=1) / 2, rtol=1e-6)


def test_what_ignored_outliers_leave_out_is_marked_with_its_value(visit: Visit, report: Reporter) -> None:
    norms = np.linspace(1.0, 2.0, STEPS)
    norms[40], norms[90] = 437.0, -613.0
    page = visit.open(report(make_run({"norm": norms})), "#scalars=norm")
    told = """() => { const drawn = []; const { fillText } = CanvasRenderingContext2D.prototype;
        CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
            drawn.push(text);
            return fillText.call(this, text, ...at);
        };
        return drawn; }"""
    drawn = page.evaluate_handle(told)
    page.locator("#outliers").click()  # the full range
    page.wait_for_timeout(100)
    assert not {"437", "−613"} & set(drawn.json_value())
    page.locator("#outliers").click()
    page.wait_for_timeout(300)
    assert {"437", "−613"} <= set(drawn.json_value())
