"""Settings that a schedule changes, against what lay in the groups at each update."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import retrograd as rg
from retrograd.core.history.facts import SettingChanged
from retrograd.explaining.findings.explain import make_record

STEPS = 21


def make_decay(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A decay that grows by hand."""

    def step() -> None:
        optimizer.param_groups[0]["weight_decay"] += 0.01

    return step


def make_nothing(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lr_scheduler.StepLR(optimizer, 5).step


def make_cycle(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1).step


CASES: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], Any, str, Any]] = [
    (torch.optim.SGD, {"momentum": 0.9}, make_cycle, "momentum", lambda group: group["momentum"]),
    (torch.optim.Adam, {}, make_cycle, "betas.0", lambda group: group["betas"][0]),
    (torch.optim.AdamW, {"weight_decay": 0.1}, make_decay, "weight_decay", lambda group: group["weight_decay"]),
]


@pytest.mark.parametrize(("make", "options", "change", "setting", "read"), CASES)
def test_a_setting_that_changes_is_known_as_it_went(
    make: Any, options: dict[str, Any], change: Any, setting: str, read: Any
) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.01, **options)
    step, seen = change(optimizer), []
    with rg.record(model) as recording:
        for _ in range(STEPS):
            model(torch.randn(4, 3)).square().mean().backward()
            seen.append(read(optimizer.param_groups[0]))
            optimizer.step()
            optimizer.zero_grad()
            step()
    facts = make_record(recording).of(SettingChanged)
    assert {(each.name, each.group, each.setting) for each in facts} == {(make.__name__, 0, setting)}
    last = facts[-1]
    assert (last.first, last.low, last.high, last.last) == (seen[0], min(seen), max(seen), seen[-1])
    assert int(last.value) == sum(one != other for one, other in pairwise(seen))
    assert len(facts) < 8  # not one for each update
    [entry] = rg.describe(recording).of("optimizer")
    middle = [each for each in (min(seen), max(seen)) if each not in (seen[0], seen[-1])]
    course = " → ".join(f"{each:.3g}" for each in (seen[0], *middle, seen[-1]))
    assert f"{setting.partition('.')[0].replace('_', ' ')} " in entry.text
    assert course in entry.text


def test_a_rate_alone_is_no_other_setting() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = make_nothing(optimizer)
    with rg.record(model) as recording:
        for _ in range(8):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            step()
    assert not make_record(recording).of(SettingChanged)
    assert "momentum 0.9," in rg.describe(recording).of("optimizer")[0].text
