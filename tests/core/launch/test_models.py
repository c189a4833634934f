from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from retrograd.core.hooks.live_objects import list_instances
from retrograd.core.launch import models
from retrograd.core.launch.models import PATIENCE, Search
from retrograd.core.limits import LIMITS


class Found:
    """A search, with what it has found."""

    def __init__(self) -> None:
        self.calls: list[list[nn.Module]] = []
        self.called: list[nn.Module | None] = []
        self.errors: list[Exception] = []
        self.left_out: list[tuple[object, str]] = []
        self.search = Search(self.note, lambda: None, self.errors.append, self.leave_out)

    def leave_out(self, about: object, error: Exception) -> None:
        self.left_out.append((about, str(error)))

    def note(self, models: list[nn.Module], called: nn.Module | None) -> None:
        self.calls.append(models)
        self.called.append(called)

    @property
    def models(self) -> list[nn.Module]:
        return [model for call in self.calls for model in call]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[Found]:
    """A search that does not see what other tests hold on to."""
    gc.collect()
    strangers = list_instances(nn.Module, torch.optim.Optimizer)
    numbers = {id(thing) for thing in strangers}

    def list_new(*kinds: type[object]) -> list[object]:
        return [thing for thing in list_instances(*kinds) if id(thing) not in numbers]

    monkeypatch.setattr(models, "list_instances", list_new)
    found = Found()
    yield found
    found.search.close()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.act(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.act(x)).sum()


X = torch.ones(1, 2)

KEPT = Model()
"""A model that others hold on to is not a concern of these tests."""


def hooks() -> int:
    return len(torch.nn.modules.module._global_forward_pre_hooks)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(X).sum().backward()
        optimizer.step()


def test_a_model_is_found_before_its_first_call(found: Found) -> None:
    model = Model()
    order: list[str] = []
    found.search._found = lambda models, called: order.append("found")
    model.layer.register_forward_pre_hook(lambda *_: order.append("layer runs"))
    model(X)
    assert order == ["found", "layer runs"]


def test_a_model_whose_forward_is_never_called(found: Found) -> None:
    model = Model()
    model.loss(X)
    assert found.models == [model]
    assert found.called == [model.act]


def test_a_loss_is_left_alone(found: Found) -> None:
    nn.MSELoss()(X, X)
    assert not found.models


def test_forwards_without_grad_are_not_looked_at(found: Found) -> None:
    with torch.no_grad():
        Model()(X)
    assert not found.models


def test_with_a_model_come_those_of_the_optimizers(found: Found) -> None:
    actor, critic, other = Model(), Model(), Model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (actor, critic)]
    actor(X)
    assert found.models[0] is actor
    assert set(found.models) == {actor, critic}
    other(X)
    assert found.models[-1] is other
    assert optimizers


def test_a_copy_is_a_model_of_its_own(found: Found) -> None:
    model = Model()
    model(X)
    twin = copy.deepcopy(model)
    twin.loss(X)
    assert found.models[-1] is twin


def test_calls_are_looked_at_only_until_all_is_known(found: Found) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert hooks() == 1
    train(model, optimizer, PATIENCE + 1)
    assert hooks() == 0


def test_building_a_model_makes_it_look_again(found: Found) -> None:
    first = Model()
    train(first, torch.optim.SGD(first.parameters(), lr=0.1), PATIENCE + 1)
    second = Model()
    assert hooks() == 1
    second(X)
    assert found.models[-1] is second


def test_an_optimizer_with_unknown_parameters_makes_it_look_again(found: Found) -> None:
    first, second = Model(), Model()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    train(first, optimizer, PATIENCE + 1)
    assert found.models == [first]
    late = torch.optim.SGD(second.parameters(), lr=0.1)
    train(second, late, 2)
    assert found.models[-1] is second


def test_parameters_that_train_without_a_call_are_found_by_their_optimizer(found: Found) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.linear(X, model.layer.weight, model.layer.bias).sum().backward()
    optimizer.step()
    assert found.models == [model]


def test_a_model_is_found_before_its_optimizer_runs_a_closure(found: Found) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        assert found.models == [model]
        loss = model.loss(X)
        assert found.called == [None, model.act]  # a part that the program calls by itself
        loss.backward()
        return loss.item()

    for _ in range(2):
        optimizer.step(closure)
    assert found.models == [model]


def test_a_later_model_that_torch_tells_no_call_of_is_found_when_its_first_pass_begins(found: Found) -> None:
    """Its optimizer is new: nothing else tells of it before that updates."""
    first, second = Model(), Model()
    train(first, torch.optim.SGD(first.parameters(), lr=0.1), PATIENCE + 1)
    found.search.pass_begins()
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    nn.functional.linear(X, second.layer.weight).sum().backward()
    assert found.models == [first]
    found.search.pass_begins()
    assert found.models == [first, second]
    assert optimizer


