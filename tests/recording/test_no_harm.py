"""Recording everything changes no bit of training."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import retrograd as rg
from tests.recording.nets import ZOO, Trial, build, train

STEPS = 3


def median(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().float().mean()


MODES: dict[str, dict[str, Any]] = {
    "statistics": {},
    "statistics of everything": {"sites": ["*"]},
    "references in a ring": {"statistics": False, "tensors": rg.Keep("*", last=2)},
    "everything": {"sites": ["*"], "statistics": [median], "tensors": [rg.Keep("*:output*", last=2), rg.Keep("*")]},
    "every other step": {"sites": ["*"], "schedule": 2},
}


def recording(run: Trial, **options: Any) -> AbstractContextManager[Any]:
    return rg.record(run.models, **options)


def run(name: str, options: dict[str, Any] | None) -> list[tuple[str, bytes]]:
    if name == "gpt2":
        pytest.importorskip("transformers")
    trial = build(name)
    with nullcontext() if options is None else recording(trial, **options):
        return train(trial, STEPS)


_bare: dict[str, list[tuple[str, bytes]]] = {}


def bare(name: str) -> list[tuple[str, bytes]]:
    if name not in _bare:
        _bare[name] = run(name, None)
    return _bare[name]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_every_bit_is_the_same(name: str, mode: str) -> None:
    expected = bare(name)
    seen = run(name, MODES[mode])
    assert [key for key, _ in seen] == [key for key, _ in expected]
    assert [key for (key, value), (_, other) in zip(seen, expected, strict=True) if value != other] == []
