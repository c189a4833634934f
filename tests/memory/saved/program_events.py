"""What a training program does with its model between two updates: each event is a few lines that people write."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.memory.saved.program_pieces import WIDTH
from tests.memory.saved.program_trial import PlantedError, Trial

Event = Callable[[Trial], None]

EVENTS: dict[str, Event] = {}


def event(run: Event) -> Event:
    EVENTS[run.__name__] = run
    return run


@event
def update(trial: Trial) -> None:
    trial.optimizer.zero_grad()
    trial.loss().backward()
    trial.optimizer.step()


@event
def accumulate(trial: Trial) -> None:
    trial.loss().backward()


@event
def gradient_of_input(trial: Trial) -> None:
    x = trial.inputs()
    trial.loss(x).backward()
    trial.seen.append(x.grad)


@event
def retain_graph(trial: Trial) -> None:
    loss = trial.loss()
    loss.backward(retain_graph=True)
    loss.backward()


@event
def chosen_gradients(trial: Trial) -> None:
    x = trial.inputs()
    chosen = [x, *(each for each in trial.model.parameters() if each.requires_grad)][:3]
    trial.seen.append(torch.autograd.grad(trial.loss(x), chosen, allow_unused=True))


@event
def double_backward(trial: Trial) -> None:
    x = trial.inputs()
    loss = trial.loss(x)
    (gradient,) = torch.autograd.grad(loss, [x], create_graph=True, allow_unused=True)
    (loss if gradient is None else loss + gradient.square().sum()).backward()


@event
def two_forwards(trial: Trial) -> None:
    (trial.loss() + trial.loss()).backward()


@event
def two_forwards_crossed(trial: Trial) -> None:
    first, second = trial.loss(), trial.loss()
    first.backward()
    second.backward()


@event
def two_losses(trial: Trial) -> None:
    output = trial.model(trial.inputs())
    output.float().sum().backward(retain_graph=True)
    output.float().square().mean().backward()


@event
def evaluate(trial: Trial) -> None:
    trial.model.eval()
    with torch.no_grad():
        trial.seen.append(trial.model(trial.inputs()))
    trial.model.train()


@event
def evaluate_between(trial: Trial) -> None:
    loss = trial.loss()
    with torch.no_grad():
        trial.loss()
    loss.backward()


@event
def train_in_eval_mode(trial: Trial) -> None:
    trial.model.eval()
    trial.loss().backward()
    trial.model.train()


@event
def abandon(trial: Trial) -> None:
    trial.loss()


@event
def begin_late(trial: Trial) -> None:
    trial.late.append(trial.loss())


@event
def end_late(trial: Trial) -> None:
    while trial.late:
        trial.late.pop().backward()


@event
def fail_in_forward(trial: Trial) -> None:
    def fail(*_: Any) -> None:
        raise PlantedError

    *_, last = (module for module in trial.model.modules() if not list(module.children()))
    handle = last.register_forward_hook(fail)
    try:
        trial.loss().backward()
    finally:
        handle.remove()


@event
def fail_in_backward(trial: Trial) -> None:
    def fail(gradient: Tensor) -> None:
        raise PlantedError

    x = trial.inputs()
    x.register_hook(fail)
    trial.loss(x).backward()


@event
def change_batch(trial: Trial) -> None:
    trial.batch = trial.batch + 2 if trial.batch < 4 else 2


@event
def freeze(trial: Trial) -> None:
    for parameter in list(trial.model.parameters())[::2]:
        parameter.requires_grad_(not parameter.requires_grad)


@event
def write_output(trial: Trial) -> None:
    output = trial.model(trial.inputs())
    output.mul_(2)
    output.sum().backward()


@event
def write_parameters(trial: Trial) -> None:
    loss = trial.loss()
    with torch.no_grad():
        for parameter in trial.model.parameters():
            parameter.mul_(0.99)
    loss.backward()


@event
def write_input(trial: Trial) -> None:
    x = torch.randn(trial.batch, WIDTH)
    loss = trial.loss(x)
    x.zero_()
    loss.backward()


@event
def slice_of_data(trial: Trial) -> None:
    """The batch is a view of a data set, the rest of which is written to before the backward pass."""
    data = torch.randn(trial.batch + 300, WIDTH)
    loss = trial.loss(data[100 : 100 + trial.batch])
    data.detach()[-1].zero_()
    loss.backward()


@event
def inputs_with_graph(trial: Trial) -> None:
    """The input is made of parameters outside of the model, and two batches share it."""
    scale = torch.ones(WIDTH, requires_grad=True)
    x = (trial.inputs() * scale).transpose(0, 1).contiguous().transpose(0, 1)
    (trial.loss(x) + trial.loss(x[:1].expand(2, -1))).backward()
    trial.seen.append((scale.grad, x.detach()))


@event
def backward_in_a_thread(trial: Trial) -> None:
    run_in_thread(trial.loss().backward)


@event
def step_in_a_thread(trial: Trial) -> None:
    run_in_thread(lambda: trial.loss().backward())


@event
def precision(trial: Trial) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = trial.loss()
    loss.backward()


def run_in_thread(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(1)  # else kernels split their work in another way until torch has counted the cores
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
