"""Calls that the program makes, in order, with their lines and numbers, held against the program's own source."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import clip_grad as clipping
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # before anybody records
from torch.optim import Optimizer, lr_scheduler

import retrograd as rg
from retrograd.core.history.facts import Call, OptimizerMade
from retrograd.core.hooks.discovery import construction_watch
from retrograd.explaining.findings.explain import make_record
from retrograd.explaining.findings.record import Record
from tests.explaining.facts.marks import marked

LINES = marked(__file__)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def record(train: Callable[[nn.Module], Any], **options: Any) -> Record:
    model = make_net()
    with rg.record(model, **options) as recording:
        train(model)
    return make_record(recording.history)


def named(calls: list[Call]) -> list[str]:
    return [call.name for call in calls]


# ---- order, lines, numbers ----


@pytest.mark.parametrize("every", [1, 5])
def test_each_step_has_its_calls_with_their_lines_and_numbers(every: int) -> None:
    norms, rates = [], []

    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = lr_scheduler.StepLR(update, 3, gamma=0.5)
        for _ in range(12):
            update.zero_grad()  # at: zero_grad
            loss = model(torch.randn(5, 4)).square().mean()  # at: forward
            loss.backward()  # at: backward
            norms.append(float(clip_grad_norm_(model.parameters(), 0.5)))  # at: clip_grad_norm_
            rates.append(update.param_groups[0]["lr"])
            update.step()  # at: step
            schedule.step()  # at: scheduler.step

    record_ = record(train, schedule=every)
    calls = record_.calls
    expected = ["zero_grad", "forward", "backward", "clip_grad_norm_", "step", "scheduler.step"] * 12
    assert named(calls) == expected
    assert [call.line for call in calls] == [LINES[name] for name in expected]
    assert [call.value for call in calls if call.name == "clip_grad_norm_"] == pytest.approx(norms, rel=1e-6)
    assert [call.details["lr"] for call in calls if call.name == "step"] == [[rate] for rate in rates]
    assert [call.details["lr"] for call in calls if call.name == "scheduler.step"][:-1] == [[r] for r in rates[1:]]
    assert {call.about for call in calls if call.name in ("zero_grad", "step")} == {"SGD"}
    by_step = dict(record_.calls_by_step())
    assert [named(by_step[step]) for step in (1, 7)] == [["scheduler.step", *expected[:5]]] * 2
    clip = next(call for call in calls if call.name == "clip_grad_norm_")
    assert dict(clip.details) == {"max_norm": 0.5, "norm_type": 2.0, "parameters": 4}


def test_few_events_hold_many_steps() -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(200):
            update.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            update.step()

    record_ = record(train)
    assert len(record_.calls) == 800
    assert sum(event.kind in ("call", "calls") for event in record_.events) < 60


def test_steps_that_differ_are_told_apart() -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(12):
            if number % 3:
                update.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            if number % 4 == 0:
                clip_grad_value_(model.parameters(), 0.25)
            update.step()

    for step, calls in record(train).calls_by_step():
        assert named(calls) == [
            *["zero_grad"] * (step % 3 > 0), "forward", "backward", *["clip_grad_value_"] * (step % 4 == 0), "step",
        ]  # fmt: skip
        assert all(call.details["clip_value"] == 0.25 for call in calls if call.name == "clip_grad_value_")


def test_an_update_stands_behind_the_calls_of_its_closure() -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.LBFGS(model.parameters(), max_iter=2)
        data = torch.randn(8, 4)

        def closure() -> Tensor:
            update.zero_grad()
            loss = model(data).square().mean()
            loss.backward()
            return loss

        update.step(closure)

    names = named(record(train).calls)
    assert names[-1] == "step"
    assert names.count("step") == 1
    assert names[:3] == ["zero_grad", "forward", "backward"]


def test_loss_scaling_and_the_update_that_it_skips() -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(2):
            update.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean() * (float("inf") if number else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(update)
            scaler.step(update)
            scaler.update()

    calls = record(train).calls
    first = ["zero_grad", "forward", "backward", "scaler.unscale_", "scaler.step", "step", "scaler.update"]
    assert named(calls) == [*first, *(name for name in first if name != "step")]
    assert [call.value for call in calls if call.name == "scaler.update"] == [4.0, 2.0]
    assert {call.about for call in calls if call.name in ("scaler.step", "scaler.unscale_")} == {"SGD"}


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda update: lr_scheduler.StepLR(update, 2),
    "OneCycleLR": lambda update: lr_scheduler.OneCycleLR(update, 0.5, 20),
    "CosineAnnealingWarmRestarts": lambda update: lr_scheduler.CosineAnnealingWarmRestarts(update, 3),
    "ReduceLROnPlateau": lambda update: lr_scheduler.ReduceLROnPlateau(update, patience=1),
    "SequentialLR": lambda update: lr_scheduler.SequentialLR(
        update, [lr_scheduler.LinearLR(update), lr_scheduler.ExponentialLR(update, 0.5)], milestones=[3]
    ),
    "ChainedScheduler": lambda update: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(update), lr_scheduler.ExponentialLR(update, 0.5)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_call_of_a_scheduler_is_one(kind: str) -> None:
    rates = []

    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[kind](update)
        for _ in range(6):
            model(torch.ones(1, 4)).sum().backward()
            update.step()
            schedule.step(*[1.0] * (kind == "ReduceLROnPlateau"))
            rates.append([update.param_groups[0]["lr"]])

    calls = [call for call in record(train).calls if call.name == "scheduler.step"]
    assert {call.about for call in calls} == {kind}
    assert [call.details["lr"] for call in calls] == rates


def test_what_autograd_is_asked_for() -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, 4, requires_grad=True)
        loss = model(x).sum()
        torch.autograd.grad(loss, x, create_graph=True)
        loss.backward(retain_graph=True)
        loss.backward(inputs=list(model.parameters())[:2])
        update.step()

    _, grad, first, second, _ = record(train).calls
    assert (grad.name, grad.details) == ("grad", {"retain_graph": True, "create_graph": True, "inputs": 1})
    assert first.details == {"retain_graph": True, "create_graph": False, "held": "none"}
    assert second.details == {"retain_graph": False, "create_graph": False, "held": "some", "inputs": 2}


class Differentiating(torch.autograd.Function):
    """Differentiates inside of its backward, as adjoint methods do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad((x * 2).sum(), x)
        return grad * found


