"""The settings of a run are what was typed, and what the optimizer was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.runs.settings import read_settings

COMMANDS: list[tuple[Any, dict[str, Any]]] = [
    (["/usr/bin/python3", "-u", "a/train.py"], {"script": "train.py"}),
    (["python", "-X", "dev", "-m", "pkg.train", "-b", "-1"], {"script": "-m pkg.train", "argv": "-b -1", "-b": -1}),
    (["python", "t.py", "--lr", "1e-3", "--amp", "--x=y"], {"--lr": 0.001, "--amp": True, "--x": "y"}),
    (["python", "t.py", "model.depth=3", "data"], {"model.depth": 3, "argv": "model.depth=3 data"}),
    (["python", "-c", "print()"], {"script": "-c"}),
    (["python"], {}),
    ("python t.py --n 3", {"script": "t.py", "--n": 3}),
    ({"a": 1}, {}),
    (None, {}),
]


@pytest.mark.parametrize(("command", "expected"), COMMANDS, ids=lambda each: str(each)[:30])
def test_a_command_is_taken_apart(command: object, expected: dict[str, Any]) -> None:
    found = read_settings({"command": command})
    assert expected.items() <= found.items()
    assert expected or not found


@pytest.mark.parametrize("hostile", ["<b>", 3, [None, 3, {"groups": 3}], [{"groups": ["x", {"lr": [{}]}]}], {"a": []}])
def test_a_manifest_of_somebody_else_is_no_trouble(hostile: object) -> None:
    manifest = dict.fromkeys(("optimizers", "model", "git", "versions", "batch"), hostile)
    assert all(isinstance(value, bool | int | float | str) for value in read_settings(manifest).values())


def test_a_run_tells_its_optimizer_and_batch(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.1}], lr=0.5)
    with rg.record(net, tmp_path / "run"):
        net(torch.ones(7, 3)).sum().backward()
        optimizer.step()
    found = read_settings(rg.open_run(tmp_path / "run").history.manifest)
    expected = {
        "optimizer": "AdamW", "lr": "0.5, 0.1", "betas": "(0.9, 0.999)", "weight_decay": 0.01, "batch": 7,
        "parameters": 11, "seed": torch.initial_seed(),
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert "fused" not in found


def test_each_of_several_optimizers_has_its_own(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=rate) for each, rate in zip(net, (0.1, 0.2), strict=True)]
    with rg.record(net) as recording:
        net(torch.ones(7, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    found = read_settings(recording.history.manifest)
    assert (found["optimizer"], found["SGD.lr"], found["SGD_2.lr"]) == ("SGD, SGD", 0.1, 0.2)


def test_a_schedule_leaves_what_somebody_chose() -> None:
    def read(group: dict[str, Any]) -> dict[str, Any]:
        return read_settings({"optimizers": [{"name": "SGD", "type": "SGD", "groups": [group]}]})

    model = torch.nn.Linear(2, 2)
    for make, expected in (
        (lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 4.0, total_steps=9), {"max_lr": 4.0}),
        (lambda each: torch.optim.lr_scheduler.LinearLR(each, 0.1), {"lr": 0.5}),
        (lambda each: None, {"lr": 0.5}),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        make(optimizer)
        group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
        found = read(group)
        assert {name: found[name] for name in found if name.endswith(("lr", "_momentum"))} == expected
        assert found["momentum"] == ("0.85 … 0.95" if "max_lr" in expected else 0.9)


def test_of_a_cycled_beta_the_others_are_what_somebody_chose() -> None:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), betas=(0.9, 0.99))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    found = read_settings({"optimizers": [{"name": "Adam", "type": "Adam", "groups": [group]}]})
    assert found["betas"] == "(0.85 … 0.95, 0.99)"
