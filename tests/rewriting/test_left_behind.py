"""Nothing piles up while rules act, nothing lives longer for them, and nothing is left when they are removed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import RetrogradWarning
from retrograd.core.hooks.rewriters import intervention_listeners
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import add_one, assert_same, gradients, halve, leave, make_net

EVERYWHERE: dict[str, Any] = {
    "*:output": lambda value, state: value * 0.9,
    "*:output.grad": halve,
    "*:input.input": lambda value, state: value * 0.9,
    "*:input.input.grad": halve,
    "*:weight": halve,
    "*:weight.grad": halve,
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class NeedsValue(Rule):
    needs_value = True

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        assert state.value is not None
        return value * state.value.tanh()


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flat, self.identity = nn.Linear(3, 4), nn.Flatten(), nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.identity(self.flat(self.linear(x))) * 1.0)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", [make_net, Flat])
@pytest.mark.parametrize("way", ["backward", "no backward", "eval", "double", "reentrant", "not reentrant"])
@pytest.mark.parametrize("rules", ["everywhere", "needs value"])
def test_a_step_dies_with_its_names(make: Any, way: str, rules: str) -> None:
    net = make()
    refs: list[weakref.ref[Any]] = []
    for module in net.modules():
        module.register_forward_hook(lambda module, args, output: refs.append(weakref.ref(output)))

    def note(value: Tensor, state: SiteState) -> None:
        refs.append(weakref.ref(value))

    def step() -> None:
        x = torch.randn(5, 3, requires_grad=True)
        if way == "no backward":
            net(x)
            return
        if way == "eval":
            with torch.no_grad():
                net(x)
            return
        out = checkpoint(net, x, use_reentrant=way == "reentrant") if "reentrant" in way else net(x)
        if way == "double":
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            out = slope.square()
        out.sum().backward()
        refs.append(weakref.ref(out))

    chosen: dict[Any, Any] = {"*:output.grad": [NeedsValue(), note]} if rules == "needs value" else {**EVERYWHERE}
    with rewrite(net, chosen):
        step()  # torch loads parts of itself at first, and a frame stays in a cycle
        refs.clear()
        step()
        net.zero_grad()
        assert len(refs) > 3
        assert not [ref() for ref in refs if ref() is not None]


@pytest.mark.usefixtures("no_collector")
def test_nothing_piles_up() -> None:
    """Torch's own checkpoint leaves cycles, so it is held against training without rules."""

    def growth(*, with_rules: bool) -> int:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            checkpoint(net, torch.randn(5, 3), use_reentrant=False).sum().backward()
            net(torch.randn(5, 3))  # a forward that nothing follows
            optimizer.step()

        with ExitStack() as stack:
            if with_rules:
                stack.enter_context(rewrite(net, EVERYWHERE))
                stack.enter_context(rewrite(optimizer, ClipNorm(1.0)))
            for _ in range(5):
                step()
            before = len(gc.get_objects())
            for _ in range(20):
                step()
            return len(gc.get_objects()) - before

    growth(with_rules=False)
    assert growth(with_rules=True) - growth(with_rules=False) < 10


def test_views_do_not_hold_their_memory() -> None:
    net = nn.Flatten()
    with rewrite(net, {"self:output.grad": halve}):
        base = torch.randn(4, 4, requires_grad=True) * 1.0
        storage = base.untyped_storage()
        before = torch._C._storage_Use_Count(storage._cdata)
        net(base)
        assert torch._C._storage_Use_Count(storage._cdata) == before