def test_an_optimizer_of_a_copy_makes_it_look_again(found: Found) -> None:
    """A copy gives itself no parameter: without its optimizer, its first step would go by."""
    model = Model()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), PATIENCE + 1)
    assert hooks() == 0
    twin = copy.deepcopy(model)
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert hooks() == 0
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert hooks() == 1
    twin(X)
    assert found.models == [model, twin]
    assert optimizer


def test_a_model_that_runs_with_other_weights_is_waited_for(found: Found) -> None:
    """What ``functional_call`` puts into the place of its parameters is gone when it has run."""
    model = Model()
    lent = {name: each.detach().clone() for name, each in model.named_parameters()}
    torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (X,)).sum())(lent)
    torch.func.functional_call(model, lent, (X,))
    assert not found.models
    model(X)
    assert found.models == [model]
    assert found.called == [model]


def test_parameters_of_no_model_are_let_be(found: Found) -> None:
    image = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([image], lr=0.1)
    for _ in range(PATIENCE + 1):
        image.sum().backward()
        optimizer.step()
    assert not found.models
    assert hooks() == 0


def test_a_model_that_grows_is_told_of_again(found: Found) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model(X)
    model.append(nn.Linear(2, 2))
    model(X)
    assert found.calls == [[model], [model]]


def test_a_model_with_names_of_its_own_for_what_torch_offers(found: Found) -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(2, 2)

        def children(self, depth: int) -> list[nn.Module]:  # type: ignore[override]
            raise AssertionError

        parameters = modules = children  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x)

    tree = Tree()
    tree(X)
    assert found.models == [tree]


def test_slices_of_a_model_are_no_models(found: Found) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        net[2](net[:2](X)).sum().backward()
        optimizer.step()
    assert found.models == [net]
    assert found.called == [net[0]]
    assert not found.errors


def test_a_sequence_of_parts_that_are_not_trained_elsewhere_is_a_model(found: Found) -> None:
    whole = Model()
    backbone = nn.Sequential(whole.act, whole.layer)
    backbone(X)
    together = nn.Sequential(nn.Linear(2, 2), Model())
    together(X)
    assert found.models == [backbone, together]


def test_who_makes_ever_new_models_is_not_followed_for_ever(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "models", 3)
    made: list[nn.Module] = []
    for _ in range(5):
        made.append(Model())
        made[-1](X)
    assert found.models == made[:3]
    assert len(found.errors) == 1


def test_a_fault_leaves_a_model_out_and_no_other(found: Found) -> None:
    def fail(models: list[nn.Module], called: nn.Module | None) -> None:
        raise ValueError("a fault")

    found.search._found, note = fail, found.search._found
    model = Model()
    assert model(X).shape == model(X).shape == (1, 2)
    assert found.left_out == [(model, "a fault")]
    found.search._found = note
    other = Model()
    other(X)
    assert found.models == [other]
    assert not found.errors


class Own(nn.Module):
    """What classes of users do: each of these raises, or says something else than torch's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def __eq__(self, other: object) -> object:  # type: ignore[override]
        return torch.ones(2) == 1

    def __hash__(self) -> int:
        return hash(self.kind)  # of a module that is being made there is none

    def __bool__(self) -> bool:
        raise RuntimeError("no boolean value")

    def __len__(self) -> int:
        return 0

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)

    @property
    def children(self) -> object:  # type: ignore[override]
        raise RuntimeError("not yet")

    parameters = modules = named_modules = children  # type: ignore[assignment]


def test_nothing_is_asked_of_a_module(found: Found) -> None:
    first, second = Own("same"), nn.Sequential(Own("same"), Own("same"))
    optimizers = [torch.optim.SGD(each.layer.parameters(), lr=0.1) for each in (first, *second)]
    for _ in range(2):
        (first(X) + second(X)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [id(model) for model in found.models] == [id(first), id(second)]
    assert not found.left_out
    assert not found.errors


def test_a_stage_that_runs_for_the_shapes_alone(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is found when it runs with data: what runs before that is not recorded."""
    monkeypatch.setattr("retrograd.core.launch.models.is_rehearsal", lambda: True)
    net = nn.Linear(3, 2)
    net(torch.ones(1, 3))
    assert not found.calls
    monkeypatch.setattr("retrograd.core.launch.models.is_rehearsal", lambda: False)
    net(torch.ones(1, 3))
    assert found.models == [net]
    assert found.called == [net]
