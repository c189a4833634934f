"""Inputs, modes, parameters and buffers as they are noted, held against numpy and the program's own tensors."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import Buffer, Input, Modes, Parameter
from retrograd.explaining.facts.tensors import Readings
from retrograd.explaining.findings.explain import make_record

F = TypeVar("F", bound=Fact)


def facts(recording: Any, kind: type[F]) -> list[F]:
    record = make_record(recording.history)
    assert not [event for event in record.events if event.kind == "fault"]
    return record.of(kind)


class Asked(nn.Module):
    """Takes nests and keywords of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Any, *rest: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.weight * sum(each.double().nan_to_num(0, 0, 0).sum() for each in (x["a"], *rest))


# ---- inputs ----


TENSORS = {
    "float32": torch.linspace(-3, 5, 40).reshape(8, 5),
    "float64": torch.linspace(-3, 5, 40, dtype=torch.float64).reshape(8, 5),
    "bfloat16": torch.linspace(-3, 5, 40).bfloat16(),
    "int64": torch.arange(-4, 20),
    "uint8": torch.arange(0, 250, dtype=torch.uint8),
    "bool": torch.arange(10) % 3 == 0,
    "strided": torch.linspace(-3, 5, 40).reshape(8, 5).t(),
    "not finite": torch.tensor([1.0, float("nan"), 3.0, float("inf")]),
    "one": torch.tensor(2.0),
    "large": torch.linspace(0, 1, 1 << 21).reshape(1 << 11, 1 << 10),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_an_input_by_its_numbers(kind: str) -> None:
    tensor, model = TENSORS[kind], Asked()
    with rg.record(model) as recording:
        model({"a": tensor}, torch.ones(3), mask=torch.zeros(2)).backward()
    found = {each.name: each for each in facts(recording, Input)}
    assert list(found) == ["self:input.x.a", "self:input.rest.0", "self:input.mask"]
    one = found["self:input.x.a"]
    values = tensor.double().numpy()
    finite = values[np.isfinite(values)]
    assert (one.shape, one.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    assert one.nonfinite == values.size - finite.size
    expected = [finite.mean(), finite.min(), finite.max(), finite.std()]
    assert [one.value, one.min, one.max, one.std] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_digests_are_equal_for_equal_values_alone() -> None:
    one = torch.randn(6, 5)
    changed, swapped = one.clone(), one.clone()
    changed[3, 2] += 1e-6
    swapped[[0, 1]] = one[[1, 0]]
    given = [one, one.clone(), changed, swapped, one.clone().double()]
    model = Asked()
    with rg.record(model) as recording:
        for tensor in given:
            model({"a": tensor}).backward()
            with torch.no_grad():
                model.weight += 1
    first, same, *others = [each.digest for each in facts(recording, Input)]
    assert same == first
    assert first not in others
    assert len(set(others)) == 3


def test_the_first_call_of_each_kind_in_a_recorded_step() -> None:
    model = nn.Linear(2, 1)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, schedule=2) as recording:
        for number in range(6):
            for part in range(3):
                model(torch.full((4, 2), float(10 * number + part))).sum().backward()
            update.step()
            with torch.no_grad():
                model(torch.full((4, 2), -1.0 - number))
    seen = [(each.step, each.moment.phase, each.value) for each in facts(recording, Input)]
    assert [(step, value) for step, phase, value in seen if phase == "train"] == [(0, 0), (2, 20), (4, 40)]
    assert {(step, value) for step, phase, value in seen if phase == "no_grad"} == {(2, -2), (4, -4), (6, -6)}


# ---- modes ----


def test_modes_are_noted_when_they_change() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.BatchNorm1d(2), nn.Linear(2, 1))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model) as recording:
        for number in range(6):
            if number == 2:
                model[0].eval()
            if number == 4:
                model.eval()
            model(torch.randn(4, 2)).sum().backward()
            update.step()
    assert [(each.step, each.name, each.training, each.evaluating) for each in facts(recording, Modes)] == [
        (0, "self", ("self",), ()),
        (2, "self", ("self", "1", "2"), ("0",)),
        (4, "self", (), ("self",)),
    ]


# ---- parameters and buffers ----


