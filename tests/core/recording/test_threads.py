"""Threads that train models of their own, each with a recording of its own, do not hear of each other."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg

STEPS = 12
KINDS = {"loss", "update", "skipped", "scale"}


@pytest.fixture(autouse=True)
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.head = nn.Linear(6, 1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2

    def forward(self, x: Tensor) -> Tensor:
        saved = x.requires_grad and torch.is_grad_enabled()
        x = checkpoint(self.body, x, use_reentrant=True) if saved else self.body(x)
        return self.head(rg.watch("hidden", x.tanh()))


Barrier = Callable[[], Any]


def train(seed: int, wait: Barrier) -> dict[str, Any]:
    """A run with losses of its own scale, accumulation, an evaluation, and a skipped step; what was recorded."""
    model = Net(seed)
    data = torch.randn(3 * STEPS, 5, 4, generator=torch.Generator().manual_seed(seed)).unbind(0)
    update = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    wait()
    with rg.record(model, sites=["*", "watch/hidden*"]) as recording:
        for step in range(STEPS):
            for micro in range(1 + seed % 2):
                loss = model(data[3 * step + micro].requires_grad_()).square().mean() * seed
                scaler.scale(loss * (float("inf") if step == seed else 1.0)).backward()
            scaler.step(update)
            scaler.update()
            update.zero_grad()
            if step % 3 == seed % 3:
                with torch.no_grad():
                    model(data[3 * step + 2])
    return summarize(recording.history)


def summarize(history: rg.History) -> dict[str, Any]:
    table = history.table()
    assert table.num_rows
    told = [event for event in history.events if event.kind in KINDS]  # facts are written when there is time
    events = [(e.moment.step, e.moment.micro, e.kind, e.name, repr(e.value)) for e in told]
    return {"rows": repr(table.to_pylist()), "events": events}


def run_together(jobs: list[Callable[[Barrier], Any]]) -> list[Any]:
    barrier = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def work(index: int) -> None:
        results[index] = jobs[index](barrier.wait)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_each_records_what_it_would_record_alone() -> None:
    seeds = (3, 4)
    alone = [train(seed, lambda: None) for seed in seeds]
    together = run_together([lambda wait, seed=seed: train(seed, wait) for seed in seeds])
    for one, other in zip(together, alone, strict=True):
        assert one["events"] == other["events"]
        assert one["rows"] == other["rows"]
    assert {kind for _, _, kind, _, _ in alone[0]["events"]} == KINDS


def test_recordings_that_come_and_go_while_another_one_runs() -> None:
    """The functions that are wrapped for all of the process stay as long as they are needed."""
    done = threading.Event()

    def come_and_go(wait: Barrier) -> int:
        wait()
        count = 0
        while not done.is_set():
            model = nn.Linear(2, 2)
            with rg.record(model) as recording:
                model(torch.ones(1, 2)).sum().backward()
            assert recording.history["self:output.grad"].steps.tolist() == [0]
            count += 1
        return count

    def stay(wait: Barrier) -> dict[str, Any]:
        try:
            return train(4, wait)
        finally:
            done.set()

    alone = train(4, lambda: None)
    steady, count = run_together([stay, come_and_go])
    assert steady == alone
    assert count


def test_a_backward_in_another_thread_than_the_forward() -> None:
    model = Net(1)
    with rg.record(model, sites="head:*") as recording:
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert recording.history["head:output.grad"].steps.tolist() == [0, 1]
    assert recording.history["head:weight.grad"].count.tolist() == [6, 6]


def test_one_model_in_several_threads_at_once() -> None:
    """The threads share its rows, so calls are missed; nothing breaks."""
    model, errors = Net(1), []

    def work() -> None:
        try:
            for _ in range(20):
                model(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            errors.append(error)

    with rg.record(model, sites="*") as recording:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert 0 < recording.history["self:output"].count.sum() <= 3 * 20 * 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def watch_reading(model: nn.Linear) -> list[str]:
    """Where ``model.weight.grad`` is read from now on."""
    read: list[str] = []
    gradient = nn.Parameter.grad

    class Watched(nn.Parameter):
        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            read.append("".join(traceback.format_stack(limit=3)))
            return gradient.__get__(self)

    model.weight = Watched(model.weight.detach())
    return read


def test_a_pass_of_another_model_elsewhere_reads_no_gradients() -> None:
    """The thread of the recorded model may clear them just then, which is the same race."""
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    read = watch_reading(model)
    with rg.record(model):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        read.clear()
        thread = threading.Thread(target=lambda: other(torch.ones(2, 4)).sum().backward())
        thread.start()
        thread.join()
        assert not read
        model(torch.ones(2, 4)).sum().backward()
        assert read


def test_gradients_are_left_alone_while_another_thread_adds_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read ``.grad`` beside a pass of another thread is a race in torch, and ends in a null pointer."""
    model, inside, looked = nn.Linear(4, 1), threading.Event(), threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            inside.set()
            assert looked.wait(60)
            return gradient

    read = watch_reading(model)
    with rg.record(model):
        model(torch.ones(2, 4)).sum().backward()
        thread = threading.Thread(target=lambda: Waits.apply(model(torch.ones(2, 4))).sum().backward())
        thread.start()
        assert inside.wait(60)
        read.clear()
        try:
            model(torch.ones(2, 4)).sum().backward()
            ours = [where for where in read if "_gradient_of" not in where]  # in the hook of the accumulation
        finally:
            looked.set()
            thread.join()
    nn.Identity()(torch.ones(1))  # what another thread has ended for this one is taken away with its next call
    assert not ours


