"""Parameters that never got a gradient are hatched rows of the map, in their place in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, expect
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.ungraded import list_ungraded
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import open_run
from retrograd.core.serving.followed_run import FollowedRun
from retrograd.core.views.shown import describe_ungraded
from retrograd.explaining.views.comparing.comparison_page import write_comparison
from tests.browser import Visit
from tests.core.serving.served import serving
from tests.core.views.unpacking import Page


class Net(nn.Module):
    """A layer that is never called, one that is frozen, one that is cut off, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.blocks[1].register_parameter("spare", nn.Parameter(torch.ones(3)))
        self.blocks[2].requires_grad_(requires_grad=False)
        self.unused = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.side = nn.Linear(8, 1)
        self.head = nn.Linear(8, 1)
        self.uses_side = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block[1](block[0](x))
        side = self.side(x)
        return self.head(x) + (side if self.uses_side else side.detach())


def train(net: Net, steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(steps):
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def record(folder: Path, *, uses_side: bool = False, **settings: Any) -> tuple[Net, Path]:
    torch.manual_seed(0)
    net = Net()
    net.uses_side = uses_side
    with rg.record(net, folder, **settings):
        train(net, 6)
    return net, folder


def names_without(net: Net) -> list[str]:
    """What torch itself leaves without a gradient, in the order of the model."""
    net(torch.randn(5, 4)).square().mean().backward()
    found = [name for name, each in net.named_parameters() if each.requires_grad and each.grad is None]
    net.zero_grad()
    return [":".join(name.rsplit(".", 1)) for name in found]


def names_training(net: Net) -> list[str]:
    return [":".join(name.rsplit(".", 1)) for name, each in net.named_parameters() if each.requires_grad]


def places(page: Page) -> dict[str, Any]:
    """Places of the map of weights' gradients."""
    return {
        place["name"]: place
        for place in page.facts["places"]
        if place["kind"] == "parameter" and ("grad" in place["series"] or "grad" in place["without"])
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    return record(tmp_path_factory.mktemp("ungraded") / "run")


@pytest.mark.parametrize("settings", [{}, {"sites": ["*:parameters.grad"]}], ids=["all", "gradients alone"])
def test_rows_are_those_that_torch_leaves_without(tmp_path: Path, settings: dict[str, Any]) -> None:
    net, run = record(tmp_path / "run", **settings)
    without = names_without(net)
    assert len(without) == 7
    assert sorted(list_ungraded(open_run(run).history)) == sorted(without)
    page = Page(rg.write_report(run))
    found = places(page)
    assert list(found) == names_training(net)  # in the order of the model, and none that is frozen
    assert [name for name, place in found.items() if place["without"]] == without
    assert found["unused.0:weight"]["without"]["grad"] == "never got a gradient: unused.0 is never called"
    assert "detach" in found["side:bias"]["without"]["grad"]
    assert dict(page.facts["recorded"])["without a gradient"] == "7 parameters, in the map of weight gradients"
    unrecorded = {row[0]: row[1] for table in page.facts["troubles"] for row in table["rows"]}
    assert not any(f"{name}.grad" in unrecorded for name in without)
    assert unrecorded["blocks.2.0:weight.grad"] == "the parameter is frozen"


def test_of_a_run_in_part_it_is_said_of_recorded_steps(tmp_path: Path) -> None:
    _, folder = record(tmp_path / "run", schedule=2)
    without = describe_ungraded(open_run(folder).history, {}, is_running=False)
    assert set(without.values()) == {"no gradient at a recorded step"}
    assert "unused.0:weight" in without


def test_without_any_gradient_there_is_no_map_of_them(tmp_path: Path) -> None:
    net = Net()
    with rg.record(net, tmp_path / "run"), torch.no_grad():
        net(torch.randn(5, 4))
    page = Page(rg.write_report(tmp_path / "run"))
    assert places(page) == {}
    assert not any("without a gradient" in term for term, _ in page.facts["recorded"])


def test_a_gradient_that_comes_late_makes_an_ordinary_row(tmp_path: Path) -> None:
    """While a run goes on nothing is said of its end; what was frozen meanwhile is left out."""
    net = Net()
    with rg.record(net, tmp_path / "run") as recording:
        train(net, 3)
        recording.flush()
        found = list_ungraded(open_run(tmp_path / "run").history)
        assert sorted(found) == sorted(names_without(net))
        net.uses_side = True
        net.unused.requires_grad_(requires_grad=False)
        train(net, 3)
    assert list_ungraded(open_run(tmp_path / "run").history) == ["blocks.1:spare"]


def test_a_comparison_says_in_which_runs(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, uses_side=uses)[1] for name, uses in (("a", False), ("b", True))]
    found = places(Page(write_comparison(runs, tmp_path / "page.html")))
    assert found["unused.1:bias"]["without"]["grad"] == "never got a gradient in A, B"
    assert found["side:bias"]["without"]["grad"] == "never got a gradient in A"
    assert "grad" in found["side:bias"]["series"]
    assert found["head:bias"]["without"] == {}


def test_a_followed_run_tells_it_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "page_look_seconds", 0.0)
    net = Net()
    with rg.record(net, tmp_path / "run") as recording:
        train(net, 3)
        recording.flush()
        news = FollowedRun(tmp_path / "run").find_news({}, 0, 0, 0, 1)["news"]
        told = {place["name"]: place["without"] for place in news["places"] if place["without"]}
        assert told["side:weight"]["grad"].startswith("no gradient so far")
        assert set(told) == set(names_without(net))