def test_a_pass_within_a_pass_is_not_the_programs() -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        Differentiating.apply(model(torch.ones(1, 4))).sum().backward()
        update.step()

    assert named(record(train).calls) == ["forward", "backward", "step"]


@pytest.mark.parametrize(("clear", "held"), [(None, "some"), (True, "none"), (False, "zero")])
def test_what_gradients_held_before_a_pass(clear: bool | None, held: str) -> None:
    def train(model: nn.Module) -> None:
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            update.step()
            if clear is not None:
                model.zero_grad(set_to_none=clear)

    calls = record(train).calls
    assert [call.details["held"] for call in calls if call.name == "backward"] == ["none", held, held]
    assert {call.about for call in calls if call.name == "zero_grad"} <= {"self"}


def test_calls_of_another_thread_are_not_this_programs_order() -> None:
    def train(model: nn.Module) -> None:
        other = nn.Linear(2, 1)
        update = torch.optim.SGD(other.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        thread = threading.Thread(target=update.zero_grad)
        thread.start()
        thread.join()

    assert named(record(train).calls) == ["forward", "backward"]


# ---- optimizers ----


def test_an_optimizer_and_what_it_holds() -> None:
    def train(model: nn.Module) -> None:
        construction_watch.hold()
        strange = nn.Parameter(torch.ones(2))
        groups = [{"params": [model[0].weight, strange], "lr": 0.2}, {"params": [model[2].bias]}]
        update = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)  # at: AdamW
        construction_watch.release()
        for number in range(2):
            model(torch.ones(1, 4)).sum().backward()
            update.step()
            if number == 0:
                update.add_param_group({"params": [model[0].bias]})

    first, second = record(train).of(OptimizerMade)
    assert (first.name, first.value, first.line, first.step) == ("AdamW", 3, LINES["AdamW"], 0)
    assert [(g["parameters"], g["unknown"], g["lr"]) for g in first.groups] == [
        (["0:weight"], 1, 0.2),
        (["2:bias"], 0, 0.1),
    ]
    assert first.groups[0]["betas"] == [0.8, 0.9]
    assert (second.name, second.step, len(second.groups)) == ("AdamW", 1, 3)


NAMES = ["SGD", *(f"SGD_{number}" for number in range(2, 51))]


def test_an_optimizer_made_anew_each_step_and_one_that_never_steps() -> None:
    def train(model: nn.Module) -> None:
        construction_watch.hold()
        idle = torch.optim.Adam(model.parameters())  # at: Adam
        for _ in range(60):
            update = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 4)).sum().backward()
            update.step()
        construction_watch.release()
        assert idle.state == {}

    record_ = record(train)
    made = record_.of(OptimizerMade)
    assert [each.name for each in made if each.has_updated] == NAMES
    steps = [call.about for call in record_.calls if call.name == "step"]
    assert steps == NAMES + NAMES[-1:] * 10


# ---- nothing of ours is left, or gets into anything ----


def names_of_torch() -> dict[str, Any]:
    places: list[tuple[Any, str]] = [
        (torch.autograd, "_engine_run_backward"),
        (Optimizer, "zero_grad"),
        (Optimizer, "_patch_step_function"),
        (nn.Module, "zero_grad"),
        *((torch.amp.GradScaler, name) for name in ("scale", "step", "unscale_", "update")),
        *((clipping, name) for name in ("_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype")),
        (lr_scheduler, "_param_groups_val_list"),
    ]
    return {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in places}


def test_torch_is_as_it_was() -> None:
    before = names_of_torch()
    first = rg.record(make_net())
    second = rg.record(make_net())
    assert names_of_torch() != before
    first.close()
    second.close()
    assert names_of_torch() == before


def test_pickles_are_the_same() -> None:
    def make() -> tuple[Any, ...]:
        model = make_net()
        update = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = lr_scheduler.CosineAnnealingLR(update, 5)
        return model, update, schedule

    def train(model: nn.Module, update: Optimizer, schedule: Any) -> bytes:
        for _ in range(2):
            update.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            schedule.step()
        pickled = pickle.dumps((model, update.state_dict(), update, schedule.state_dict()))
        return re.sub(rb"\d{10,}", b"", pickled)  # addresses

    bare = train(*make())
    model, update, schedule = make()
    with rg.record(model):
        recorded = train(model, update, schedule)
    assert recorded == bare


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_has_no_more_graphs() -> None:
    def count(options: dict[str, Any] | None) -> int:
        torch._dynamo.reset()
        model, counter = make_net(), CompileCounter()
        update = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(backend=counter)
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            update.step()
            update.zero_grad()
            return loss

        with nullcontext() if options is None else rg.record(model, **options):
            for _ in range(3):
                step(torch.ones(2, 4))
        return counter.frame_count

    assert count({}) == count(None)
