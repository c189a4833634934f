"""The first backward pass of a site: of a gradient penalty it is another one for parameters than for outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.passes import FirstPasses, choose_first
from retrograd.core.limits import LIMITS

MOMENT = ("site", "step", "micro", "phase", "rank")


def _make_rows(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Rows of some passes, each site with those that reached it, and values; in the order of a run."""
    random = np.random.default_rng(seed)
    rows = [
        (step, micro, backward, site, 0, 0)
        for step in range(6)
        for micro in range(2)
        for backward in (-1, 0, 1, 2)
        for site in range(5)
        if random.random() < 0.6
    ]
    names = ("step", "micro", "backward", "site", "phase", "rank")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _choose_slowly(rows: dict[str, np.ndarray[Any, Any]]) -> list[bool]:
    keys = list(zip(*(rows[name].tolist() for name in MOMENT), strict=True))
    passes = rows["backward"].tolist()
    least: dict[tuple[int, ...], int] = {}
    for key, number in zip(keys, passes, strict=True):
        if number >= 0:
            least[key] = min(number, least.get(key, number))
    return [number < 0 or number == least[key] for key, number in zip(keys, passes, strict=True)]


@pytest.mark.parametrize("is_by_site", [False, True])
@pytest.mark.parametrize("width", [1, 3, 7, 1000])
def test_passes_may_lie_in_several_pieces(width: int, is_by_site: bool) -> None:
    rows = _make_rows(width)
    if is_by_site:
        order = np.lexsort((rows["step"], rows["site"]))
        rows = {name: column[order] for name, column in rows.items()}
    expected = _choose_slowly(rows)
    assert choose_first([rows]).tolist() == expected
    chosen, passes = [], FirstPasses()
    for start in range(0, len(expected), width):
        chosen += passes.choose({name: column[start : start + width] for name, column in rows.items()}).tolist()
    assert chosen == expected


def _train_critic(path: Path | None) -> tuple[rg.Recording, dict[str, list[Tensor]], list[Tensor]]:
    """A critic with a penalty at every second step; what was added to its gradients, and those of its output."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    added: dict[str, list[Tensor]] = {"0:weight": [], "2:weight": []}
    slopes = []
    with rg.record(net, path) as recording:
        for step in range(4):
            x = torch.randn(4, 3, requires_grad=True)
            out = net(x)
            loss = out.square().mean()
            if step % 2:
                (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                loss = loss + (slope.norm(dim=1) - 1).square().mean()
            slopes.append(torch.ones(4, 1) if step % 2 else out.detach() / 2)
            optimizer.zero_grad()
            loss.backward()
            for name, layer in (("0:weight", net[0]), ("2:weight", net[2])):
                assert isinstance(layer.weight.grad, Tensor)
                added[name].append(layer.weight.grad.clone())
            optimizer.step()
    return recording, added, slopes


@pytest.mark.parametrize("is_long", [False, True])
def test_the_gradients_of_a_penalty_are_those_of_the_pass_that_reached_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    recording, added, slopes = _train_critic(tmp_path / "run" if is_long else None)
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    history = rg.open_run(tmp_path / "run").history if is_long else recording.history
    for name, gradients in added.items():
        series = history[f"{name}.grad"]
        norms = [gradient.double().norm().item() for gradient in gradients]
        assert series.steps.tolist() == [0, 1, 2, 3]
        np.testing.assert_allclose(series.l2, norms, rtol=1e-6)
        assert series.select(backward=1).steps.tolist() == [1, 3]
        assert series.select(backward=0).steps.tolist() == [0, 2]
        matrix = history.matrix("l2", [f"{name}.grad"])
        np.testing.assert_allclose(matrix.values[0], norms, rtol=1e-6)
    np.testing.assert_allclose(history["2:output.grad"].l2, [each.double().norm().item() for each in slopes], rtol=1e-6)