def watch_in_a_thread(name: str, count: int) -> None:
    def work() -> None:
        for _ in range(count):
            rg.watch(name, torch.ones(3, requires_grad=True) * 2).sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def losses_of(history: rg.History) -> list[float]:
    return [float(event.value) for event in history.events if event.kind == "loss"]


def test_what_is_watched_in_a_thread_is_recorded_without_a_model() -> None:
    with rg.record() as recording:
        watch_in_a_thread("elsewhere", 2)
        rg.watch("here", torch.ones(3, requires_grad=True) * 2).sum().backward()
        watch_in_a_thread("elsewhere", 1)
    history = recording.history
    assert history["watch/elsewhere.grad"].count.sum() == history["watch/elsewhere"].count.sum() == 3 * 3
    assert history["watch/here.grad"].count.sum() == 3
    assert losses_of(history) == [6.0] * 4


def test_a_recording_without_a_model_leaves_threads_alone_that_have_one_of_their_own() -> None:
    def work(wait: Barrier) -> rg.History:
        with rg.record() as recording:
            wait()
            for _ in range(20):
                rg.watch(threading.current_thread().name, torch.ones(3, requires_grad=True) * 2).sum().backward()
            wait()
        return recording.history

    with rg.record() as outer:
        histories = run_together([work, work])
    assert not list(outer.history.sites)
    for history in histories:
        assert len(list(history.sites)) == 2
        assert losses_of(history) == [6.0] * 20


def test_passes_of_ten_threads_at_once_are_ten_passes() -> None:
    """Each waits, in the middle of its pass, for all others to be in theirs."""
    barrier = threading.Barrier(10)

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            barrier.wait(60)
            return gradient

    def work(number: int) -> None:
        x = torch.full((), float(number), requires_grad=True)
        Meets.apply(x).backward()
        assert x.grad == 1

    with rg.record() as recording:
        run_together([lambda _, number=number: work(number) for number in range(10)])
        torch.full((), 10.0, requires_grad=True).mul(1).backward()
    assert sorted(losses_of(recording.history)) == [float(number) for number in range(11)]
    moments = [event.moment for event in recording.history.events if event.kind == "loss"]
    assert len({(each.step, each.micro) for each in moments}) == 11
