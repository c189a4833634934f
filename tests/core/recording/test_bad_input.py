"""What cannot be recorded is refused before training starts, with an error that says how to fix it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import (
    AttachError,
    NoSuchSiteError,
    PatternError,
    RecordingError,
    RetrogradError,
    ScheduleError,
    StatisticError,
    TensorPolicyError,
)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def text(tensor: torch.Tensor) -> Any:
    return "much"


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def nothing(tensor: torch.Tensor) -> Any:
    return None


def failing(tensor: torch.Tensor) -> Any:
    return 1 / 0


CHOICES: list[tuple[dict[str, Any], type[RetrogradError], str]] = [
    ({"sites": "0:ouput"}, NoSuchSiteError, "0:output"),
    ({"sites": ["*:output", "5"]}, NoSuchSiteError, "rg.plan_recording"),
    ({"sites": nn.Conv2d}, NoSuchSiteError, "Linear"),
    ({"sites": 5}, PatternError, "glob"),
    ({"sites": []}, PatternError, "leave `sites` out"),
    ({"sites": "re:("}, PatternError, "regular expression"),
    ({"tensors": "7:output"}, NoSuchSiteError, "0:output"),
    ({"tensors": [3]}, PatternError, "glob"),
    ({"tensor_budget": "much"}, TensorPolicyError, "500MB"),
    ({"schedule": 0}, ScheduleError, "rg.every"),
    ({"schedule": "often"}, ScheduleError, "rg.every"),
    ({"schedule": "log"}, ScheduleError, "rg.log_schedule()"),
    ({"schedule": lambda: True}, ScheduleError, "rg.every"),
    ({"statistics": [text]}, StatisticError, "0-d"),
    ({"statistics": [itself]}, StatisticError, "0-d"),
    ({"statistics": [nothing]}, StatisticError, "0-d"),
    ({"statistics": [failing]}, StatisticError, "division by zero"),
    ({"statistics": [lambda tensor: tensor.sum()]}, StatisticError, "def"),
    ({"statistics": ["rms"]}, StatisticError, "function"),
    ({"resume": True}, RecordingError, "run folder"),
]


@pytest.mark.parametrize(("choice", "error", "hint"), CHOICES)
def test_choices_that_cannot_be_carried_out(choice: dict[str, Any], error: type[RetrogradError], hint: str) -> None:
    net = make_net()
    with pytest.raises(error) as caught:
        rg.record(net, **choice)
    assert hint in str(caught.value)
    assert caught.value.slug in str(caught.value)
    assert caught.value.repair
    assert_untouched(net)


def assert_untouched(net: nn.Module) -> None:
    for module in net.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(parameter._backward_hooks for parameter in net.parameters())


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (torch.ones(3), "torch.nn.Module"),
        (lambda x: x, "torch.nn.Module"),
        ({"G": make_net(), "D": 3}, "dict of models"),
        ({}, "no model"),
        ({"a:b": make_net()}, "letters"),
        (nn.DataParallel(make_net()), "DistributedDataParallel"),
        (nn.Sequential(make_net(), nn.DataParallel(make_net())), "DistributedDataParallel"),
    ],
)
def test_what_is_no_model_that_can_be_recorded(model: Any, hint: str) -> None:
    with pytest.raises(AttachError) as caught:
        rg.record(model)
    assert hint in str(caught.value)


def test_a_refused_recording_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NoSuchSiteError):
        rg.record(make_net(), tmp_path / "run", sites="9:output")
    with pytest.raises(AttachError):
        rg.record(nn.DataParallel(make_net()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_after_a_refusal_the_same_model_can_be_recorded() -> None:
    net = make_net()
    with pytest.raises(ScheduleError):
        rg.record(net, schedule=-1)
    with rg.record(net) as recording:
        net(torch.ones(1, 3)).sum().backward()
    assert recording.history["0:output.grad"].count.tolist() == [4.0]
    assert_untouched(net)
