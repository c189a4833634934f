"""Pictures of kept tensors on the page of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser, expect
from torch import nn

import retrograd as rg
from retrograd.core.errors import DamagedRunError
from retrograd.core.history.kept import Kept
from retrograd.core.history.sink import Moment
from retrograd.core.views.report.report import describe_picture
from tests.core.views.unpacking import Page


def keep(tensor: torch.Tensor | None) -> Kept:
    return Kept(Moment(3, 1), "fc:output", lambda: tensor)


def test_cells_are_elements_by_the_largest_magnitude() -> None:
    tensor = torch.tensor([[1.0, -0.5, 0.0], [-2.0, 0.25, float("nan")]])
    told, _ = describe_picture(keep(tensor))
    assert (told["step"], told["micro"], told["shape"], told["columns"], told["bound"]) == (3, 1, [2, 3], 3, 2.0)
    assert told["cells"] == [*np.rint(np.array([0.5, -0.25, 0, -1, 0.125]) * 127).astype(int), 128]


def test_a_cell_of_several_elements_has_the_largest_of_them() -> None:
    tensor = torch.zeros(64, 960)
    tensor[63, 955] = -3.0
    tensor[63, 956] = 1.0
    told, _ = describe_picture(keep(tensor))
    cells = np.array(told["cells"]).reshape(-1, told["columns"])
    assert cells.shape == (32, 96)
    assert cells[31, 95] == -127
    assert np.count_nonzero(cells) == 1


@pytest.mark.parametrize(
    ("tensor", "cells", "first"),
    [
        (torch.tensor(2.0), [127], 0),
        (torch.tensor([True, False]), [127, 0], 0),
        (torch.tensor([3 - 4j, 0j]), [127, 0], 0),
        (torch.arange(8.0).view(2, 2, 2), [0, 42, 85, 127], 1),
        (torch.tensor([0.0, 1.0]).to_sparse(), [0, 127], 0),
        (torch.zeros(3), [0, 0, 0], 0),
        (torch.tensor([float("inf"), 1.0]), [128, 127], 0),
    ],
)
def test_every_kind_of_tensor_has_cells(tensor: torch.Tensor, cells: list[int], first: int) -> None:
    told, size = describe_picture(keep(tensor))
    assert (told["cells"], told["first"]) == (cells, first)
    assert size == tensor.numel() * tensor.element_size()


def test_what_is_lost_or_empty_says_so() -> None:
    assert describe_picture(keep(None))[0]["why"] == "changed in place after it was kept"
    assert describe_picture(keep(torch.empty(0, 3)))[0]["why"] == "it has no elements"


def test_a_damaged_file_of_tensors_leaves_the_report_whole(tmp_path: Path) -> None:
    net = nn.Linear(3, 4)
    with rg.record(net, tmp_path / "run", tensors="self:output"):
        net(torch.ones(5, 3)).sum().backward()
    [*shards] = (tmp_path / "run").rglob("*.safetensors")
    assert shards
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-8])
    page = Page(rg.write_report(tmp_path / "run", tmp_path / "page.html"))
    assert "pictures" not in "".join(name for name in page.scripts)


def test_a_file_that_is_gone_by_then_leaves_the_report_whole() -> None:
    def load() -> torch.Tensor | None:
        raise DamagedRunError("gone")

    assert describe_picture(Kept(Moment(3), "fc:output", load))[0]["why"] == "its file cannot be read"


@pytest.mark.browser
def test_a_panel_draws_the_last_ones_that_were_kept(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, tensors="0:output") as recording:
        for _ in range(6):
            for _ in range(2):
                net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
    page = browser.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(rg.write_report(recording, tmp_path / "page.html").as_uri() + "#open=0%3Aoutput")
    expect(page.locator(".pictures figure canvas")).to_have_count(4)
    expect(page.locator(".pictures figcaption").last).to_contain_text("step 5, micro-batch 1, 5 × 4, up to ±")
    page.goto("about:blank")
    page.goto((tmp_path / "page.html").as_uri() + "#open=0%3Aweight")
    expect(page.locator(".side h4")).to_contain_text(["gradient", "accumulated gradient", "update"])
    assert not said
