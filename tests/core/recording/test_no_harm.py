"""Recording everything changes no bit of training."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import retrograd as rg
from retrograd.core.statistics import slab
from tests.scenarios import ZOO, build, train

STEPS = 3


def mean_size(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().float().mean()


MODES: dict[str, dict[str, Any]] = {
    "statistics": {},
    "statistics of everything": {"sites": ["*"]},
    "references in a ring": {"statistics": False, "tensors": rg.Keep("*", last=2)},
    "everything": {"sites": ["*"], "statistics": [mean_size], "tensors": [rg.Keep("*:output*", last=2), rg.Keep("*")]},
    "every other step": {"sites": ["*"], "schedule": 2},
}


Result = list[tuple[str, bytes]]


def run(name: str, options: dict[str, Any] | None) -> Result:
    if name == "gpt2":
        pytest.importorskip("transformers")
    trial = build(name)
    with nullcontext() if options is None else rg.record(trial.models, **options):
        return train(trial, STEPS)


_bare: dict[str, Result] = {}


def bare(name: str) -> Result:
    """What comes out without us."""
    if name not in _bare:
        _bare[name] = run(name, None)
    return _bare[name]


def differing(seen: Result, expected: Result) -> list[str]:
    """Names of what is not the same."""
    assert [key for key, _ in seen] == [key for key, _ in expected]
    return [key for (key, value), (_, other) in zip(seen, expected, strict=True) if value != other]


def test_a_run_comes_out_the_same_twice() -> None:
    """Else nothing is proved by what follows; and another seed comes out differently."""
    assert not differing(run("dropout", None), bare("dropout"))
    torch.manual_seed(21)
    assert differing(train(ZOO["dropout"](), STEPS), bare("dropout"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ZOO)
def test_every_bit_is_the_same(name: str, mode: str) -> None:
    assert not differing(run(name, MODES[mode]), bare(name))


@pytest.mark.parametrize("name", ZOO)
def test_without_the_compiled_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are then computed by torch itself, in the middle of the forward and of the backward."""
    monkeypatch.setattr(slab, "NativeSlab", None)
    assert not differing(run(name, MODES["everything"]), bare(name))


@pytest.mark.parametrize("name", ["dropout", "gan", "accumulation_and_clipping"])
def test_into_a_run_folder(name: str, tmp_path: Path) -> None:
    assert not differing(run(name, {"path": tmp_path / "run", **MODES["everything"]}), bare(name))
