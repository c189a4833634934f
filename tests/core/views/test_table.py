"""Runs as text, exactly."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import NoSuchSiteError, PatternError, StatisticError
from retrograd.core.history.history import History
from retrograd.core.views.table import print_table
from retrograd.core.views.text_heatmap import print_heatmap
from tests.core.views.invented import Numbers, make_history

SITES = ["stem:output", "stem:output.grad", "fc:output", "fc:output.grad", "fc:weight.grad", "fc:weight.update"]

TABLE = """\
3 sites, steps 0 to 70, rms, phase train
site         value  gradient  over steps  zeros  nonfinite  update
stem:output      1  1.00e-05  █▇▆▅▄▃▂▁     0.0%          2       -
fc:output        2      0.01  ▁▂▃▄▅▆▇█    25.0%          -       -
fc:weight        -       0.1  ▁▁▁▁▁▁▁▁     0.0%          -   0.002
"""

HEATMAP = """\
stem:output.grad  ███▓▓▒!░
fc:output.grad    ···░░▒▒▓
                  step 0 70
"""


@pytest.fixture
def history() -> History:
    ramp = np.arange(8)
    rms = np.array([[1.0], [1.0], [2.0], [1.0], [0.1], [1e-4]]) * np.ones(8)
    rms[1], rms[3] = 10.0 ** (2 - ramp), 10.0 ** (ramp - 9)
    zeros = np.array([0, 0, 0.25, 0, 0, 0])[:, None]
    nan = np.zeros((6, 8), dtype=np.int64)
    nan[1, 6] = 2
    return make_history(Numbers(SITES, rms, zero_share=zeros, nan=nan, every=10, bins=0))


def table(history: History, *arguments: object, **options: object) -> str:
    file = io.StringIO()
    print_table(history, *arguments, file=file, **options)
    return file.getvalue()


def test_a_piped_table_is_plain_and_whole(history: History) -> None:
    assert "\x1b" not in table(history)
    assert table(history) == TABLE


def test_patterns_choose_and_an_order_sorts(history: History) -> None:
    lines = table(history, ["*:output*"], sort="gradient").splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["fc:output", "stem:output"]
    assert table(history, sort="nonfinite").splitlines()[2].startswith("stem:output")
    assert table(history, sort="update").splitlines()[2].startswith("fc:weight")


def test_names_are_never_cut_in_a_pipe() -> None:
    long = "a" * 300 + ":output"
    assert long in table(make_history(Numbers([long], np.ones((1, 2)))))


class Window(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(window: Window) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", window.getvalue())


def test_a_narrow_window_shortens_curves_not_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    sites = ["features.0:output", "features.0:output.grad"]
    window = Window()
    print_table(make_history(Numbers(sites, np.ones((2, 150)))), file=window)
    lines = window.getvalue().splitlines()
    assert any(line.startswith("features.0:output ") for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("columns", "left_out"),
    [
        ("80", ""),
        ("70", "nonfinite (none)"),
        ("60", "nonfinite (none), zeros, update"),
        ("50", "nonfinite (none), zeros, update, value"),
    ],
)
def test_a_narrower_window_leaves_out_columns_before_it_folds_names(
    columns: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    place = "blocks.3.attn.qkv"
    sites = [f"{place}:output", f"{place}:output.grad", f"{place}:weight.grad", f"{place}:weight.update"]
    window = Window()
    print_table(make_history(Numbers(sites, np.ones((4, 150)), zero_share=np.zeros((4, 1)))), file=window)
    lines = [line.rstrip() for line in plain(window).splitlines()]
    assert max(map(len, lines)) <= int(columns)
    for site in (sites[0], f"{place}:weight"):
        assert sum(line.startswith(f"{site} ") for line in lines) == 1
    said = " ".join(lines).partition("not shown, because the window is too narrow: ")[2]
    assert said == left_out


def test_what_is_not_finite_stays_in_a_narrow_table(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    window = Window()
    print_table(history, file=window)
    lines = [line.split() for line in plain(window).splitlines()]
    assert ["site", "gradient", "nonfinite"] in lines
    assert "not shown, because the window is too narrow: zeros, update, value, over steps" in " ".join(
        plain(window).split()
    )


def test_names_are_no_markup_and_no_orders_to_the_terminal() -> None:
    assert "[red]x\\x1b[2J:output" in table(make_history(Numbers(["[red]x\x1b[2J:output"], np.ones((1, 2)))))


def test_a_terminal_without_block_elements_gets_plain_letters(history: History) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_table(history, file=file)
    print_heatmap(history, ["*:outputs.grad"], file=file)


def test_wrong_wishes_are_refused(history: History) -> None:
    with pytest.raises(NoSuchSiteError):
        table(history, ["nowhere*"])
    with pytest.raises(PatternError, match="one of calls, name"):
        table(history, sort="beauty")
    with pytest.raises(StatisticError):
        table(history, statistic="kurtosis")


def test_a_heatmap_in_characters(history: History) -> None:
    file = io.StringIO()
    print_heatmap(history, file=file)
    lines = file.getvalue().splitlines()
    assert lines[:3] == HEATMAP.splitlines()
    assert lines[3].startswith("rms, log scale, ")


@pytest.mark.parametrize(("value", "said"), [(0.0, "0"), (0.25, "0.25")])
def test_a_heatmap_of_one_number_says_it(value: float, said: str) -> None:
    file = io.StringIO()
    print_heatmap(make_history(Numbers(["fc:output.grad"], np.full((1, 5), value))), file=file)
    assert file.getvalue().splitlines()[2].startswith(f"rms is {said} everywhere; ")


def test_numbers_that_only_look_the_same_in_a_heatmap_are_no_constant() -> None:
    file = io.StringIO()
    print_heatmap(make_history(Numbers(["fc:output.grad"], np.tile([1.0, 0.5], (1, 100)))), file=file)
    assert "everywhere" not in file.getvalue()


def test_an_empty_history_is_an_empty_table() -> None:
    assert table(History()).startswith("0 sites, no steps")


def test_a_place_without_a_finite_number_is_marked() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net) as recording:
        for step in range(4):
            optimizer.zero_grad()
            (net(torch.ones(2, 3)) * (float("nan") if step == 2 else 1.0)).sum().backward()
            optimizer.step()
    lines = {line.split()[0]: line.split() for line in table(recording.history).splitlines()[2:]}
    assert lines["0:output"][1:3] == ["NaN", "NaN"]
    assert lines["1:weight"][1:3] == ["-", "NaN"]
    assert lines["1:weight"][-1] == "NaN"  # the update
    assert table(recording.history, sort="update").splitlines()[2].split()[-1] == "NaN"


def test_a_place_with_some_finite_numbers_shows_them() -> None:
    with rg.record(nn.Identity()) as recording:
        rg.watch("mine", torch.tensor([3.0, float("nan")]))
    [line] = [line for line in table(recording.history, ["watch/mine"]).splitlines() if line.startswith("watch")]
    assert line.split()[1] == "3"
