"""A module is run again: bitwise the same gradients, random numbers and buffers, and less in memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from retrograd.core.errors import OverwrittenError
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved.keeping import Policies, keep_saved
from tests.memory.saved.test_ranges import Noting


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: Tensor, *, gain: Tensor | None = None) -> Tensor:
        self.calls += 1
        out = self.layers(x)
        return x + (out if gain is None else out * gain)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, gain=self.gain)
        return x


def train(policy: Policies | None, *, is_mixed: bool = False, twice: bool = False) -> tuple[list[Tensor], Model]:
    torch.manual_seed(4)
    model = Model()
    handle = None if policy is None else keep_saved(model, policy)
    results = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = model(torch.randn(6, 8)).float().square().mean()
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results += [buffer.clone() for buffer in model.buffers()]
        results.append(torch.get_rng_state())
    if handle is not None:
        handle.remove()
    return results, model


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("patterns", ["blocks.?", "blocks.*", "blocks.*.layers", "*"])
def test_gradients_buffers_and_random_states_are_the_same(patterns: str, twice: bool, is_mixed: bool) -> None:
    found, model = train({patterns: Recompute()}, is_mixed=is_mixed, twice=twice)
    expected, _ = train(None, is_mixed=is_mixed, twice=twice)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if patterns in ("blocks.?", "*"):
        assert all(block.calls == (6 if twice else 4) for block in model.blocks)


def test_beside_other_policies(tmp_path: object) -> None:
    rest = Noting()
    found, _ = train({"blocks.1": Recompute(), "blocks.2": Disk(str(tmp_path), min_bytes=0), "*": rest})
    expected, _ = train(None)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    inputs_of_what_runs_again = "self"
    assert {path.split(".layers")[0] for *_, path, _ in rest.seen} == {"blocks.0", inputs_of_what_runs_again}


def test_what_a_module_saves_is_not_held_between_forward_and_backward() -> None:
    outputs: list[weakref.ref[Tensor]] = []
    model = Model()
    for block in model.blocks:
        block.layers[3].register_forward_hook(
            lambda module, args, out: outputs.append(weakref.ref(out.untyped_storage()))
        )
    loss = model(torch.randn(6, 8)).sum()
    assert all(output() is not None for output in outputs)  # plain autograd holds them
    del loss
    outputs.clear()
    with keep_saved(model, {"blocks.?": Recompute()}):
        gc.disable()
        try:
            loss = model(torch.randn(6, 8)).sum()
            assert len(outputs) == 3
            assert not any(output() is not None for output in outputs)
        finally:
            gc.enable()
        loss.backward()


def test_an_error_in_the_forward_leaves_no_hooks() -> None:
    model = Model()
    with keep_saved(model, {"blocks.?": Recompute()}):
        with pytest.raises(RuntimeError):
            model(torch.randn(6, 9))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        model(torch.randn(6, 8)).sum().backward()


def test_a_write_to_what_was_saved_is_refused_as_without_a_policy() -> None:
    """The second run would see the write, and the gradient would be that of other values."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            output: Tensor = self.second(hidden)
            hidden.add_(1.0)
            return output.sin()

    model = Writing()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(2, 3)).sum().backward()
    with keep_saved(model, Recompute(), watch_writes=True), pytest.raises(OverwrittenError, match=r"by add_ at .*py:"):
        model(torch.ones(2, 3)).sum().backward()
    with keep_saved(model, Recompute()), pytest.raises(OverwrittenError, match=r"shape \[2, 3\].*self \(Writing\)"):
        model(torch.ones(2, 3)).sum().backward()


def test_parameters_that_change_before_the_backward_are_refused() -> None:
    """Autograd does not save a bias, so that it trains without a policy; the second run would use the new one."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with keep_saved(model, Recompute()):
        loss = model(torch.ones(2, 3)).sum()
        with torch.no_grad():
            model[0].bias.add_(1.0)
        with pytest.raises(OverwrittenError, match=r"parameter '0\.bias'"):
            loss.backward()


def test_parameters_that_the_forward_writes_to() -> None:
    """An embedding with ``max_norm`` does, and a graph that is retained is run twice."""
    tokens = torch.tensor([[0, 1], [2, 3]])

    def train(policy: Recompute | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 8, max_norm=1.0), nn.Linear(8, 1), nn.Tanh())
        with nullcontext() if policy is None else keep_saved(model, policy):
            loss = model(tokens).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    found, expected = train(Recompute()), train(None)
    assert len(found) == len(expected) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
