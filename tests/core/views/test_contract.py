"""All views keep one contract: data in, text or HTML out; what prints and what writes is thin."""

from __future__ import annotations

import importlib
import inspect
import io
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg

ROOMS = [
    importlib.import_module(f"retrograd.{part}.views")
    for part in ("core", "explaining", "following", "memory", "tools")
]
MODULES = [
    importlib.import_module(each.name)
    for room in ROOMS
    for each in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
]


def is_printer(module: Any, name: str) -> bool:
    """Whether a function of this module prints to a file."""
    value = vars(module)[name]
    is_own = name.startswith("print_") and inspect.isfunction(value) and value.__module__ == module.__name__
    return is_own and "file" in inspect.signature(value).parameters


PRINTERS = [(module, name) for module in MODULES for name in vars(module) if is_printer(module, name)]
BUILDERS = [module for module in MODULES if "build_page" in vars(module)]


@pytest.mark.parametrize(("module", "name"), PRINTERS, ids=lambda each: str(each).rpartition(".")[2])
def test_what_prints_has_a_twin_that_gives_the_text(module: Any, name: str) -> None:
    show, give = getattr(module, name), getattr(module, name.replace("print_", "format_"))
    parameters = inspect.signature(show).parameters
    assert parameters["file"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["file"].default is None
    assert give.__wrapped__ is show  # made by giving_text, so that it takes the same
    assert inspect.get_annotations(show, eval_str=False)["return"] == "None"


@pytest.mark.parametrize("module", BUILDERS, ids=lambda each: each.__name__.rpartition(".")[2])
def test_what_builds_a_page_gives_text_and_is_written_by_one_function(module: Any) -> None:
    assert inspect.get_annotations(module.build_page)["return"] == "str"
    assert "write_page" in vars(module)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


def record(output: Path | None) -> Any:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, output) as recording:
        for _ in range(3):
            net(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "x"
    record(path)
    return path


GIVEN: dict[str, Callable[[Path], Any]] = {
    "a text": str,
    "a path": lambda folder: folder,
    "a run": rg.open_run,
    "its history": lambda folder: rg.open_run(folder).history,
    "a recording": lambda folder: record(None),
    "a recording on disk": lambda folder: record(folder.parent / "again"),
    "a history in memory": lambda folder: record(None).history,
}


@pytest.mark.parametrize("how", GIVEN)
def test_views_take_whatever_holds_a_record(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = GIVEN[how](folder)
    report = rg.write_report(given)
    assert report.name == "report.html"
    assert "fc:output.grad" in report.read_text()
    assert rg.write_report(given, tmp_path / "other.html") == tmp_path / "other.html"
    for show, give in ((rg.print_table, rg.format_table), (rg.print_heatmap, rg.format_heatmap)):
        file = io.StringIO()
        show(given, file=file)
        assert give(given) == file.getvalue()
        assert "fc:" in file.getvalue()
    assert not [each for each in rg.explain(given) if each.severity == "critical"]
    assert rg.compare(given, folder).verdict != "different"
    if how in ("its history", "a recording", "a history in memory"):
        with pytest.raises(TypeError, match="record to a folder"):
            rg.export(given, "csv", tmp_path / "csv")
    else:
        assert rg.export(given, "csv", tmp_path / "csv").exists()


def test_what_holds_no_record_is_refused_with_what_to_give(tmp_path: Path) -> None:
    for call in (rg.write_report, rg.print_table, rg.print_heatmap, rg.format_table):
        with pytest.raises(TypeError, match="give the folder of a run, a recording"):
            call(Net())  # type: ignore[operator]
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "nowhere")  # type: ignore[operator]


def test_a_history_is_read_like_a_mapping(folder: Path) -> None:
    history = rg.open_run(folder).history
    assert list(history) == history.sites
    assert len(history) == len(list(history))
    assert "fc:output" in history
    assert "nosuch" not in history
    assert {site: len(history[site]) for site in history} == dict.fromkeys(history.sites, 3)
    with pytest.raises(KeyError, match="No site 'nosuch' was recorded"):
        history["nosuch"]
    with pytest.raises(KeyError, match=r"No site 'fc:ouput' was recorded.*\n.*'fc:output'"):
        history["fc:ouput"]
    with pytest.raises(ValueError, match="no statistic 'rmss'"):
        history["fc:output"].statistic("rmss")
    with pytest.raises(IndexError):
        history["fc:output"].tensors[-1]
