"""Names that look like globs, as of columns, and the glob for one name between dots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.sites.pattern import Candidate, escape_glob, translate_glob
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import Site, parse_site

ODD = ["user[id]", "a*", "b?", "c%", "d[!x]"]
LIKE = ["useri", "ax", "bx", "cx", "dy"]
"""Names that those would match as globs."""


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cols = nn.ModuleDict({name: nn.Linear(4, 1) for name in [*ODD, *LIKE]})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([each(x) for each in self.cols.values()]).sum()


def step(model: nn.Module) -> None:
    model(torch.randn(2, 4)).backward()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rg.Run:
    folder = tmp_path_factory.mktemp("runs") / "x"
    model = Columns()
    with rg.record(model, folder, sites="*"):
        step(model)
    return rg.open_run(folder)


def test_each_recorded_site_selects_itself(run: rg.Run) -> None:
    history = run.history
    for site in history.sites:
        assert history.select(site) == [site]
        assert history.select([site]) == [site]
        assert len(history[site].steps) == 1
        assert history.select(["*", f"!{site}"]) == [each for each in history.sites if each != site]
    assert history._repr_html_()


@pytest.mark.parametrize("name", ODD)
def test_a_module_by_its_name(run: rg.Run, name: str) -> None:
    path = f"cols.{name}"
    wanted = [f"{path}:weight.grad", f"{path}:bias.grad", f"{path}:output", f"{path}:output.grad"]
    assert run.history.select(path) == wanted
    assert run.history.select(f"{path}:parameters.grad") == wanted[:2]
    assert run.history.select(f"{path}:output*") == wanted[2:]


@pytest.mark.parametrize("name", ODD)
def test_what_is_recorded_kept_and_changed_is_of_that_name_alone(name: str) -> None:
    model, site = Columns(), f"cols.{name}:output"
    with rg.record(model, sites=site, tensors=site) as recording:
        step(model)
    assert recording.history.sites == [site]
    assert len(recording.history[site].tensors) == 1
    model.zero_grad()
    with rg.rewrite(model, {f"{site}.grad": rg.rules.Zero()}):
        step(model)
    zero = [path for path, each in model.cols.items() if not each.weight.grad.any()]  # type: ignore[operator, union-attr]
    assert zero == [name]


@pytest.mark.parametrize("name", ODD)
def test_features_and_graphs_by_name(name: str) -> None:
    model, path = Columns(), f"cols.{name}"
    assert list(rg.extract(model, torch.randn(2, 4), [path])) == [path]
    with rg.record_origins(model) as origins:
        loss = model(torch.randn(2, 4))
    graph = rg.walk(loss, origins=origins)
    assert {node.module for node in graph.find(f"{path}:AddmmBackward0")} >= {path}


def test_the_command_takes_a_name(run: rg.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run.path), "--sites", "cols.user[id]:output"]) == 0
    assert "cols.user[id]:output" in capsys.readouterr().out


def wanted(pattern: str, sites: list[str]) -> list[str]:
    candidates = [Candidate(parse_site(site)) for site in sites]
    selection = Selection(pattern)
    selection.check(candidates)
    return [str(each.site) for each in candidates if selection.wants(each)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("%:output", ["a:output", "b:output"]),
        ("%:outputs", ["a:output", "b:output"]),
        ("%", ["a:output", "b:output"]),
        ("a.%:output", ["a.b:output"]),
        ("a.%.%:output", ["a.b.c:output"]),
        ("%.b:output", ["a.b:output"]),
        ("%.*:output", ["a.b:output", "a.b.c:output"]),
        ("[%]:output", None),
    ],
)
def test_one_name_between_dots(pattern: str, expected: list[str] | None) -> None:
    sites = ["self:output", "a:output", "a.b:output", "a.b.c:output", "b:output", "watch/x"]
    if expected is None:
        with pytest.raises(rg.RetrogradError, match="matches no site"):
            wanted(pattern, sites)
    else:
        assert wanted(pattern, sites) == expected


def test_direct_children_are_those_of_torch() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    with rg.record(model, sites="%:output") as recording:
        model(torch.randn(3, 2)).sum().backward()
    assert recording.history.sites == [f"{name}:output" for name, _ in model.named_children()]


@pytest.mark.parametrize("text", [*ODD, "a[", "]", "[]a]", "plain"])
def test_an_escaped_text_matches_itself_alone(text: str) -> None:
    matches = translate_glob(escape_glob(text))
    assert matches(text)
    assert not any(matches(each) for each in [*ODD, *LIKE] if each != text)


def test_a_site_is_settled_before_others_match() -> None:
    sites = [Site("a[0]", ("output",)), Site("a0", ("output",)), Site("a[0]", ("output",), 2)]
    selection = Selection("a[0]:output")
    selection.settle([Candidate(each) for each in sites])
    assert [selection.wants(Candidate(each)) for each in sites] == [True, False, True]


def test_the_command_line_takes_them(tmp_path: Path) -> None:
    model = Columns()
    with rg.record(model, tmp_path / "run", sites="%.%:output", tensors=rg.Keep("cols.a*:output", last=1)):
        step(model)
    history = rg.open_run(tmp_path / "run").history
    assert history.sites == [f"cols.{name}:output" for name in [*ODD, *LIKE]]
    assert [site for site in history.sites if len(history[site].tensors)] == ["cols.a*:output"]