def test_parameters_as_they_are_before_a_step() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].weight = model[1].weight
    model[3].requires_grad_(False)
    with torch.no_grad():
        model[0].weight[2] = model[0].weight[0]
    update = torch.optim.SGD(model[1].parameters(), lr=0.1)
    states: list[dict[str, bytes]] = []

    def keep() -> None:
        states.append({name: bytes(each.detach().numpy()) for name, each in model.named_parameters()})

    with rg.record(model) as recording:
        for number in range(3):
            keep()
            (model(torch.ones(2, 3)).sum() + 0 * model[0].bias.sum()).backward()
            update.step()
            if number == 1:
                model[0].bias.data.add_(1)  # by hand
        keep()
    found = facts(recording, Parameter)
    names = [name.replace(".weight", ":weight").replace(".bias", ":bias") for name in states[0]]
    assert [(each.step, each.name) for each in found] == [(step, name) for step in (0, 1, 2, 3) for name in names]
    for name, plain in zip(names, states[0], strict=True):
        digests = [each.digest for each in found if each.name == name]
        for step in range(3):
            assert (digests[step] == digests[step + 1]) == (states[step][plain] == states[step + 1][plain])
    first = {each.name: each for each in found if each.step == 0}
    assert first["0:weight"].same_rows == 2
    assert {each.same_rows for name, each in first.items() if name != "0:weight"} == {0}
    assert first["1:weight"].tied == ("2:weight",)
    assert {name: each.grad for name, each in first.items() if each.grad != "some"} == {
        "3:weight": "None",
        "3:bias": "None",
    }
    assert not first["3:weight"].requires_grad
    weight = np.frombuffer(states[0]["0.weight"], np.float32).astype(np.float64)
    assert first["0:weight"].value == pytest.approx(np.sqrt((weight**2).mean()))
    assert {each.grad for each in found if each.step == 3} == {""}


def test_a_gradient_that_is_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    with rg.record(model) as recording:
        model(torch.ones(2, 3)).sum().backward()
    grads = {each.name: each.grad for each in facts(recording, Parameter) if each.grad}
    assert grads == {"0:weight": "zero", "0:bias": "zero", "2:weight": "zero", "2:bias": "some"}


def test_a_program_without_an_optimizer_has_its_gradients_read_behind_some_of_its_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, passes, read = nn.Linear(2, 1), 0, list[int]()
    plain = Readings.read

    def count(self: Readings, tensor: Tensor, *, has_digest: bool = True) -> int | None:
        read.extend([] if has_digest or tensor is not model.weight.grad else [passes])
        return plain(self, tensor, has_digest=has_digest)

    monkeypatch.setattr(Readings, "read", count)
    with rg.record(model) as recording:
        for passes in range(1, 101):
            model(torch.full((1, 2), float(passes >= 64))).sum().backward()
    assert read == [*range(1, 17), 32, 64]
    grads = {each.name: each.grad for each in facts(recording, Parameter) if each.step == 0 and each.grad}
    assert grads == {"self:weight": "some", "self:bias": "some"}


class Experts(nn.ModuleDict):
    """Each is called with its number, where it has one."""

    def forward(self, **numbers: float) -> Tensor:
        return sum((self[name](torch.full((1, 2), number)).sum() for name, number in numbers.items()), torch.zeros(()))


def test_what_comes_late_in_a_long_accumulation_is_a_gradient() -> None:
    model = Experts({name: nn.Linear(2, 1) for name in ("often", "rare", "late", "never")})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rg.record(model) as recording:
        for number in range(1, 21):
            rare = {"rare": 1.0} if number == 18 else {}
            model(often=1.0, late=float(number == 19), **rare).backward()
        optimizer.step()
    grads = {each.name: each.grad for each in facts(recording, Parameter) if each.step == 0 and each.grad}
    expected = {"often": "some", "rare": "some", "late": "some", "never": "None"}
    assert {name: grads[f"{name}:weight"] for name in expected} == expected


def test_buffers_as_they_are_before_a_step() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    with rg.record(model) as recording:
        for _ in range(2):
            means.append(float(model[1].running_mean.double().mean()))
            model(torch.randn(5, 3)).square().sum().backward()
            update.step()
        means.append(float(model[1].running_mean.double().mean()))
    found = facts(recording, Buffer)
    assert [each.value for each in found if each.name == "1:running_mean"] == pytest.approx(means, rel=1e-4)
    assert [each.value for each in found if each.name == "1:num_batches_tracked"] == [0, 1, 2]
    assert {each.name for each in found} == {"1:running_mean", "1:running_var", "1:num_batches_tracked"}