_DEEP = """
import sys, threading, torch
from torch import nn
from retrograd.rewriting.rewriting import rewrite
torch.set_num_threads(1)
x = torch.ones(1, 2, requires_grad=True)
def pair():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))

def run():
    for make, count, sites in (
        (lambda: nn.Linear(2, 2), 800, ("*:output.grad", "*:input.input.grad", "*:output")),
        (pair, 400, ("*:output.grad", "*.1:input.input.grad")),
        (nn.Identity, 800, ("*:output.grad",)),
    ):
        net = nn.Sequential(*(make() for _ in range(count)))
        for site in sites:
            with rewrite(net, {site: lambda value, state: value * 1}):
                for backward in (True, False):
                    out = net(x * 1.0)
                    if backward:
                        out.sum().backward()
                    del out
            print("alive", flush=True)
threading.stack_size(128 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.slow
def test_deep_graphs() -> None:
    """In a thread with little stack, for that is where a chain of nodes overflows first."""
    done = subprocess.run([sys.executable, "-c", _DEEP], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["alive"] * 6, (done.returncode, done.stderr[-2000:])


def hooks_of(net: nn.Module) -> list[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
              "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks")  # fmt: skip
    found = [each for module in net.modules() for table in tables for each in getattr(module, table)]
    return found + [each for parameter in net.parameters() for each in parameter._backward_hooks or ()]


def test_nothing_is_left_in_the_model() -> None:
    net, x = make_net(), torch.randn(5, 3)
    before = {name: set(vars(module)) for name, module in net.named_modules()}
    net(x).sum().backward()
    expected = gradients(net)
    net.zero_grad()
    with rewrite(net, EVERYWHERE):
        net(x).sum().backward()
        assert hooks_of(net)
    net.zero_grad()
    assert not hooks_of(net)
    assert {name: set(vars(module)) for name, module in net.named_modules()} == before
    net(x).sum().backward()
    assert_same(gradients(net), expected)
    assert not intervention_listeners


def test_a_graph_that_outlives_the_rules() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)), torch.randn(5, 3)
    rules = {"*:output.grad": halve, "*:input.input.grad": halve, "*:weight.grad": halve}
    with rewrite(net, rules):
        out = net(x)
    out.sum().backward()
    found = gradients(net)
    net.zero_grad()
    net(x).sum().backward()
    assert_same(found, gradients(net))


def test_removed_while_the_pass_runs() -> None:
    net, x = make_net(), torch.randn(5, 3)
    rewriting = rewrite(net, {"3:output.grad": lambda v, s: rewriting.remove(), "1:output.grad": halve})
    net(x).sum().backward()
    found = gradients(net)
    net.zero_grad()
    net(x).sum().backward()
    assert_same(found, gradients(net))
    assert not hooks_of(net)


@pytest.mark.filterwarnings("error")
def test_copies_and_pickles_need_no_rules() -> None:
    net, x = make_net(), torch.randn(5, 3)
    plain = net(x)
    with rewrite(net, EVERYWHERE):
        rewritten = net(x)
        buffer = io.BytesIO()
        torch.save(net, buffer)
        copies = [
            copy.deepcopy(net),
            pickle.loads(pickle.dumps(net)),
            torch.load(io.BytesIO(buffer.getvalue()), weights_only=False),
        ]
        copy.deepcopy(rewritten.detach())
        for each in copies:
            assert torch.equal(each(x), plain)
            each(x).sum().backward()
    net.zero_grad()
    net(x).sum().backward()
    for each in copies:
        assert_same(gradients(each), gradients(net))


@pytest.mark.slow
def test_a_saved_model_is_loaded_without_this_package(tmp_path: Path) -> None:
    net, x = make_net(), torch.ones(2, 3)
    with rewrite(net, EVERYWHERE):
        torch.save(net, tmp_path / "net.pt")
    script = (
        "import sys; sys.modules['retrograd'] = None\n"
        "import torch\n"
        f"net = torch.load({str(tmp_path / 'net.pt')!r}, weights_only=False)\n"
        "print(net(torch.ones(2, 3)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(net(x).tolist())


def test_warning_of_sites_that_were_never_reached() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    net = Net()
    rules: dict[Any, Any] = {"unused:output": halve, "used:output": leave, "used#2:output": halve}
    with pytest.warns(RetrogradWarning, match="'unused:output'") as caught, rewrite(net, rules):
        net(torch.ones(1, 2))
    assert "'used:output'" not in str(caught[0].message)
    assert "'used#2:output'" in str(caught[0].message)
    with rewrite(net, {"unused:output": halve}):
        pass  # nothing ran, so nothing was missed
    with pytest.raises(ZeroDivisionError), rewrite(net, {"unused:output": halve}):
        net(torch.ones(1, 2))
        raise ZeroDivisionError


def test_no_waiting_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads a number out of a tensor would wait for it."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def refuse(self: Tensor, *_: Any) -> Any:
        raise AssertionError("a number was read out of a tensor")

    def forward_and_backward() -> None:
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(5, 3)).sum()).backward()

    with (
        rewrite(net, {**EVERYWHERE, "1:output": ClipNorm(1.0), "2:weight.grad": ClipNorm(0.1)}),
        rewrite(optimizer, ClipNorm(1.0)),
    ):
        for _ in range(2):
            with monkeypatch.context() as patch:
                for name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "nonzero"):
                    patch.setattr(Tensor, name, refuse)
                forward_and_backward()
                optimizer.step()


def test_threads_end_with_their_runs() -> None:
    net = make_net()
    with rewrite(net, {"1:output": add_one}):
        before = threading.active_count()
        net(torch.randn(2, 3)).sum().backward()
        assert threading.active_count() == before
