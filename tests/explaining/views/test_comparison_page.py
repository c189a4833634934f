"""Several runs in one page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

import retrograd as rg
from retrograd.core.errors import CompareError
from retrograd.core.history.history import History
from retrograd.core.limits import LIMITS
from retrograd.explaining.views.comparing.alignment import align, merge_orders
from retrograd.explaining.views.comparing.comparison_page import name_apart, write_comparison
from retrograd.explaining.views.comparing.numbers import find_ratios
from tests.browser import Visit
from tests.core.runs.written import write_run
from tests.core.serving.served import Training, serving, write_runs
from tests.core.views.invented import Numbers, invent_training, make_history, name_resnet
from tests.core.views.test_page import HOSTILE
from tests.core.views.unpacking import Page

SITES = ["a:output.grad", "b:output.grad", "c:output.grad"]


def history(rms: np.ndarray, sites: list[str] = SITES, **more: object) -> History:
    loss = np.linspace(2.0, 1.0, rms.shape[1])
    return make_history(Numbers(sites, rms, bins=0, loss=loss, **more))  # type: ignore[arg-type]


def three() -> tuple[History, History, History]:
    """One; one that is shorter, with a dead layer, a tenfold one and another layer; one that was zero before."""
    first = np.ones((3, 40))
    second = np.ones((4, 25))
    second[0, 10:] = 0.0
    second[3] = 10.0
    third = first.copy()
    first[1, :5] = 0.0
    return history(first), history(second, ["a:output.grad", "new:output.grad", *SITES[1:]]), history(third)


@pytest.mark.parametrize("columns", [1000, 8])
def test_ratios_are_those_of_numpy_and_zero_is_told_apart(columns: int) -> None:
    first, second, _ = three()
    aligned = align([first, second], None, columns, 8.0)
    assert aligned.names == ["a:output.grad", "new:output.grad", "b:output.grad", "c:output.grad"]
    found, width = find_ratios(aligned, 1), aligned.columns.width
    every = np.full((4, 40), np.nan)
    every[0, :25] = [*[0.0] * 10, *[-np.inf] * 15]
    every[2, :25] = [*[np.inf] * 5, *[0.0] * 20]
    every[3, :25] = np.log2(10.0)
    wanted = np.full((4, -(-40 // width)), np.nan)
    for column in range(wanted.shape[1]):
        for row in range(4):
            some = every[row, column * width : (column + 1) * width]
            some = some[~np.isnan(some)]
            if len(some):
                wanted[row, column] = max(some, key=abs)
    np.testing.assert_allclose(found, wanted)


def test_sites_of_one_run_with_the_same_plain_name_have_rows_of_their_own() -> None:
    both = history(np.array([[1.0] * 4, [8.0] * 4]), ["fc:output.grad", "_orig_mod.fc:output.grad"])
    aligned = align([both, history(np.full((1, 4), 2.0), ["fc:output.grad"])], None, 1000, 8.0)
    assert sorted(aligned.names) == ["_orig_mod.fc:output.grad", "fc:output.grad"]
    ratios = dict(zip(aligned.names, find_ratios(aligned, 1), strict=True))
    np.testing.assert_array_equal(ratios["fc:output.grad"], 1.0)  # log₂ of 2
    assert np.isnan(ratios["_orig_mod.fc:output.grad"]).all()
    assert rg.compare(both, both).verdict == "identical"


def test_orders_are_merged() -> None:
    assert merge_orders([["a", "b", "c"], ["a", "x", "b", "y"], ["z", "c"]]) == ["z", "a", "x", "b", "y", "c"]
    assert name_apart(["a", "b", "a"]) == ["a (1)", "b", "a (2)"]


def test_the_page_tells_what_only_some_have(tmp_path: Path) -> None:
    page = Page(write_comparison(three(), tmp_path / "page.html"))
    assert [run["letter"] for run in page.facts["runs"]] == ["A", "B", "C"]
    told = " ".join(page.facts["apart"])
    assert "B has 25 steps (0 to 24)" in told
    assert "Only B has new:output.grad" in told
    assert {place["name"]: place["note"] for place in page.facts["places"]} == {
        "a:output": "", "new:output": "only B", "b:output": "", "c:output": "",
    }  # fmt: skip
    assert [each["verdict"] for each in page.facts["verdicts"]] == ["different", "different"]
    assert [each["called"] for each in page.facts["verdicts"]] == ["B", "C"]
    assert page.facts["verdicts"][0]["visit"] is not None
    np.testing.assert_allclose(page.line("rms-1", "low", "c:output.grad")[:25], 10.0)
    assert np.isnan(page.line("rms-1", "low", "c:output.grad")[25:]).all()


def test_comparisons_that_are_given_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = three()
    made = rg.compare(first, second)
    monkeypatch.delattr("retrograd.explaining.views.comparing.comparison_page.compare")
    write_comparison([first, second], tmp_path / "page.html", comparisons=[made])


def test_runs_without_anything_in_common_are_shown_nevertheless(tmp_path: Path) -> None:
    page = Page(
        write_comparison(
            [history(np.ones((1, 3)), ["a:output"]), history(np.ones((1, 3)), ["b:output"])], tmp_path / "p"
        )
    )
    assert page.facts["verdicts"][0]["verdict"] == "cannot be compared"
    with pytest.raises(CompareError):
        write_comparison([three()[0]], tmp_path / "p")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    sites = [f"{HOSTILE}:output", f"{HOSTILE}:output.grad"]
    page = Page(write_comparison([history(np.ones((2, 3)), sites), history(np.zeros((2, 3)), sites)], tmp_path / "p"))
    plain = Page(write_comparison(three()[:2], tmp_path / "q"))
    assert HOSTILE not in page.text
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert "default-src 'none'" in page.policy
    assert "connect-src" not in page.policy


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in ("one", "two", "<img src=x onerror=alert(1)>")]
    for folder, steps in zip(folders, (5, 5, 3), strict=True):
        write_run(folder, range(steps))
    from retrograd.core.cli import main

    assert main(["compare", *map(str, folders), "-o", str(tmp_path / "c.html")]) == 0
    said = capsys.readouterr().out
    first, second = said.split(f"C = {folders[2]}: identical")
    start, first = first.split("B = ")
    assert start.splitlines()[2].split() == ["final", "loss", "4", "4", "2"]
    assert first.startswith(f"{folders[1]}: identical")
    assert "A was recorded up to step 4, C up to step 2\n" in second
    assert "<img" not in (tmp_path / "c.html").read_text()


# ---- in a browser ----


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(three(), tmp_path_factory.mktemp("compared") / "page.html")


@pytest.mark.browser
def test_map_losses_and_curves_show_all_runs(visit: Visit, written: Path) -> None:
    page = visit.open(written)
    expect(page.locator("#runs tr")).to_have_count(3)
    expect(page.locator("#map-title")).to_contain_text("rms of gradients of activations")
    expect(page.locator("#gone-swatch")).to_be_visible()
    expect(page.locator("#come-swatch")).to_be_visible()
    expect(page.locator("#loss-value .reading")).to_have_count(3)
    expect(page.locator("#scale-bar .ticks")).to_contain_text("×10")
    page.locator(".label", has_text="c").last.click()
    panel = page.locator(".panel")
    expect(panel.locator(".plot-title").first.locator(".reading")).to_have_count(3)
    expect(panel.locator(".plot-title").first).to_contain_text("B 10")
    page.get_by_role("button", name="curves of B").click()
    expect(panel.locator(".plot-title").first.locator(".reading")).to_have_count(2)
    expect(page.locator("#loss-value .reading")).to_have_count(2)
    page.get_by_role("button", name="Show it").first.click()
    expect(page.locator(".panel")).to_have_count(1)
    page.keyboard.press("Escape")
    page.locator("#viewport").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).not_to_be_empty()


@pytest.mark.browser
def test_hostile_names_do_nothing_in_a_browser(visit: Visit, tmp_path: Path) -> None:
    sites = [f"{HOSTILE}:output.grad", f"b.{HOSTILE}:output.grad", f"c.{HOSTILE}:output.grad"]
    runs = [history(np.ones((3, 3)), sites), history(np.zeros((2, 3)), sites[:2]), history(np.ones((2, 3)), sites[1:])]
    page = visit.open(write_comparison(runs, tmp_path / "sites.html"))
    expect(page.locator("#apart")).to_contain_text("<script>")
    page.locator("#unfold").click()
    page.locator("#labels .label:not(.folder)").last.click()
    expect(page.locator(".panel h3")).to_contain_text("<script>")
    page.locator("#viewport").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text("<script>")
    for button in page.get_by_role("button", name="Show it").all():
        button.click()
    assert (
        page.locator("img, svg:not(#start-overlay svg), iframe").count() == 0
    )  # the fixture holds that nothing was said or asked for


@pytest.mark.browser
def test_hostile_names_of_runs_do_nothing_in_a_browser(visit: Visit, tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "'\"><svg onload=alert(2)>", "$title ${facts}"]
    folders = [write_run(tmp_path / "runs" / name, range(2 + number)) for number, name in enumerate(names)]
    page = visit.open(write_comparison(folders, tmp_path / "runs.html"))
    for number, name in enumerate(names):
        expect(page.locator("#runs tr").nth(number)).to_contain_text(name)
    expect(page.locator("#verdicts")).to_contain_text(names[1])
    page.locator("#labels .label:not(.folder)").first.click()
    expect(page.locator(".panel")).to_have_count(1)
    assert page.locator("img, svg:not(#start-overlay svg), iframe").count() == 0


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(visit: Visit, written: Path, theme: str) -> None:
    visit.page.set_viewport_size({"width": 390, "height": 800})
    page = visit.open(written, f"#theme={theme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
def test_1880_sites_of_three_runs_open(visit: Visit, tmp_path: Path) -> None:
    paths = name_resnet(100)
    runs = [make_history(invent_training(paths, 60, bins=0, seed=seed)) for seed in range(3)]
    assert sum(len(run.sites) for run in runs) > 3 * 1600
    path = write_comparison(runs, tmp_path / "large.html")
    assert path.stat().st_size < 16e6
    expect(visit.open(path).locator("#runs tr")).to_have_count(3)


@pytest.mark.browser
def test_runs_are_chosen_in_the_list_and_one_that_goes_on_is_followed(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "compared_pause", 0.5)
    monkeypatch.setattr(LIMITS, "look_share", 1.0)  # a busy machine takes seconds for a page
    parent = write_runs(tmp_path / "runs")
    training = Training(parent / "going")  # before there are threads
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    try:
        with serving(parent) as server:
            page.goto(server.address)
            expect(page.locator("#compare")).to_be_disabled()
            page.get_by_label("compare done").check()
            page.get_by_label("compare going").check()
            page.locator("#compare").click()
            expect(page.locator("#runs tr")).to_have_count(2)
            expect(page.locator("#runs tr").nth(0)).to_contain_text("done")
            page.wait_for_selector("html[data-ready=yes]")
            before = page.locator("#runs tr").nth(1).inner_text()
            expect(page.locator("#runs tr").nth(1)).not_to_have_text(before, use_inner_text=True)
            training.kill()
            expect(page.locator(".status").nth(1)).to_have_text("stopped")
            page.goto("about:blank")
    finally:
        training.kill()
        page.close()
    assert said == []
