"""Code without a model: watched tensors, what optimizers update, losses, and steps made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.facts import FACTS, OptimizerMade, read_facts
from retrograd.core.history.history import History
from retrograd.core.recording.recorder import Recorder


def make_data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(20, 3)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3


def make_parameters() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, requires_grad=True), torch.zeros((), requires_grad=True)]


Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def run(steps: int, make: Make, micros: int = 1) -> tuple[list[float], list[Tensor]]:
    """Linear regression of plain tensors; the losses, and the gradients that the optimizer got."""
    (x, y), (w, b) = make_data(), make_parameters()
    optimizer = make([w, b])
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(micros):
            hidden = rg.watch("prediction", x[part::micros] @ w + b)
            loss = (hidden - y[part::micros]).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert w.grad is not None
        gradients.append(w.grad.clone())
        optimizer.step()
    return losses, gradients


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def named_sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD([("slope.w", parameters[0]), ("output", parameters[1])], lr=0.1)


def two(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 1.0}], lr=0.1)


NAMES = {
    sgd: ("optimizer/SGD:0.0", "optimizer/SGD:0.1"),
    named_sgd: ("optimizer/SGD:slope.w", "optimizer/SGD:parameter.output"),
    two: ("optimizer/AdamW:0.0", "optimizer/AdamW:1.0"),
}


@pytest.mark.parametrize("make", NAMES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("in_folder", [True, False])
def test_what_optimizers_update_is_recorded(make: Make, in_folder: bool, tmp_path: Path) -> None:
    bare = run(6, make)
    with rg.record(None, tmp_path / "run" if in_folder else None) as recording:
        losses, gradients = run(6, make)
    assert losses == bare[0]
    assert all(map(torch.equal, gradients, bare[1]))
    history = rg.open_run(tmp_path / "run").history if in_folder else recording.history
    assert history.loss.steps.tolist() == list(range(6))
    assert history.loss.values.tolist() == pytest.approx(losses)
    first, second = NAMES[make]
    assert history[f"{first}.grad"].l2.tolist() == pytest.approx([each.double().norm().item() for each in gradients])
    for name in (first, second):
        assert history[f"{name}.grad"].steps.tolist() == history[f"{name}.update"].steps.tolist() == list(range(6))
    assert history["watch/prediction"].steps.tolist() == history["watch/prediction.grad"].steps.tolist()
    assert {event.kind for event in history.events} - {fact.kind for fact in FACTS} == {"loss", "update", "scalar"}


def test_accumulation_makes_micro_batches() -> None:
    with rg.record() as recording:
        losses, _ = run(3, sgd, micros=2)
    rows = recording.history["optimizer/SGD:0.0.grad"].rows
    assert list(zip(rows["step"].tolist(), rows["micro"].tolist(), strict=True)) == [
        (step, micro) for step in range(3) for micro in range(2)
    ]
    assert recording.history.loss.values.tolist() == pytest.approx([sum(losses[i : i + 2]) / 2 for i in (0, 2, 4)])


@pytest.mark.parametrize("every", [2, 3])
def test_only_scheduled_steps_are_recorded(every: int) -> None:
    with rg.record(schedule=every) as recording:
        run(7, sgd)
    expected = list(range(0, 7, every))
    for site in ("optimizer/SGD:0.0.grad", "optimizer/SGD:0.0.update", "watch/prediction"):
        assert recording.history[site].steps.tolist() == expected
    assert recording.history.loss.steps.tolist() == expected


def no_grad(w: Tensor, gradient: Tensor) -> Tensor:
    with torch.no_grad():
        w -= 0.1 * gradient
        w.grad = None
    return w


def past_autograd(w: Tensor, gradient: Tensor) -> Tensor:
    w.data -= 0.1 * gradient
    w.grad = None
    return w


def anew(w: Tensor, gradient: Tensor) -> Tensor:
    return (w - 0.1 * gradient).detach().requires_grad_()


kept: list[Tensor] = []


def anew_and_kept(w: Tensor, gradient: Tensor) -> Tensor:
    kept.append(w)
    return anew(w, gradient)


@pytest.mark.parametrize("update", [no_grad, past_autograd, anew, anew_and_kept])
@pytest.mark.parametrize("differentiate", ["backward", "grad"])
@pytest.mark.parametrize("watches", [False, True])
def test_a_loop_by_hand_has_losses_and_steps(
    update: Callable[[Tensor, Tensor], Tensor], differentiate: str, watches: bool
) -> None:
    x, y = make_data()
    w = make_parameters()[0]
    losses = []
    with rg.record() as recording:
        for _ in range(5):
            prediction = x @ w
            if watches:
                rg.watch("prediction", prediction)
            loss = (prediction - y).square().mean()
            if differentiate == "grad":
                (gradient,) = torch.autograd.grad(loss, w)
            else:
                loss.backward()
                gradient = w.grad.clone()  # type: ignore[union-attr]
            losses.append(loss.item())
            w = update(w, gradient)
    kept.clear()
    assert recording.history.loss.steps.tolist() == list(range(5))
    assert recording.history.loss.values.tolist() == pytest.approx(losses)
    if watches:
        assert recording.history["watch/prediction.grad"].steps.tolist() == list(range(5))


def test_two_optimizers_of_one_class_have_names_of_their_own() -> None:
    (x, y), (w, b) = make_data(), make_parameters()
    optimizers = [torch.optim.SGD([w], lr=0.1), torch.optim.SGD([b], lr=0.1)]
    with rg.record() as recording:
        for _ in range(4):
            (x @ w + b - y).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name in ("optimizer/SGD:0.0", "optimizer/SGD_2:0.0"):
        assert recording.history[f"{name}.update"].steps.tolist() == list(range(4))


def test_an_optimizer_has_one_name_in_sites_facts_and_findings() -> None:
    """Beside it there is one of the same class that updates a model, and has no site of its own.

    The last one is made during training, of a class of the user's whose name is that which another one has.
    """
    net, (w, b) = nn.Linear(3, 1), make_parameters()
    late = torch.zeros((), requires_grad=True)
    x = torch.ones(4, 3)
    optimizers = [torch.optim.SGD(held, lr=0.1) for held in (net.parameters(), [w], [b])]
    history = History()
    recorder = Recorder({"net": net}, history, loose=True)
    recorder.attach()
    for step in range(4):
        if step == 1:
            optimizers.append(type("SGD_2", (torch.optim.SGD,), {})([late], lr=0.1))
        for optimizer in optimizers[:2]:
            optimizer.zero_grad()
        (net(x).squeeze(1) + x @ w + b + late).square().mean().backward()
        for optimizer in optimizers[2:]:  # a mistake
            optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
    recorder.close()
    loose = {fact.name for fact in read_facts(history.events) if isinstance(fact, OptimizerMade) and fact.unknown}
    sites = {site.removesuffix(":0.0.update") for site in history.sites if site.startswith("optimizer/")}
    assert loose == {"SGD_2", "SGD_3", "SGD_2_2"}
    assert {site for site in sites if ":" not in site} == {f"optimizer/{name}" for name in loose}
    assert {event.name for event in history.events if event.kind == "update"} == {"SGD", *loose}
    found = {each.site for each in rg.explain(history) if each.detector == "zero-grad-misplaced"}
    assert found == {"SGD_3", "SGD_2_2"}


def test_parameters_that_an_optimizer_is_given_later() -> None:
    (x, y), (w, b) = make_data(), make_parameters()
    optimizer = torch.optim.SGD([w], lr=0.1)
    with rg.record() as recording:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [b]})
            (x @ w + b - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recording.history["optimizer/SGD:0.0.grad"].steps.tolist() == [0, 1, 2, 3]
    assert recording.history["optimizer/SGD:1.0.update"].steps.tolist() == [2, 3]


def test_beside_a_model_only_the_model_is_recorded_unless_asked() -> None:
    net, scale = nn.Linear(3, 1), torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
    with rg.record(net) as recording:
        (net(torch.randn(4, 3)) * scale).sum().backward()
        optimizer.step()
    assert not [site for site in recording.history.sites if site.startswith("optimizer/")]


def test_a_tensor_can_be_kept_and_chosen() -> None:
    with rg.record(sites="optimizer/*:*.grad", tensors="optimizer/SGD:0.1") as recording:
        _, gradients = run(2, sgd)
    history: History = recording.history
    assert sorted(history.sites) == ["optimizer/SGD:0.0.grad", "optimizer/SGD:0.1", "optimizer/SGD:0.1.grad"]
    assert history["optimizer/SGD:0.0.grad"].l2.tolist() == pytest.approx([each.norm().item() for each in gradients])
    assert [kept.tensor.item() for kept in history["optimizer/SGD:0.1"].tensors][:1] == [0.0]  # as it began


def test_nothing_is_left_behind() -> None:
    w, b = make_parameters()
    with rg.record():
        torch.optim.SGD([w, b], lr=0.1)
        (w.sum() + b).backward()
    assert not w._backward_hooks
    assert not b._backward_hooks


def test_a_rule_acts_on_a_watched_tensor_without_a_model() -> None:
    w = torch.ones(3, requires_grad=True)
    with rg.rewrite(None, {"watch/y.grad": lambda gradient, state: gradient * 3}):
        y = rg.watch("y", w * 2)
        y.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 6.0))  # type: ignore[arg-type]
    with pytest.raises(rg.RetrogradError), rg.rewrite(None, {"fc:output": lambda value, state: value}):
        pass
