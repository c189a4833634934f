"""Policies for saved tensors beside what else acts on a program: checkpoints, compilers, threads, interrupts.

Whatever comes together, gradients are those of the plain program, and nothing stays in torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from retrograd.core.hooks import calls as call_stack
from retrograd.core.hooks import dispatch
from retrograd.core.hooks import saved as saved_hooks
from retrograd.following.bundles.replay import replay
from retrograd.following.bundles.writer import write_bundle
from retrograd.following.engine.replayer import run_from
from retrograd.memory.budget.planned import Planned
from retrograd.memory.inventory.recorder import take_inventory
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.lossless import Lossless
from retrograd.memory.policies.policy import AsIs, Policy
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.saved import calls
from retrograd.memory.saved.keeping import SavedHandle, keep_saved
from tests.memory.budget.forced_plans import force_offloading
from tests.memory.saved.interrupter import Interrupter
from tests.memory.saved.test_exactness import Elsewhere


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


POLICIES: dict[str, Callable[[pytest.MonkeyPatch], Policy]] = {
    "copies": lambda patch: Elsewhere(),
    "lossless": lambda patch: Lossless(min_bytes=0),
    "recompute": lambda patch: Recompute(),
    "budget": force_offloading,
}


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int = 1) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    loss = (call or model)(batch()).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def is_bare() -> bool:
    """Whether nothing is set in this thread."""
    is_asked = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is None and not torch._C._len_torch_dispatch_stack() and not is_asked


# ---- checkpoints ----------------------------------------------------------------------------------------------


def test_a_selective_checkpoint_finds_its_own_modes_again(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, choose)

    def call(x: Tensor) -> Tensor:
        return model.last(checkpoint(model.first, x, use_reentrant=False, context_fn=contexts))

    expected = gradients(model, call)
    with keep_saved(None, force_offloading(monkeypatch)):
        for _ in range(4):
            assert same(gradients(model, call), expected)
    assert is_bare()


def test_an_inventory_of_what_is_run_again(model: Net) -> None:
    expected = gradients(model)
    with keep_saved(model, Recompute()), take_inventory(model) as inventory:
        assert same(gradients(model), expected)
    assert "checkpoint" in inventory.table["held"].to_pylist()


def test_a_hook_that_comes_before_is_not_asked_twice(model: Net) -> None:
    with keep_saved(model, {"first": Recompute()}):
        model.first.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,), prepend=True)
        found = gradients(model)
    assert same(found, gradients(model))


def test_nothing_is_run_again_where_hooks_are_forbidden(model: Net) -> None:
    expected = gradients(model)
    with keep_saved(model, Recompute()), disable_saved_tensors_hooks("not here"):
        assert same(gradients(model), expected)


# ---- transforms and compilers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Elsewhere, Recompute])
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_inside_of_a_transform(transform: str, make: Callable[[], Policy], model: Net) -> None:
    def call(x: Tensor) -> Tensor:
        if transform == "vmap":
            return torch.func.vmap(model)(x)
        tangents: Tensor = torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
        return tangents

    expected = gradients(model, call)
    with keep_saved(model, make()):
        assert same(gradients(model, call), expected)


@pytest.mark.parametrize("everywhere", [False, True])
def test_tangents_are_rounded_as_ever(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer norm torch takes another formula while a dispatch mode looks on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 3))

    def tangents() -> list[Tensor | None]:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(batch(1), batch(2))
            output = model(dual)
            found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
            parts = [forward_ad.unpack_dual(each) for each in (output, *found)]
            return [part.tangent.clone() if part.tangent is not None else None for part in parts]

    expected = tangents()
    with keep_saved(None if everywhere else model, force_offloading(monkeypatch)):
        for _ in range(3):
            assert same(tangents(), expected)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_model_is_traced_as_it_is(kind: str, model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.jit.trace(model, batch())
    with keep_saved(model, POLICIES[kind](monkeypatch)):
        traced = torch.jit.trace(model, batch())  # traces twice, and compares
    graphs = [re.sub(r"___torch_mangle_\d+\.", "", str(each.inlined_graph)) for each in (traced, expected)]
    assert graphs[0] == graphs[1]
    assert same(gradients(model, traced), gradients(model, expected))


def test_the_whole_process_under_a_budget_calls_compiled_modules(model: Net) -> None:
    """A call of a compiled module sets back, when it ends, whether torch asks modes at all."""
    model.compile(backend="eager")
    expected = gradients(model)
    with keep_saved(None, Planned(2**40, min_bytes=0)) as handle:
        for _ in range(4):
            assert same(gradients(model), expected)
        assert handle.plan is not None
        F.relu(batch())
    assert is_bare()
    torch.compiler.reset()


# ---- nodes run once more --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POLICIES)
def test_a_node_is_bundled_with_what_it_saved(
    kind: str, model: Net, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bringing it back is not an operation of the node."""
    expected = gradients(model)
    with keep_saved(model, POLICIES[kind](monkeypatch)):
        gradients(model)
        loss = model(batch()).square().sum()
        product = loss.grad_fn.next_functions[0][0].next_functions[0][0]  # type: ignore[union-attr]
        assert replay(write_bundle(product, [torch.ones(5, 3)], tmp_path / "bundle"))
        found = run_from(loss)
        assert same([found[parameter] for parameter in model.parameters()], expected)


