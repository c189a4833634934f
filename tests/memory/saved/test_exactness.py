"""Policies that lose nothing change no bit of training, on every net of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.lossless import Lossless
from retrograd.memory.policies.policy import AsIs, Packed, Policy, Saved
from retrograd.memory.policies.precision import Bfloat16
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.keeping import SavedHandle, keep_saved
from tests.scenarios import ZOO, build, train

Result = list[tuple[str, bytes]]


class Elsewhere(Policy):
    """Everything waits as a copy."""

    min_bytes = 0

    def pack(self, saved: Saved) -> Packed | None:
        return Copy(saved.values.clone())


class Copy(Packed):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values.nbytes)
        self.values = values

    def restore(self) -> torch.Tensor:
        return self.values.clone()


POLICIES: dict[str, Callable[[Path], Policy]] = {
    "keep": lambda folder: AsIs(),
    "copies": lambda folder: Elsewhere(),
    "disk": lambda folder: Disk(folder, min_bytes=0),
    "lossless": lambda folder: Lossless(min_bytes=0),
    "recompute": lambda folder: Recompute(),
}


def run(name: str, policy: Policy | None, *, everywhere: bool = False) -> tuple[Result, list[SavedHandle]]:
    if name == "gpt2":
        pytest.importorskip("transformers")
    trial = build(name)
    with ExitStack() as stack:
        models: list[nn.Module | None] = [None] if everywhere else list(trial.modules.values())
        handles = [stack.enter_context(keep_saved(model, policy)) for model in models if policy is not None]
        return train(trial), handles


_bare: dict[str, Result] = {}


def bare(name: str) -> Result:
    """What comes out without us."""
    if name not in _bare:
        _bare[name], _ = run(name, None)
    return _bare[name]


def differing(seen: Result, expected: Result) -> list[str]:
    assert [key for key, _ in seen] == [key for key, _ in expected]
    return [key for (key, value), (_, other) in zip(seen, expected, strict=True) if value != other]


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("name", ZOO)
def test_every_bit_is_the_same(name: str, kind: str, tmp_path: Path) -> None:
    seen, handles = run(name, POLICIES[kind](tmp_path))
    assert not differing(seen, bare(name))
    if kind in ("copies", "disk"):
        assert sum(account.stretches for handle in handles for account in handle.accounts.values()) > 0


@pytest.mark.parametrize("name", ZOO)
def test_every_bit_is_the_same_in_the_whole_process(name: str) -> None:
    seen, (handle,) = run(name, Elsewhere(), everywhere=True)
    assert not differing(seen, bare(name))
    assert all(account.stretches > 0 for account in handle.accounts.values())


@pytest.mark.parametrize("name", ["residual_convolutions", "transformer_encoder"])
def test_a_policy_that_rounds_is_noticed(name: str) -> None:
    """Else nothing is proved above."""
    assert differing(run(name, Bfloat16(min_bytes=0))[0], bare(name))


@pytest.mark.parametrize("kind", ["keep", "copies", "disk"])
def test_channels_last_and_a_deep_net(kind: str, tmp_path: Path) -> None:
    def gradients(policy: Policy | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = [part for _ in range(6) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))]
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        x = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
        with ExitStack() as stack:
            if policy is not None:
                stack.enter_context(keep_saved(model, policy))
            model(x).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    found, expected = gradients(POLICIES[kind](tmp_path)), gradients(None)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))
