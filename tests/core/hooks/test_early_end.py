"""The forward ends where it should, and only where nobody misses the rest of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from retrograd.core.hooks.readings import EarlyExit, ForwardEnded, can_end_early
from retrograd.tools.features.extractor import extract


class Counting(nn.Module):
    """Counts how often each of its parts runs, without hooks."""

    def __init__(self, parts: int = 4) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(parts))
        self.ran: list[int] = []
        self.log: list[str] = []

    def run_part(self, number: int, x: Tensor) -> Tensor:
        self.ran.append(number)
        return self.parts[number](x)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.parts)):
            x = self.run_part(number, x)
        return x


X = torch.ones(2, 3)


def test_it_ends_right_after_the_last_site() -> None:
    model = Counting()
    extract(model, X, ["parts.2#1", "parts.0#1"])
    assert model.ran == [0, 1, 2]
    model.ran.clear()
    extract(model, X, ["parts.2#1:input.input"])  # a module whose argument is asked for does not run
    assert model.ran == [0, 1, 2]
    model.ran.clear()
    extract(model, X, ["parts.1"], early_end=False)
    extract(model, X, ["parts.1", "self"])
    extract(model, X, ["parts.1"])  # the code does not show that it is called once
    assert model.ran == [0, 1, 2, 3] * 3


def test_batch_norm_beyond_the_end_sees_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    extract(model, X, "0")
    assert [int(norm.num_batches_tracked) for norm in model] == [1, 0]


def test_random_numbers_beyond_the_end_are_not_drawn() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    state = torch.get_rng_state()
    extract(model, X, "0")
    assert torch.equal(torch.get_rng_state(), state)


class Careful(Counting):
    """Handles failures, as models of users do."""

    kind: type[BaseException] = Exception

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        self.log.append("enter")
        try:
            yield
        except Exception:
            self.log.append("failed")
            raise
        finally:
            self.log.append("exit")

    def forward(self, x: Tensor) -> Tensor:
        with self.guard(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
            try:
                x = self.run_part(0, x)
            except self.kind as error:
                self.log.append(type(error).__name__)
        return self.run_part(1, x)


def test_code_that_handles_failures_sees_none() -> None:
    model = Careful()
    assert extract(model, X, "parts.0#1")["parts.0#1"].dtype is torch.bfloat16
    assert model.log == ["enter", "exit"]
    assert model.ran == [0]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_code_that_catches_everything_goes_on_and_the_feature_is_there() -> None:
    model = Careful()
    model.kind = BaseException
    feature = extract(model, X, "parts.0#1")["parts.0#1"]
    assert model.ran == [0, 1]
    assert model.log == ["enter", ForwardEnded.__name__, "exit"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(feature, model.parts[0](X))


@pytest.mark.parametrize("where", ["", "parts.0", "parts.3"])
@pytest.mark.parametrize("always", [False, True])
def test_with_a_hook_of_the_users_the_forward_runs_to_its_end(where: str, always: bool) -> None:
    model = Counting()
    seen: list[Any] = []
    with remover(
        model.get_submodule(where).register_forward_hook(lambda *told: seen.append(told[2]), always_call=always)
    ):
        assert not can_end_early(model)
        extract(model, X, "parts.1")
    assert model.ran == [0, 1, 2, 3]
    assert len(seen) == 1
    assert isinstance(seen[0], Tensor)


def test_with_a_global_hook_the_forward_runs_to_its_end() -> None:
    model = Counting()
    with remover(register_module_forward_hook(lambda module, args, output: None)):
        extract(model, X, "parts.1")
    assert model.ran == [0, 1, 2, 3]


def test_a_hook_of_the_users_may_change_what_is_read() -> None:
    model = Counting()
    with remover(model.parts[1].register_forward_hook(lambda module, args, output: output * 0)):
        assert not extract(model, X, "parts.1")["parts.1"].any()


def test_with_offloaded_weights_the_forward_runs_to_its_end() -> None:
    model = Counting()
    assert can_end_early(model)
    model.parts[2]._hf_hook = object()
    assert not can_end_early(model)


def test_sharded_models_run_to_their_end() -> None:
    class FSDPModule:
        pass

    class FSDPLinear(FSDPModule, nn.Linear):
        pass

    assert not can_end_early(nn.Sequential(FSDPLinear(2, 2)))


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_checkpointed_part_ends_early_only_where_it_keeps_no_graph(differentiable: bool) -> None:
    class Checkpointed(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return self.run_part(3, checkpoint(super().forward, x, use_reentrant=False))

    model = Checkpointed()
    before = torch._C._autograd._top_saved_tensors_default_hooks(True)
    feature = extract(model, X, "parts.1#1", differentiable=differentiable)["parts.1#1"]
    assert model.ran == ([0, 1, 2, 3, 3] if differentiable else [0, 1])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is before
    if differentiable:
        (gradient,) = torch.autograd.grad(feature.sum(), model.parts[0].weight)
        (expected,) = torch.autograd.grad(model.parts[1](model.parts[0](X)).sum(), model.parts[0].weight)
        torch.testing.assert_close(gradient, expected)


def test_an_end_that_belongs_to_another_forward_passes_through() -> None:
    outer, model = EarlyExit(nn.Identity()), nn.Identity()
    with pytest.raises(ForwardEnded):
        EarlyExit(model).run(Raising(outer), (), {})


class Raising(nn.Module):
    def __init__(self, exit_: EarlyExit) -> None:
        super().__init__()
        self.exit_ = exit_

    def forward(self) -> None:
        self.exit_.take()


@contextlib.contextmanager
def remover(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
