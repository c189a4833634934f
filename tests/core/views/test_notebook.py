"""What a notebook shows of things, and what is drawn with matplotlib; a console sees what it always saw."""

from __future__ import annotations

import html
import random
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import matplotlib as mpl
import numpy as np
import polars as pl
import pytest
import torch
from IPython.core.compilerop import CachingCompiler
from matplotlib import pyplot
from torch import nn

import retrograd as rg
from retrograd.core.cells import show_line
from retrograd.core.errors import LibraryError
from retrograd.core.history.curve import Curve
from retrograd.core.history.matrix import Matrix
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import Finding, Findings
from retrograd.core.views.notebook.page import MOST_ROWS, NotebookPage
from retrograd.core.views.notebook.records import colour_map
from retrograd.core.views.terminal import make_table
from retrograd.memory.budget.planned import Planned
from tests.following.views.invented_trace import invent_trace

HOSTILE = '<img src=x onerror="alert(1)">\u202e\x1b[31m'
INNER = {"div", "pre", "span", "table", "thead", "tbody", "tr", "th", "td", "img", "ol", "li", "b", "br", "small"}
FOLDED = {"details", "summary", "dl", "dt", "dd"}


class Elements(HTMLParser):
    """Elements, their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.sources: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.sources += [str(value) for name, value in attrs if name == "src"]

    def handle_data(self, data: str) -> None:
        self.text += data


def check_inert(page: str) -> Elements:
    """Plain elements, no scripts, nothing that is fetched, and no character that nobody sees."""
    found = Elements(page)
    assert found.names <= INNER | FOLDED
    assert found.attributes <= {"style", "class", "alt", "src", "colspan"}
    assert all(source.startswith("data:image/png;base64,") for source in found.sources)
    assert found.text.replace("\n", "").isprintable()
    return found


def list_cells(page: str) -> list[list[str]]:
    """Texts of the cells of all rows."""
    rows = [re.findall(r"<t[hd].*?>(.*?)</t", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in cells] for cells in rows]


class Net(nn.Module):
    def __init__(self, name: str = "fc") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(3, 2))
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(next(iter(self.children()))(x))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rg.Run:
    torch.manual_seed(0)
    net, path = Net(HOSTILE.replace(".", "")), tmp_path_factory.mktemp("runs") / "a"
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, path):
        for _ in range(30):
            net(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rg.open_run(path)


@pytest.fixture(scope="module")
def shown(run: rg.Run) -> dict[str, Any]:
    """One of each kind, all with a name that somebody else has chosen."""
    net = Net(HOSTILE.replace(".", ""))
    x = torch.randn(4, 3, dtype=torch.float32)
    with rg.record_origins(), rg.take_inventory() as inventory, rg.trace() as trace:
        loss = net(x).square().mean()
        graph = rg.walk(loss)
        loss.backward()
    finding = Finding(detector="d", severity="critical", message=HOSTILE, site=HOSTILE, repair=HOSTILE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net) as recording:
        for _ in range(3):
            net(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            rg.log({HOSTILE: 0.5})
    site = next(each for each in run.history.sites if each.endswith("weight.grad"))
    return {
        "a history": run.history,
        "a run": run,
        "a recording": recording,
        "a series": run.history[site],
        "a selection": run.history["*:weight.grad"],
        "a matrix": run.history.matrix("rms"),
        "scalars": recording.history.scalars,
        "a trace": trace,
        "a graph": graph,
        "an inventory": inventory,
        "a check": rg.check_adjoint(net.double(), torch.randn(4, 3, dtype=torch.float64)),
        "findings": Findings([finding], about=HOSTILE),
        "a plan": rg.plan_recording(net),
    }


def test_all_of_them_are_inert_and_say_what_the_text_says(shown: dict[str, Any]) -> None:
    for name, thing in shown.items():
        found = check_inert(thing._repr_html_())
        assert len(thing._repr_html_()) < 60_000, name
        has_name = "onerror" in found.text
        assert has_name or name == "findings", name
        assert "<img src=x" in found.text, name
        assert "onerror" not in repr(Elements(thing._repr_html_()).attributes)
    table = rg.format_table(shown["a history"])
    text = Elements(shown["a history"]._repr_html_()).text
    assert all(word in text for word in table.split() if word.replace(".", "").isdigit())


def test_the_plan_of_a_budget_has_the_numbers_of_its_text(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh())
    policy = Planned(2**40, folder=tmp_path, min_bytes=0)
    with rg.keep_saved(net, policy):
        net(torch.randn(32, 64)).sum().backward()
    [plan] = policy.plans
    found = check_inert(plan._repr_html_())
    told = plan.explain().split("predicted time\n")[0].rpartition("\n")[0]
    assert [word for word in told.split() if word not in found.text] == []


def test_a_console_shows_what_it_did(shown: dict[str, Any]) -> None:
    assert repr(shown["a history"]).startswith("History(")
    assert repr(shown["a series"]).startswith("Series(")
    assert repr(shown["a matrix"]) == f"Matrix({len(shown['a matrix'].sites)} sites × 30 steps, 0…29)"
    assert repr(shown["a plan"]) == str(shown["a plan"])


def test_a_long_history_begins_with_activations_and_counts_the_rest() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(MOST_ROWS)))
    with rg.record(net) as recording:
        net(torch.randn(4, 2)).sum().backward()
    text = Elements(recording.history._repr_html_()).text  # an output and two parameters each, and the whole net
    assert f"{3 * MOST_ROWS + 1} sites, steps 0 to 0" in text
    assert text.index("0:output") < text.index(f"{MOST_ROWS - 1}:output")
    assert "weight" not in text
    assert text.rstrip().endswith(f"{2 * MOST_ROWS + 1} more sites")
    [chosen] = [recording.history["3:*"]._repr_html_()]
    assert ("3:weight" in chosen, "4:output" in chosen) == (True, False)


def test_scalars_have_their_units_and_a_loss_that_is_lost_is_seen() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with rg.record(net) as recording:
        for step in range(6):
            optimizer.zero_grad()
            (net(torch.ones(3, 2)).mean() * (float("nan") if step > 3 else 1.0)).backward()
            if step == 2:
                rg.log(**{HOSTILE.partition("\u202e")[0]: 2048.0})
            optimizer.step()
    scalars = recording.history.scalars
    found = check_inert(scalars._repr_html_())
    assert "6 steps, 0 to 5" in found.text
    cells = {row[0]: row[1:] for row in list_cells(scalars._repr_html_())[1:]}
    assert list(cells) == list(scalars)
    low, high = np.nanmin(scalars["loss"].values), np.nanmax(scalars["loss"].values)
    assert cells["loss"][1:] == ["NaN", f"{low:.3g}", f"{high:.3g}"]
    assert cells["lr"][1:] == ["0.5"] * 3
    assert cells["memory"][1].endswith((" MB", " GB"))
    assert cells["throughput"][1].endswith(" samples/s")
    logged = next(numbers for name, numbers in cells.items() if name.startswith("<img"))
    assert logged[0].strip()
    assert logged[1:] == ["2048"] * 3
    assert list_cells(recording.history.loss._repr_html_())[1][2:] == cells["loss"][1:]
    assert "no steps" in check_inert(rg.History().scalars._repr_html_()).text
    assert "no steps" in check_inert(rg.History().loss._repr_html_()).text


def test_many_rows_are_cut_and_counted() -> None:
    page = NotebookPage()
    rows = [(f"s{number}",) for number in range(MOST_ROWS + 7)]
    page.console.print(make_table(page.console, {"site": "name"}, rows))
    found = check_inert(page.as_html())
    assert "and 7 more" in found.text
    assert f"s{MOST_ROWS}" not in found.text


def test_the_map_tells_zero_from_small_and_infinite_from_large() -> None:
    values = np.array([[0.0, 1e-30, 1e3, np.inf, np.nan]])
    colours, low, high = colour_map(values)
    assert (low, high) == (1e-30, 1e3)
    assert len({tuple(colour) for colour in colours[0].tolist()}) == 5
    assert colours[0, 4, 3] == 0
    assert check_inert(Matrix(["a"], np.arange(5), values)._repr_html_()).text.count("a")
    assert check_inert(Matrix([], np.arange(0), np.empty((0, 0)))._repr_html_()).text == ""
    assert "zero" in check_inert(Matrix(["a"], np.arange(2), np.zeros((1, 2)))._repr_html_()).text


def test_drawing_draws_no_number_of_the_script(run: rg.Run) -> None:
    states = random.getstate(), torch.get_rng_state()
    run._repr_html_()
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


# ---- plots ----


@pytest.fixture
def axes() -> Iterator[Any]:
    mpl.use("agg")
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close("all")
    del figure


def test_a_series_is_drawn_on_the_axes_that_are_given(run: rg.Run, axes: Any) -> None:
    site = run.history.sites[0]
    drawn = run.history[site].plot("abs_max", ax=axes, color="black")
    assert drawn is axes
    [line] = axes.lines
    np.testing.assert_array_equal(line.get_xdata(), run.history[site].steps)
    np.testing.assert_array_equal(line.get_ydata(), run.history[site].abs_max)
    assert line.get_color() == "black"
    axes.legend()
    axes.figure.canvas.draw()
    assert run.history[site].plot() is not axes


def test_a_matrix_is_drawn_with_zeros_and_infinities_apart(axes: Any) -> None:
    matrix = Matrix(["a", "$b$"], np.array([1, 2, 5]), np.array([[0.0, 2, 4], [np.inf, np.nan, 8]]))
    assert matrix.plot(ax=axes) is axes
    zero, infinite, rest = axes.collections
    assert (zero.get_array().count(), infinite.get_array().count(), rest.get_array().count()) == (1, 1, 3)
    np.testing.assert_array_equal(rest.get_array().compressed(), [2, 4, 8])
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "$b$"]


def test_steps_without_a_number_leave_gaps_in_a_curve() -> None:
    page = Curve(np.arange(5), np.array([1.0, np.nan, np.nan, np.nan, 2.0]))._repr_html_()
    assert list_cells(page)[1][1] == "▁   █"
    cell = page[page.rindex("<td", 0, page.index("▁")) : page.index("▁")]
    assert "white-space:pre" in cell  # or HTML would make one blank of them
    assert "monospace" in cell


def test_a_matrix_of_many_sites_is_no_higher_and_names_some(axes: Any) -> None:
    few, many = ([f"s{number}" for number in range(count)] for count in (60, 200))
    drawn = [Matrix(sites, np.arange(3), np.ones((len(sites), 3))).plot() for sites in (few, many)]
    assert drawn[0].figure.get_size_inches()[1] == drawn[1].figure.get_size_inches()[1]
    assert [label.get_text() for label in drawn[0].get_yticklabels()] == few
    assert [label.get_text() for label in drawn[1].get_yticklabels()] == many[::4]
    assert drawn[1].get_yticks().tolist() == list(range(0, 200, 4))


def test_a_library_that_is_missing_is_told_with_what_to_install(run: rg.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, ask in (
        ("matplotlib", run.history[run.history.sites[0]].plot),
        ("pandas", run.history.to_pandas),
        ("polars", run.history.to_polars),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, "retrograd.core.views.notebook.plots", raising=False)
        with pytest.raises(LibraryError, match="pip install"):
            ask()


# ---- frames ----


def test_rows_go_to_other_libraries(run: rg.Run) -> None:
    history = run.history
    table = history.to_arrow()
    assert table.num_rows == history.rows.count
    frame = history.to_pandas()
    assert frame["rms"].tolist() == table["rms"].to_pylist()
    polars = history.to_polars()
    assert isinstance(polars, pl.DataFrame)
    assert polars.height == table.num_rows
    relation = duckdb.from_arrow(history.to_batches()).aggregate("count(*), sum(rms)")
    assert relation.fetchall()[0] == pytest.approx((table.num_rows, np.nansum(frame["rms"])))
    assert rg.History().to_batches().read_all().num_rows == 0


def test_a_long_record_streams_the_same_rows(run: rg.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", 10)
    long = rg.open_run(run.path).history
    assert type(long.rows).__name__ == "LongRows"
    streamed, whole = long.to_batches().read_all(), run.history.to_arrow()
    assert streamed.schema == whole.schema
    key = [("step", "ascending"), ("order", "ascending")]
    assert streamed.sort_by(key)["rms"].to_pylist() == whole.sort_by(key)["rms"].to_pylist()


def test_text_of_a_trace_is_whole_where_rich_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rg.format_trace(invent_trace())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert rg.format_trace(invent_trace()) == expected
    assert expected.count("\n") > 3


def test_lines_of_cells_are_told_by_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=CachingCompiler())  # what a kernel compiles its cells with
    file = shell.compile.cache("x = 1\n", 7)
    assert show_line(f"{file}:1") == f"{file}:1", "no shell runs here"
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert show_line(f"{file}:1") == "In[7]:1"
    for line in ("/home/me/train.py:48", "train.py", "", "softmax: twice"):
        assert show_line(line) == line
