"""Loss functions that are listened to are the same for all that looks at them, and show each loss once."""

from __future__ import annotations

import pickle
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from retrograd.core.hooks.losses import find_loss_function, loss_listeners
from retrograd.core.hooks.native import native
from tests import warm

pytestmark = pytest.mark.skipif(native is None, reason="installed without a compiler")

BUILTINS = (torch._C._nn.cross_entropy_loss, torch._C._nn.mse_loss, torch.kl_div, torch.ctc_loss)


class Listener:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor, Callable[[], int | Tensor] | None]] = []

    def loss_computed(self, kind: str, loss: Tensor, count: Callable[[], int | Tensor] | None) -> None:
        self.seen.append((kind, loss, count))


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    loss_listeners.add(listener)
    yield listener
    loss_listeners.remove(listener)


classes, odds = torch.tensor([1, 0, 2, -100, 1]), torch.rand(5, 3)
LOSSES: dict[str, Callable[[str], Tensor]] = {
    "cross_entropy": lambda how: F.cross_entropy(odds, classes, reduction=how),
    "ignored": lambda how: F.cross_entropy(odds, classes.abs() % 3, ignore_index=1, reduction=how),
    "of_distributions": lambda how: F.cross_entropy(odds, odds.softmax(1), reduction=how),
    "smoothed": lambda how: F.cross_entropy(odds, classes.abs() % 3, label_smoothing=0.1, reduction=how),
    "of_pictures": lambda how: F.nll_loss(odds.reshape(1, 3, 5), classes[None], reduction=how),
    "mse": lambda how: F.mse_loss(odds, odds.flip(0), reduction=how),
    "l1": lambda how: torch.nn.L1Loss(reduction=how)(odds, odds.flip(0)),
    "smooth_l1": lambda how: F.smooth_l1_loss(odds, odds.flip(0), reduction=how),
    "huber": lambda how: F.huber_loss(odds, odds.flip(0), reduction=how, delta=0.1),
    "binary": lambda how: F.binary_cross_entropy(odds, odds.flip(0), reduction=how),
    "of_logits": lambda how: torch.nn.BCEWithLogitsLoss(reduction=how)(odds, odds.flip(0)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_over_what_is_counted_is_the_mean(name: str, listener: Listener) -> None:
    compute = LOSSES[name]
    with torch.no_grad():
        mean, total, _ = compute("mean"), compute("sum"), compute("none")
    (kind, first, nothing), (same, second, count) = listener.seen
    assert kind == same
    assert first is mean
    assert second is total
    assert nothing is None
    assert count is not None
    assert float(total) / float(count()) == pytest.approx(float(mean), rel=1e-6)


def test_what_has_no_targets_to_count_is_shown_as_a_mean_alone(listener: Listener) -> None:
    rows, lengths = torch.rand(6, 2, 4).log_softmax(2), torch.tensor([6, 6])
    with torch.no_grad():
        mean, *_ = (F.ctc_loss(rows, torch.ones(2, 2, dtype=torch.long), lengths, lengths // 3, reduction=how)
                    for how in ("mean", "sum", "none"))  # fmt: skip
        F.kl_div(odds.log(), odds, reduction="batchmean")
    assert [(kind, loss) for kind, loss, _ in listener.seen] == [("CtcLoss", mean)]


def test_nothing_is_shown_with_grad_in_transforms_or_traces(listener: Listener) -> None:
    def mean(a: Tensor, b: Tensor) -> Tensor:
        return torch._C._nn.mse_loss(a, b, 1)  # F.mse_loss compares shapes, of which torch.jit.trace warns

    mean(odds, odds)
    with torch.no_grad():
        batched = torch.func.vmap(mean)(odds, odds.flip(0))
        gradient = torch.func.grad(mean)(odds, odds.flip(0))
        traced = torch.jit.trace(mean, (odds, odds.flip(0)), check_trace=False)
        graph = make_fx(mean)(odds, odds.flip(0))
    assert listener.seen == []
    loss_listeners.remove(listener)
    with torch.no_grad():
        assert torch.equal(batched, torch.func.vmap(mean)(odds, odds.flip(0)))
        assert torch.equal(gradient, torch.func.grad(mean)(odds, odds.flip(0)))
        assert str(traced.graph) == str(torch.jit.trace(mean, (odds, odds.flip(0)), check_trace=False).graph)
        assert graph.code == make_fx(mean)(odds, odds.flip(0)).code


def look(function: Any) -> tuple[Any, ...]:
    return id(function), hash(function), repr(function), function.__name__, function.__doc__, function.__self__


def operations(function: Any) -> list[str]:
    scripted: Any = torch.jit.script(function)
    return [node.kind() for node in scripted.inlined_graph.nodes()]


def scripted(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b)


def test_functions_are_the_same_while_somebody_listens() -> None:
    before = [look(each) for each in BUILTINS], pickle.dumps(torch.kl_div), operations(LOSSES_SCRIPT[0])
    listener = Listener()
    loss_listeners.add(listener)
    try:
        assert ([look(each) for each in BUILTINS], pickle.dumps(torch.kl_div)) == before[:2]
        assert operations(LOSSES_SCRIPT[1]) == before[2]
        symbolic = torch.fx.symbolic_trace(scripted).code
        errors = []
        for wrong in ((odds, classes[:2]), (odds,), (odds, odds, odds, odds)):
            with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
                torch._C._nn.cross_entropy_loss(*wrong)
            errors.append((type(caught.value), str(caught.value)))
        with torch.no_grad():
            by_name = torch._C._nn.mse_loss(input=odds, target=odds.flip(0), reduction=1)
            assert by_name == torch._C._nn.mse_loss(*(odds, odds.flip(0)), **{"reduction": 1})  # noqa: PIE804
            assert by_name == F.mse_loss(odds, odds.flip(0))
    finally:
        loss_listeners.remove(listener)
    assert [loss for _, loss, _ in listener.seen] == [by_name]
    assert torch.fx.symbolic_trace(scripted).code == symbolic
    for wrong, (kind, message) in zip(((odds, classes[:2]), (odds,), (odds, odds, odds, odds)), errors, strict=True):
        with pytest.raises(kind) as caught:
            torch._C._nn.cross_entropy_loss(*wrong)
        assert str(caught.value) == message


def _script_one(a: Tensor, b: Tensor) -> Tensor:
    return F.l1_loss(a, b)


def _script_two(a: Tensor, b: Tensor) -> Tensor:
    return F.l1_loss(a, b)


LOSSES_SCRIPT = (_script_one, _script_two)


def test_listeners_leave_in_any_order_and_hold_nothing() -> None:
    first, second = Listener(), Listener()
    held = sys.getrefcount(odds)
    with torch.no_grad():
        loss_listeners.add(first)
        loss_listeners.add(second)
        F.mse_loss(odds, odds)
        loss_listeners.remove(first)
        F.mse_loss(odds, odds)
        thread = threading.Thread(target=torch.no_grad()(lambda: F.mse_loss(odds, odds)))
        thread.start()
        thread.join()
        loss_listeners.remove(second)
        F.mse_loss(odds, odds)
    assert len(first.seen) == 1
    assert len(second.seen) == 3
    first.seen.clear()
    second.seen.clear()
    assert sys.getrefcount(odds) == held


def test_an_interruption_goes_through() -> None:
    class Interrupted(Listener):
        def loss_computed(self, kind: str, loss: Tensor, count: Callable[[], int | Tensor] | None) -> None:
            raise KeyboardInterrupt

    listener = Interrupted()
    loss_listeners.add(listener)
    try:
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            F.mse_loss(odds, odds)
    finally:
        loss_listeners.remove(listener)


def test_the_function_that_is_trained_with_is_found_under_factors() -> None:
    x = odds.clone().requires_grad_()
    assert find_loss_function(F.cross_entropy(x, classes) / 4 * 1024) == "NllLoss"
    assert find_loss_function(F.binary_cross_entropy_with_logits(x, odds)) == "BinaryCrossEntropyWithLogits"
    assert find_loss_function(F.binary_cross_entropy(x.sigmoid(), odds)) == "BinaryCrossEntropy"
    assert find_loss_function(F.mse_loss(x, odds) + x.norm()) == ""
    assert find_loss_function(odds.sum()) == ""
    assert find_loss_function(x) == ""


COMPILED = """
import torch, torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from retrograd.core.hooks.losses import loss_listeners

class Listener:
    seen = []
    def loss_computed(self, *what): self.seen.append(what)

listener = Listener()
x, y = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
a = lambda x, y: F.cross_entropy(x, y) * 2
b = lambda x, y: F.cross_entropy(x, y) * 3
c = lambda x, y: torch._C._nn.cross_entropy_loss(x, y, None, 1) + F.kl_div(x, x, reduction="sum")
counter = CompileCounter()
compiled = [torch.compile(each, backend=counter, fullgraph=True) for each in (a, b, c)]
order = {order}
with torch.no_grad():
    for listens in order:
        (loss_listeners.add if listens else loss_listeners.remove)(listener)
        compiled[0](x, y)
    loss_listeners.remove(listener)
    results = [each(x, y).tolist() for each in compiled]
    assert results == [each(x, y).tolist() for each in (a, b, c)], results
    assert torch.export.export(torch.nn.CrossEntropyLoss(), (x, y)).module()(x, y) == F.cross_entropy(x, y)
assert {type(loss) for _, loss, _ in listener.seen} <= {torch.Tensor}  # this backend runs the functions themselves
print(counter.frame_count, dict(counters["graph_break"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["[True, False, True]", "[False, True, False]"])
def test_compiled_code_is_compiled_once_whoever_listens(order: str) -> None:
    program = textwrap.dedent(COMPILED).replace("{order}", order)
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split("\n")[0] == "3 {}", done.stderr
