"""A check leaves no trace: not in the model, nor in random states, nor in a recording."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.hooks.discovery import ModelDiscovery
from retrograd.core.limits import LIMITS
from retrograd.tools.adjoint.check import check_adjoint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fc = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.frozen(self.head(self.act(self.drop(self.norm(self.fc(x))))))


def trained() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, batch = Net(), torch.randn(7, 6)
    model.fc.register_forward_hook(lambda module, args, output: None)
    model(batch).square().mean().backward()
    return model, batch


def traces(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tensor.detach().clone()
        yield f"{name}.grad", None if tensor.grad is None else tensor.grad.clone()
        yield f"{name} itself", (id(tensor), tensor._version, tensor.requires_grad, tensor.dtype)
    for name, module in model.named_modules():
        yield f"{name}.training", module.training
        for table in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            yield f"{name}.{table}", list(getattr(module, table).items())
        yield f"{name}.own", {key: value for key, value in vars(module).items() if isinstance(value, int)}


def same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else left == right


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_bitwise_the_same(training: bool) -> None:
    model, batch = trained()
    model.train(training)
    before, kept = dict(traces(model)), batch.clone()
    assert check_adjoint(model, batch)
    after = dict(traces(model))
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []
    assert torch.equal(batch, kept)
    assert batch._version == 0


def test_a_scripted_model_is_the_same_too() -> None:
    """Torch copies its parameters as a part of the graph: what arrives at the copy's would flow on to the model's."""
    model = torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.Tanh()))
    check = check_adjoint(model, torch.randn(3, 6))
    assert check
    assert {str(row.site) for row in check} >= {"0:weight", "0:bias"}
    assert all(parameter.grad is None and parameter.is_leaf for parameter in model.parameters())


def test_random_states_are_the_same() -> None:
    model, batch = trained()
    torch.manual_seed(3)
    np.random.seed(4)  # noqa: NPY002
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    check_adjoint(model, batch)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_training_goes_on_as_if_nothing_had_been() -> None:
    def train(checks: bool) -> list[Tensor]:
        model, batch = trained()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            if checks:
                check_adjoint(model, batch)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return [tensor.clone() for tensor in model.state_dict().values()]

    assert all(torch.equal(left, right) for left, right in zip(train(False), train(True), strict=True))


def test_a_failure_leaves_nothing_either() -> None:
    model, batch = trained()
    before, state = dict(traces(model)), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check_adjoint(model, batch[:, :4])
    assert all(same(value, dict(traces(model))[name]) for name, value in before.items())
    assert torch.equal(state, torch.get_rng_state())


def test_the_same_seed_gives_the_same_numbers() -> None:
    model, batch = trained()
    first, second = check_adjoint(model, batch), check_adjoint(model, batch)
    assert [(row.site, row.forward, row.backward) for row in first] == [
        (row.site, row.forward, row.backward) for row in second
    ]
    other = check_adjoint(model, batch, seed=1)
    assert {row.backward for row in first}.isdisjoint(row.backward for row in other)


def test_the_numbers_of_a_site_do_not_depend_on_what_else_is_selected() -> None:
    model, batch = trained()
    everything = {row.site: row.backward for row in check_adjoint(model, batch)}
    (alone,) = check_adjoint(model, batch, sites="head:weight")
    assert alone.backward == everything[alone.site]


def test_inside_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "facts_at_once", 1)  # else how many facts are written at once depends on the time
    monkeypatch.setattr(LIMITS, "facts_at_once", 1)

    def record(checks: bool) -> dict[str, Any]:
        model, batch = trained()
        with rg.record(model, None) as recording:
            for _ in range(2):
                if checks:
                    assert check_adjoint(model, batch)
                model(batch).square().mean().backward()
                model.zero_grad()
        history = recording.history
        assert history.sites
        events = history.event_table.select(["step", "micro", "backward", "phase", "kind", "value"]).to_pylist()
        assert sum(each["kind"] == "loss" for each in events) == 2
        rows = {
            each: [list(getattr(history[each], name)) for name in ("steps", "rms", "count")] for each in history.sites
        }
        return {"events": list(map(repr, events)), **rows}  # as text, for NaN is not itself

    assert record(True) == record(False)


def test_inside_a_trace() -> None:
    model, batch = trained()
    with rg.trace() as trace:
        assert check_adjoint(model, batch)
        assert len(trace.events) == 0
        model(batch).sum().backward()
    assert len(trace.events) > 0


def test_those_who_look_for_models_see_none() -> None:
    """Under ``retrograd run`` the copies must not be taken for models of the script."""

    class Listener:
        def __init__(self) -> None:
            self.called: list[nn.Module] = []

        def compiled_function_called(self) -> None:
            pass

        def module_called(self, module: nn.Module) -> None:
            self.called.append(module)

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    model, batch = trained()
    listener = Listener()
    lookout = ModelDiscovery(listener)
    lookout.arm()
    try:
        assert check_adjoint(model, batch)
        assert listener.called == []
        model(batch)
        assert listener.called[0] is model
    finally:
        lookout.close()


def test_under_no_grad_and_inference_mode() -> None:
    model, batch = trained()
    with torch.no_grad():
        assert check_adjoint(model, batch)
    with torch.inference_mode():
        assert check_adjoint(model, batch)


def test_the_copy_is_gone_afterwards() -> None:
    import gc
    import weakref

    model, batch = trained()
    copies: list[weakref.ref[nn.Module]] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            copies.append(weakref.ref(self))
            return x * 1

    net = nn.Sequential(model, Watched())
    gc.collect()
    gc.disable()
    try:
        check = check_adjoint(net, batch)
        assert copies
        alive = [ref() for ref in copies if ref() is not None]
    finally:
        gc.enable()
    assert check
    assert alive == []


def test_a_model_that_was_copied_before() -> None:
    model, batch = trained()
    assert check_adjoint(copy.deepcopy(model), batch)