# ---- threads --------------------------------------------------------------------------------------------------


class Thread:
    """Carries out what it is given, in one thread, and waits for it."""

    def __init__(self) -> None:
        self._work: Callable[[], Any] | None = None
        self._wake, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._result: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __call__(self, work: Callable[[], Any]) -> Any:
        self._work = work
        self._wake.release()
        assert self._done.acquire(timeout=60)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def end(self) -> None:
        self._work = None
        self._wake.release()
        self._thread.join()

    def _run(self) -> None:
        while self._wake.acquire() and self._work is not None:
            try:
                self._result = self._work()
            except BaseException as error:  # raised where somebody waits for it
                self._result = error
            self._done.release()


@pytest.fixture
def thread() -> Iterator[Thread]:
    other = Thread()
    yield other
    other.end()


@pytest.mark.parametrize("make", [AsIs, Elsewhere])
@pytest.mark.parametrize("everywhere", [False, True])
def test_ended_in_another_thread(everywhere: bool, make: Callable[[], Policy], model: Net, thread: Thread) -> None:
    expected = gradients(model)
    handle: SavedHandle = thread(lambda: keep_saved(None if everywhere else model, make()))
    assert same(thread(lambda: gradients(model)), expected)
    handle.remove()
    assert same(thread(lambda: gradients(model)), expected)
    assert thread(is_bare)


@pytest.mark.parametrize("make", [AsIs, Elsewhere])
def test_ended_by_another_thread_in_the_middle_of_a_call(
    make: Callable[[], Policy], model: Net, thread: Thread
) -> None:
    expected = gradients(model)
    handle = keep_saved(model, make())
    model.last[0].register_forward_pre_hook(lambda module, args: thread(handle.remove))
    assert same(gradients(model), expected)
    assert same(gradients(model), expected)
    assert is_bare()


# ---- what fails -----------------------------------------------------------------------------------------------


class FailsToBegin(AsIs):
    def open(self) -> None:
        raise ArithmeticError


class FailsToEnd(AsIs):
    def close(self) -> None:
        raise ArithmeticError


class Counted(AsIs):
    users = 0

    def open(self) -> None:
        self.users += 1

    def close(self) -> None:
        self.users -= 1


@pytest.mark.parametrize("last", [FailsToBegin, FailsToEnd])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_policy_that_fails_does_not_keep_others_from_ending(last: type[Policy], is_last: bool, model: Net) -> None:
    counted = Counted()
    chosen = {"first": counted, "last": last()} if is_last else {"first": last(), "last": counted}
    with pytest.raises(ArithmeticError):
        keep_saved(model, chosen).remove()
    assert counted.users == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


SETS_HOOKS = frozenset(str(module.__file__) for module in (calls, call_stack, dispatch, saved_hooks))
SEARCHES = {"plan.py", "planner.py", "simulation.py"}
ROOMS = [Path(str(calls.__file__)).parents[1] / room for room in ("saved", "policies", "budget")]
KEEPS = frozenset(str(path) for room in ROOMS for path in room.glob("*.py") if path.name not in SEARCHES)


@pytest.mark.parametrize("make", [Elsewhere, Recompute])
def test_an_interrupt_at_any_instruction(make: Callable[[], Policy], model: Net, thorough: bool) -> None:
    expected = gradients(model)
    with keep_saved(model, make()):
        gradients(model)  # what is done once is not counted
        counter = Interrupter(SETS_HOOKS, 0, is_realistic=False)
        with counter:
            gradients(model)
        assert counter.count > 1000
        for place in range(1, counter.count, 7 if thorough else 41):
            with pytest.raises(KeyboardInterrupt), Interrupter(SETS_HOOKS, place, is_realistic=False):
                gradients(model)
            assert same(gradients(model), expected)
            assert is_bare(), place


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("budget", [None, 0.35, 0.6])
def test_an_interrupt_while_saved_tensors_are_elsewhere(
    budget: float | None, is_known: bool, tmp_path: Path, thorough: bool
) -> None:
    """Later passes are right, and so is another one over the same graph; nobody waits for what will not come."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())))
    expected = gradients(model)
    parameters = list(model.parameters())

    def train(interrupter: Interrupter) -> None:
        policy: Policy = (
            Disk(tmp_path, min_bytes=0) if budget is None else Planned(budget, folder=tmp_path, min_bytes=0)
        )
        loss: list[Tensor] = []
        with keep_saved(model, policy):
            for _ in range(3 if is_known else 0):
                gradients(model)
            with suppress(KeyboardInterrupt), interrupter:
                for _ in range(2):
                    loss.clear()
                    loss.append(model(batch()).square().sum())
                    torch.autograd.grad(loss[0], parameters, retain_graph=budget is None)
            if budget is None and loss:
                assert same(list(torch.autograd.grad(loss[0], parameters)), expected)
            loss.clear()
            for _ in range(3):
                assert same(gradients(model), expected)
        assert is_bare()

    counter = Interrupter(KEEPS, 0, is_realistic=True)
    train(counter)
    for place in range(1, counter.count, counter.count // (20 if thorough else 7)):
        train(Interrupter(KEEPS, place, is_realistic=True))