# ---- in a browser ----


@pytest.mark.browser
def test_a_hatched_row_is_read_with_the_mouse_the_keyboard_and_aloud(
    visit: Visit, written: tuple[Net, Path], tmp_path: Path
) -> None:
    net, run = written
    page = visit.open(rg.write_report(run, tmp_path / "report.html"), "#quantity=wgrad&depth=99")
    titles = page.eval_on_selector_all("#labels .label", "labels => labels.map((label) => label.title)")
    assert [title.split(": ")[0] for title in titles if ":" in title] == names_training(net)
    row = next(number for number, title in enumerate(titles) if title.startswith("unused.0:weight"))
    assert titles[row] == "unused.0:weight: never got a gradient: unused.0 is never called"
    expect(page.locator("#without-swatch")).to_be_visible()
    expect(page.get_by_role("treeitem", name="never got a gradient")).to_have_count(7)
    shares = page.evaluate(
        """() => {
            const cells = document.getElementById("cells");
            const height = document.querySelector(".label").offsetHeight * devicePixelRatio;
            const copy = new OffscreenCanvas(cells.width, cells.height);
            const context = copy.getContext("2d", { willReadFrequently: true });
            context.drawImage(cells, 0, 0);
            const rows = Math.round(cells.height / height);
            return Array.from({ length: rows }, (_, row) => {
                const top = Math.round((row + 0.1) * height);
                const { data } = context.getImageData(0, top, cells.width, Math.round(height * 0.7));
                let drawn = 0;
                for (let i = 3; i < data.length; i += 4) drawn += data[i] > 128;
                return drawn / (data.length / 4);
            });
        }"""
    )
    for share, title in zip(shares, titles, strict=False):
        if "never got" in title:
            assert 0.05 < share < 0.8  # lines, with the ground between them
        elif ":" in title:
            assert share == 1.0
    height = page.locator(".label").first.bounding_box()
    assert height is not None
    page.locator("#cells").hover(position={"x": 40, "y": (row + 0.5) * height["height"]})
    said = "never got a gradient: unused.0 is never called"
    expect(page.locator("#tooltip")).to_have_text(f"unused.0:weight.grad, 3 × 3{said}")
    page.locator("#viewport").focus()
    page.keyboard.press("Home")
    for _ in range(row):
        page.keyboard.press("ArrowDown")
    expect(page.locator("#readout")).to_contain_text(f"unused.0:weight.grad, 3 × 3, {said}")
    page.keyboard.press("Enter")
    expect(page.locator(".panel")).to_contain_text("Gradient: never got a gradient: unused.0 is never called.")
    csv = page.evaluate("module_csv.makeCsv()")
    assert "unused.0:weight,,,,,,\r\n" in csv
    assert visit.said == []


@pytest.mark.browser
def test_a_folded_module_counts_them_and_a_finding_leads_to_one(
    visit: Visit, written: tuple[Net, Path], tmp_path: Path
) -> None:
    page = visit.open(rg.write_report(written[1], tmp_path / "report.html"), "#quantity=wgrad&depth=0")
    blocks = page.locator("#labels .label", has_text="blocks")
    expect(blocks).to_have_attribute("title", "blocks (5 sites): 1 of 5 never got a gradient")
    expect(blocks).to_contain_text("1 of5")
    unused = page.locator("#labels .label", has_text="unused")
    expect(unused).to_have_attribute("title", "unused (4 sites): all 4 never got a gradient")
    page.locator("#findings-list li", has_text="unused.0:bias").get_by_role("button", name="Show it").click()
    expect(page.locator("#labels .current")).to_have_attribute(
        "title", "unused.0:weight: never got a gradient: unused.0 is never called"
    )
    assert visit.said == []


@pytest.mark.browser
def test_a_served_page_hatches_them_until_a_gradient_comes(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "flush_seconds", 0.2)
    monkeypatch.setattr(LIMITS, "page_look_seconds", 0.1)
    net = Net()
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    with rg.record(net, tmp_path / "run") as recording:
        train(net, 3)
        recording.flush()
        with serving(tmp_path / "run") as server:
            page.goto(server.address)
            page.wait_for_selector("html[data-ready=yes]")
            page.get_by_role("button", name="Weight gradients").click()
            page.locator("#fold").click()
            expect(page.get_by_role("treeitem", name="all 4 had no gradient so far")).to_have_count(1)
            page.locator("#unfold").click()
            row = page.locator("#labels .label", has_text="side:weight")
            expect(page.get_by_role("treeitem", name="no gradient so far")).to_have_count(7)
            net.uses_side = True
            train(net, 3)
            recording.flush()
            expect(page.get_by_role("treeitem", name="no gradient so far")).to_have_count(5)
            expect(row).to_have_attribute("title", "side:weight")
            page.close()
    assert said == []
