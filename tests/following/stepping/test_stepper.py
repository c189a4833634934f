"""The real engine, stopped by hand: same results as ``loss.backward()``, and nothing left behind."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import DetachedGraphError, FreedGraphError, NoGraphError, NoSuchNodeError, StepperError
from retrograd.following.graph.origins import record_origins
from retrograd.following.stepping.stepper import Stepper, step_through
from tests.conftest import our_threads


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Double.apply(self.first(x).relu()) * self.scale
        upper, lower = hidden.split(3, dim=1)
        return (self.second(hidden).softmax(1) * upper.exp() + lower).square().mean()


def make() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(5, 4)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [None if each.grad is None else each.grad.clone() for each in net.parameters()]


def equal(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def plain(times: int = 1) -> list[Tensor | None]:
    net, x = make()
    for _ in range(times):
        net(x).backward()
    return gradients(net)


@pytest.fixture
def no_gc() -> Iterator[None]:
    while gc.collect():  # what compiling left behind goes in several rounds
        pass
    gc.disable()
    yield
    gc.enable()


def all_steps(stepper: Stepper) -> None:
    while stepper.step() is not None:
        pass


WAYS: dict[str, Callable[[Stepper], Any]] = {
    "steps": all_steps,
    "loop": list,
    "finish": Stepper.finish,
    "until": lambda stepper: stepper.run_until("second:weight"),
    "jump": lambda stepper: stepper.step(7),
    "leave": lambda stepper: None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("times", [1, 3])
def test_results_are_those_of_the_engine_alone(way: str, times: int) -> None:
    net, x = make()
    for _ in range(times):
        with step_through(net(x), model=net) as stepper:
            WAYS[way](stepper)
    assert stepper.is_over
    assert equal(gradients(net), plain(times))


def test_a_stop_shows_the_node_and_what_it_gets_and_gave() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    product = x * torch.tensor([3.0, 4.0])
    with step_through(product.sum()) as stepper:
        assert stepper.node.name == "SumBackward0"
        assert [each.item() for each in stepper.incoming if each is not None] == [1.0]
        assert (stepper.ran, stepper.outgoing) == (None, None)
        first = stepper.stop
        stop = stepper.step()
        assert stop is stepper.stop
        assert (stop.node.name, stop.position) == ("MulBackward0", 1)
        assert stepper.ran.name == "SumBackward0"
        assert torch.equal(stepper.outgoing[0], torch.ones(2))
        assert first.outgoing is not None
        assert first.moment == "past"
        assert stepper.saved["self"] is None
        assert torch.equal(stepper.saved["other"], torch.tensor([3.0, 4.0]))
        assert stop.live is product.grad_fn
        stepper.step()
        assert stepper.node.is_leaf
        assert torch.equal(stepper.incoming[0], torch.tensor([3.0, 4.0]))
        assert x.grad is None
    assert torch.equal(x.grad, torch.tensor([3.0, 4.0]))
    assert stop.node.name == "MulBackward0"
    with pytest.raises(DetachedGraphError):
        _ = stop.saved


def test_saved_tensors_are_shown_without_running_hooks() -> None:
    unpacked: list[Tensor] = []
    x = torch.randn(3, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):  # type: ignore[func-returns-value]
        loss = x.exp().sum()
    with step_through(loss, at="ExpBackward0") as stepper:
        assert stepper.saved["result"].shape == (3,)
        assert not unpacked
    assert len(unpacked) == 1


@pytest.mark.parametrize(
    ("at", "kinds"),
    [
        ("kind AddmmBackward0", ["AddmmBackward0"] * 2),
        ("Addmm*", ["AddmmBackward0"] * 2),
        ("first:weight", ["AccumulateGrad"]),
        ("*:bias", ["AccumulateGrad"] * 2),
        (["first:weight", "SoftmaxBackward0"], ["SoftmaxBackward0", "AccumulateGrad"]),
        (lambda stop: stop.node.name.startswith("Double"), ["DoubleBackward"]),
        ("norm < 1e9", None),
        ("non-finite", []),
    ],
)
def test_a_loop_gives_what_is_asked_for(at: Any, kinds: list[str] | None) -> None:
    net, x = make()
    with step_through(net(x), at, model=net) as stepper:
        found = [stop.node.name for stop in stepper]
    assert len(found) == len(stepper.graph) if kinds is None else found == kinds
    assert equal(gradients(net), plain())


def test_modules_and_lines_are_known_where_origins_were_recorded() -> None:
    net, x = make()
    with record_origins() as origins:
        loss = net(x)
        with step_through(loss, "first*", origins=origins) as stepper:
            node = stepper.node
            assert (node.name, node.module) == ("AddmmBackward0", "first")
            assert node.line is not None
            assert Path(node.line.file) == Path(__file__)
            stepper.run_until("first:weight")
            assert stepper.node.parameter == "first:weight"
    assert equal(gradients(net), plain())


def test_a_loop_begins_where_the_pass_is_paused() -> None:
    net, x = make()
    with step_through(net(x), "Addmm*", model=net) as stepper:
        here = stepper.stop
        assert next(iter(stepper)) is here
        assert [stop.node.name for stop in stepper] == ["AddmmBackward0"]


def test_what_comes_in_can_be_replaced_as_by_a_prehook() -> None:
    net, x = make()
    loss = net(x)
    node = find(loss, "ReluBackward0")
    node.register_prehook(lambda incoming: (incoming[0] * 3,))
    loss.backward()
    expected = gradients(net)

    net.zero_grad()
    with step_through(net(x), "ReluBackward0") as stepper:
        stepper.set_incoming(stepper.incoming[0] * 3)
        assert stepper.stop.taken is not None
    assert equal(gradients(net), expected)


def test_what_goes_out_can_be_replaced_as_by_a_posthook() -> None:
    net, x = make()
    loss = net(x)
    node = find(loss, "ReluBackward0")
    node.register_hook(lambda outgoing, incoming: (outgoing[0].clamp(max=0.01),))
    loss.backward()
    expected = gradients(net)

    net.zero_grad()
    with step_through(net(x), "ReluBackward0", retain_graph=True) as stepper:
        stop = stepper.stop
        stepper.step()
        given = stepper.outgoing
        stepper.abandon()
    net.zero_grad()
    with step_through(net(x), "ReluBackward0") as stepper:
        stop = stepper.stop
        stepper.set_outgoing(given[0].clamp(max=0.01))
        stepper.step()
        assert stop.outgoing is stepper.outgoing
        assert torch.equal(stepper.outgoing[0], given[0].clamp(max=0.01))
    assert equal(gradients(net), expected)


def test_one_of_several_can_be_replaced() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    with step_through((x * y).sum(), "MulBackward0") as stepper:
        stepper.set_incoming(...)
        stepper.set_outgoing(..., torch.zeros(2))
    assert torch.equal(x.grad, y)
    assert torch.equal(y.grad, torch.zeros(2))


def find(loss: Tensor, kind: str) -> Any:
    queue = [loss.grad_fn]
    for node in queue:
        if node.name() == kind:
            return node
        queue.extend(following for following, _ in node.next_functions if following is not None)
    raise AssertionError(kind)


def test_gradients_that_do_not_fit_are_refused() -> None:
    net, x = make()
    with step_through(net(x), "ReluBackward0") as stepper:
        good = stepper.incoming[0]
        for wrong in ([], [good, good], [good[0]], [good.double()], [3.0]):
            for replace in (stepper.set_incoming, stepper.set_outgoing):
                with pytest.raises(StepperError):
                    replace(*wrong)  # type: ignore[arg-type]
        stop = stepper.stop
        stepper.step()
        for late in (stop.set_incoming, stop.set_outgoing):
            with pytest.raises(StepperError):
                late(good)
    assert equal(gradients(net), plain())


def test_hooks_of_the_program_run_before_and_in_their_order() -> None:
    said: list[str] = []

    def run(step: bool) -> list[str]:
        said.clear()
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: said.append("tensor") or grad * 2)  # type: ignore[func-returns-value]
        y.retain_grad()
        y.grad_fn.register_prehook(lambda incoming: said.append(f"pre {incoming[0][0]}") or (incoming[0] + 1,))
        y.grad_fn.register_hook(lambda outgoing, incoming: said.append(f"post {incoming[0][0]}"))
        x.register_hook(lambda grad: said.append(f"leaf {grad[0]}"))
        x.register_post_accumulate_grad_hook(lambda leaf: said.append(f"accumulated {leaf.grad[0]}"))
        if step:
            with step_through(y.sum(), "MulBackward0") as stepper:
                assert torch.equal(stepper.incoming[0], torch.full((2,), 3.0))
        else:
            y.sum().backward()
        return [*said, str(x.grad), str(y.grad)]

    assert run(step=True) == run(step=False)


def test_an_error_of_the_pass_comes_out_where_one_waits(no_gc: None) -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise KeyError("mine")

    def run() -> weakref.ref[Stepper]:
        x = torch.randn(3, requires_grad=True)
        stepper = step_through(Bad.apply(x * 2).sum(), "BadBackward")
        with pytest.raises(KeyError, match="mine"):
            stepper.step()
        assert stepper.is_over
        assert not our_threads()
        stepper.finish()
        uses: list[Callable[[Stepper], Any]] = [
            Stepper.step, lambda it: it.node, lambda it: it.run_until("*"), lambda it: it.outgoing
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(StepperError, match="over"):
                use(stepper)
        return weakref.ref(stepper)

    assert run()() is None


def test_an_error_before_the_first_stop_comes_out_at_once() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_through(y.sum(), "AccumulateGrad")


def test_an_error_of_a_predicate_leaves_the_pass_paused() -> None:
    net, x = make()
    with step_through(net(x), model=net) as stepper:
        with pytest.raises(ZeroDivisionError):
            stepper.run_until(lambda stop: stop.position > 3 and 1 / 0)
        assert stepper.stop.position == 4
    assert equal(gradients(net), plain())


def test_what_cannot_be_asked_for() -> None:
    net, x = make()
    with pytest.raises(NoGraphError):
        step_through(x.sum())
    with pytest.raises(NoSuchNodeError) as raised:
        step_through(net(x), "SoftmxBackward0")
    assert "SoftmaxBackward0" in raised.value.repair
    with step_through(net(x), model=net) as stepper:
        with pytest.raises(NoSuchNodeError):
            stepper.run_until("thrid:weight")
        assert stepper.stop.position == 0
        with pytest.raises(StepperError):
            stepper.step(0)
    loss = net(x)
    loss.backward()
    with pytest.raises(FreedGraphError):
        step_through(loss).finish()


def leave_by_exception(stepper: Stepper) -> None:
    with contextlib.suppress(ZeroDivisionError), stepper:
        raise ZeroDivisionError


@pytest.mark.parametrize("leave", [Stepper.abandon, leave_by_exception, lambda stepper: None])
def test_leaving_early_leaves_nothing(leave: Callable[[Stepper], None], no_gc: None) -> None:
    net, x = make()
    loss = net(x)
    node = loss.grad_fn
    stepper = step_through(loss, "second:weight", model=net)
    stop = stepper.stop
    assert our_threads()
    leave(stepper)
    watched = weakref.ref(stepper)
    del stepper
    assert watched() is None
    assert not our_threads()
    assert stop.moment == "past"
    assert net.first.weight.grad is None
    assert net.second.bias.grad is not None
    node.register_prehook(lambda incoming: None)
    del loss, node, stop
    assert gc.collect() == 0


def test_a_loop_that_is_broken_off_leaves_nothing(no_gc: None) -> None:
    net, x = make()
    for stop in step_through(net(x), "Addmm*"):
        assert stop.node.name == "AddmmBackward0"
        break
    del stop
    assert not our_threads()
    assert gc.collect() == 0


def test_a_pass_leaves_neither_hooks_nor_cycles(no_gc: None) -> None:
    net, x = make()
    loss = net(x)

    def run() -> weakref.ref[Stepper]:
        with step_through(loss, retain_graph=True) as stepper:
            stepper.run_until(lambda stop: len(stepper.graph) > stop.position == 3)
            stepper.step()
        return weakref.ref(stepper)

    watched = run()
    gc.collect()  # the predicate above is a cell that holds itself
    before = gradients(net)
    net.zero_grad()
    loss.backward()
    assert equal(gradients(net), before)
    assert watched() is None


def test_an_interrupted_wait_can_be_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = make()
    stepper = step_through(net(x), model=net)
    wait = threading.Condition.wait

    def interrupt(self: threading.Condition, timeout: float | None = None) -> bool:
        if timeout is not None:
            raise KeyboardInterrupt
        return wait(self)

    monkeypatch.setattr(threading.Condition, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stepper.run_until("first:weight")
    monkeypatch.undo()
    stepper.finish()
    assert equal(gradients(net), plain())


def test_the_thread_that_steps_is_free() -> None:
    net, x = make()
    loss = net(x)
    with step_through(loss, "Addmm*", retain_graph=True) as stepper:
        other, _ = make()
        other(x).backward()
        (same,) = torch.autograd.grad(loss, [net.first.weight], retain_graph=True)
        assert stepper.node.name == "AddmmBackward0"
    assert equal(gradients(net), plain())
    assert equal(gradients(other), plain())
    assert torch.equal(same, net.first.weight.grad)


def test_two_passes_can_be_paused_at_once() -> None:
    (one, x), (two, _) = make(), make()
    with step_through(one(x)) as first, step_through(two(x)) as second:
        while not (first.is_over and second.is_over):
            for stepper in (first, second):
                if not stepper.is_over:
                    stepper.step()
    assert equal(gradients(one), plain())
    assert equal(gradients(two), plain())


class Spy(torch.autograd.Function):
    """Notes what its backward finds set."""

    seen: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Spy.seen = {
            "grad": torch.is_grad_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "dtype": torch.get_autocast_dtype("cpu"),
            "cache": torch.is_autocast_cache_enabled(),
            "hooks": [each.__qualname__ for each in torch._C._autograd._top_saved_tensors_default_hooks(False) or ()],
            "saving": torch._C._autograd._saved_tensors_hooks_is_enabled(),
            "device": torch.empty(1).device.type,
            "view replay": torch._C._is_view_replay_enabled(),
            "context": CONTEXT.get(),
            "mode depth": torch._C._len_torch_function_stack(),
        }
        return gradients[0]


CONTEXT = contextvars.ContextVar("CONTEXT", default=0)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "surround",
    [
        contextlib.nullcontext,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", cache_enabled=False),
        save_on_cpu,
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        lambda: torch.device("meta"),
        lambda: torch.autograd._force_original_view_tracking(True),
        lambda: torch.autograd.set_multithreading_enabled(False),
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_the_thread_of_the_engine_is_set_as_ours(surround: Any, create_graph: bool) -> None:
    seen: list[dict[str, Any]] = []
    token = CONTEXT.set(7)
    for ours in (False, True):
        x = torch.ones(2, requires_grad=True)
        loss = Spy.apply(x).sum()
        grad = torch.ones(())
        with surround():
            if ours:
                with step_through(loss, gradient=grad, create_graph=create_graph) as stepper:
                    stepper.step()
            else:
                loss.backward(grad, create_graph=create_graph)
        seen.append(Spy.seen)
        x.grad = None
    CONTEXT.reset(token)
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_second_derivative_is_bitwise_that_of_the_engine_alone() -> None:
    def second(step: bool) -> Tensor:
        weights = torch.randn(50, generator=torch.Generator().manual_seed(1), requires_grad=True)
        loss = (weights.sin() * weights.sigmoid() + weights.cos() + weights.tanh()).pow(3).sum()
        if step:
            for _ in range(2):
                with step_through(loss, create_graph=True) as stepper:
                    stepper.step(3)
        else:
            loss.backward(create_graph=True)
            loss.backward(create_graph=True)
        first, weights.grad = weights.grad, None
        (first.sin() * first * weights.tanh() + first.exp().clamp(max=2)).sum().backward()
        return weights.grad

    assert torch.equal(second(True), second(False))


def test_inputs_and_gradient_are_those_of_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    w = torch.randn(3, requires_grad=True)
    with step_through([x * w, w.exp()], gradient=[torch.ones(3), torch.ones(3)], inputs=[w]) as stepper:
        kinds = {stop.node.name for stop in stepper}
    assert kinds == {"MulBackward0", "ExpBackward0", "AccumulateGrad"}
    assert x.grad is None
    assert torch.equal(w.grad, x + w.exp())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_gone_through(reentrant: bool) -> None:
    def run(step: bool) -> tuple[list[str], list[Tensor | None]]:
        net, x = make()
        x.requires_grad_()
        hidden = checkpoint(net.first, checkpoint(torch.relu, x, use_reentrant=reentrant), use_reentrant=reentrant)
        loss = net.second(hidden).square().sum()
        if not step:
            loss.backward()
            return [], gradients(net)
        with step_through(loss) as stepper:
            return [stop.node.name for stop in stepper], gradients(net)

    names, ours = run(True)
    assert ("CheckpointFunctionBackward" in names) == reentrant
    assert equal(ours, run(False)[1])


def test_a_shared_parameter_in_a_reentrant_checkpoint() -> None:
    def run(step: bool) -> Tensor:
        w = torch.full((3,), 2.0, requires_grad=True)
        x = torch.ones(3, requires_grad=True)
        loss = (checkpoint(lambda t: t * w, x, use_reentrant=True) * w).sum()
        if step:
            with step_through(loss) as stepper:
                all_steps(stepper)
        else:
            loss.backward()
        return w.grad

    assert torch.equal(run(True), run(False))


def test_a_deep_graph_is_stepped_through_and_freed() -> None:
    x = torch.ones((), requires_grad=True)
    y = x
    for _ in range(50_000):
        y = y * 1.00001
    with step_through(y) as stepper:
        assert stepper.step(25_000) is not None
    assert x.grad is not None
    del y, stepper
    gc.collect()


def test_a_gradient_is_taken_over_without_a_copy() -> None:
    x = torch.ones(4, requires_grad=True)
    with step_through((x * 2).sum(), "AccumulateGrad") as stepper:
        memory = stepper.incoming[0].data_ptr()
    assert x.grad.data_ptr() == memory


def test_texts_for_people() -> None:
    x = torch.ones(4, requires_grad=True)
    with step_through((x * 2).sum()) as stepper:
        assert "SumBackward0" in repr(stepper)
        assert "SumBackward0" in repr(stepper.stop)
    assert "over" in repr(stepper)
