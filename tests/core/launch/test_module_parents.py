from __future__ import annotations

import copy

import torch
from torch import nn

from retrograd.core.launch.models import ModuleParents, unwrap


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_the_model_is_the_topmost_parent() -> None:
    parents = ModuleParents()
    inner = nn.Sequential(nn.Linear(1, 1))
    outer = Pair(inner, nn.ReLU())
    assert parents.find_model(inner[0]) is inner[0]
    parents.learn(inner, inner[0])
    parents.learn(outer, inner)
    assert parents.find_model(inner[0]) is outer


def test_looking_around_finds_the_parents_of_a_copy() -> None:
    parents = ModuleParents()
    model = copy.deepcopy(Pair(nn.Linear(1, 1), nn.ReLU()))
    parents.look_around()
    assert parents.find_model(model.first) is model
    assert parents.find_model(model.second) is model


def test_a_parent_that_let_its_child_go_is_none() -> None:
    parents = ModuleParents()
    parent, child = Pair(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1)
    parents.learn(parent, child)
    assert parents.find_model(child) is child


def test_wrappers_for_distribution_are_taken_off() -> None:
    parents = ModuleParents()
    model = Pair(nn.Linear(1, 1), nn.Linear(1, 1))
    wrapped = DistributedDataParallel(model)
    parents.learn(wrapped, model)
    assert parents.find_model(model) is model
    assert parents.find_model(wrapped) is model
    assert unwrap(DistributedDataParallel(wrapped)) is model


def test_of_two_models_that_share_a_module_the_trained_one_is_meant() -> None:
    parents = ModuleParents()
    shared = nn.Linear(2, 2)
    idle, trained = Pair(shared, nn.Linear(2, 2)), Pair(shared, nn.Linear(2, 2))
    large = Pair(trained, nn.Linear(2, 2))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    parents.look_around()
    assert parents.find_model(shared) is large
    del large.first
    assert parents.find_model(shared) is trained
    assert idle
    assert optimizer


def test_trained_models_are_those_of_the_optimizers() -> None:
    parents = ModuleParents()
    encoder, decoder, frozen = nn.Linear(1, 1), Pair(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    parents.look_around()
    found = parents.find_trained(known=set())
    assert encoder in found
    assert decoder in found
    assert frozen not in found
    assert optimizer


def test_a_model_whose_parameters_are_known_is_not_found_again() -> None:
    parents = ModuleParents()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    twin = nn.Linear(1, 1)
    twin.weight, twin.bias = first.weight, first.bias
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    parents.look_around()
    found = parents.find_trained(known=set(map(id, first.parameters())))
    assert second in found
    assert first not in found
    assert twin not in found
    assert optimizer


def test_a_module_that_holds_itself_is_its_own_model() -> None:
    parents = ModuleParents()
    module = nn.Linear(1, 1)
    module.itself = module
    parents.learn(module, module)
    assert parents.find_model(module) is module
