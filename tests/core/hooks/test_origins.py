"""Listening to the forward: other modes, other hooks and compiled code are left as they are."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from retrograd.core.hooks.engine import TORCH
from retrograd.core.hooks.nodes import number_of
from retrograd.following.graph.origins import Origins, record_origins

pytestmark = [  # what the compiler itself does
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def state() -> list[Any]:
    """What is replaced while origins are recorded."""
    return [
        vars(BackwardCFunction).get("__init__"),
        modules._has_any_global_hook,
        eval_frame._maybe_set_eval_frame,
        torch.autograd._engine_run_backward,
        _get_current_function_mode_stack(),
        list(sys.meta_path),
        dict(modules._global_forward_hooks),
        dict(modules._global_forward_pre_hooks),
        dict(modules._global_forward_hooks_always_called),
    ]


@pytest.fixture(autouse=True)
def all_is_put_back() -> Iterator[None]:

    before = state()
    yield
    assert state() == before


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Square.apply(self.first(x).relu()))


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x) * 2


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x) * 2)


def compile_as(kind: str, net: nn.Module, backend: str) -> Any:
    match kind:
        case "function":
            return torch.compile(lambda x: net(x).sin(), backend=backend)
        case "module":
            return torch.compile(net, backend=backend)
        case "part":
            return Around(torch.compile(net, backend=backend))  # type: ignore[arg-type]
        case "method":
            net.compile(backend=backend)
            return Around(net)
    raise AssertionError(kind)


def steps(kind: str, backend: str, kind_of_net: type[Net], recorded: set[int]) -> tuple[list[Tensor], Any, Any]:
    """Four steps with compiled code; what they computed, what dynamo counted, and where the last node was made."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    net = kind_of_net()
    x = torch.arange(6.0).view(2, 3) / 6
    results: list[Tensor] = []
    origin = None
    with record_origins() if -1 in recorded else contextlib.nullcontext():
        run = compile_as(kind, net, backend)
    for step in range(4):
        with record_origins() if step in recorded else contextlib.nullcontext() as origins:
            output = run(x)
            output.sum().backward()
        if isinstance(origins, Origins) and origins is not None:
            origin = origins.find(number_of(output.grad_fn))
        results += [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    counted = {name: dict(counters[name]) for name in ("stats", "frames", "graph_break", "recompiles", "unimplemented")}
    return results, counted, origin


@pytest.mark.parametrize(
    ("kind", "backend", "net"),
    [
        ("function", "eager", Broken),
        ("part", "eager", Broken),
        ("module", "aot_eager", Net),
        ("method", "aot_eager", Broken),
    ],
)
def test_compiled_code_is_compiled_as_ever(kind: str, backend: str, net: type[Net]) -> None:
    plain, counted, _ = steps(kind, backend, net, set())
    for recorded in ({-1, 0, 1, 2, 3}, {1, 3}):
        results, counted_too, origin = steps(kind, backend, net, recorded)
        assert counted_too == counted
        assert all(torch.equal(one, other) for one, other in zip(plain, results, strict=True))
        assert origin is not None
        assert origin.line is not None
        assert origin.line.file == __file__
        assert origin.module == {"function": None, "module": "self", "part": "last", "method": "last"}[kind]


def test_a_compiled_call_is_one_operation_of_its_caller() -> None:
    torch._dynamo.reset()
    net = Net()
    run = torch.compile(net, backend="aot_eager")
    around = Around(run)  # type: ignore[arg-type]
    with record_origins() as origins:
        around(torch.randn(2, 3))
        origins.clear()
        around(torch.randn(2, 3))
    spans = {span.module: span for span in origins.spans}
    assert set(spans) == {"self", "inner", "last"}
    origin = origins.find(spans["inner"].first)
    assert origin is not None
    assert (origin.module, origin.call) == ("inner", 1)
    assert origin.line is not None
    assert (origin.line.function, origin.line.operation) == ("forward", "Net")


def test_compiled_code_that_raises() -> None:
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def fail(x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("no")
        return x * 2

    x = torch.randn(3, requires_grad=True)
    with record_origins() as origins:
        with pytest.raises(ValueError, match="no"):
            fail(x)
        after = nn.Identity()(x) * 2
        assert len(_get_current_function_mode_stack()) == 1
    assert [span.module for span in origins.spans] == ["Identity"]
    assert origins.find(number_of(after.grad_fn)) is not None


def test_recording_that_begins_and_ends_inside_compiled_code() -> None:
    torch._dynamo.reset()
    kept = contextlib.ExitStack()

    @torch._dynamo.disable
    def begin() -> None:
        kept.enter_context(record_origins())

    @torch._dynamo.disable
    def end() -> None:
        kept.close()

    @torch.compile(backend="eager")
    def beginning(x: Tensor) -> Tensor:
        x = x * 2
        begin()
        return x + 1

    @torch.compile(backend="eager")
    def ending(x: Tensor) -> Tensor:
        x = x * 2
        end()
        return x + 1

    x = torch.randn(3)
    with kept:
        assert torch.equal(beginning(x), x * 2 + 1)
        assert torch.equal(ending(x), x * 2 + 1)


@pytest.mark.slow
def test_the_compiler_may_be_loaded_later() -> None:
    code = """
import sys, torch
from retrograd.following.graph.origins import record_origins
assert "torch._dynamo" not in sys.modules
x = torch.randn(3, requires_grad=True)
with record_origins() as origins:
    run = torch.compile(lambda x: (x * 2).sin(), backend="eager", fullgraph=True)
    y = run(x)
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 1, counters
assert eval_frame._maybe_set_eval_frame is eval_frame.set_eval_frame
assert origins.find(y.grad_fn._sequence_nr()).line.operation == "<lambda>"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(TORCH < (2, 12), reason="before torch 2.12 Dynamo fails at such a mode without us")
def test_modes_of_the_users_keep_their_order() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    seen: list[list[str]] = []

    @torch._dynamo.disable
    def look() -> None:
        seen.append([type(mode).__name__ for mode in _get_current_function_mode_stack()])

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        look()
        return x * 2

    below, above = Counting(), Counting()
    with below, record_origins() as origins, above:
        stack = _get_current_function_mode_stack()
        run(x)
        assert _get_current_function_mode_stack() == stack
        (x * 3).sum().backward()
        assert _get_current_function_mode_stack() == stack
        y = x * 4
    assert seen == [["Counting", "Counting"]]
    assert below.names == above.names
    assert origins.find(number_of(y.grad_fn)) is not None


def test_a_default_device_set_meanwhile_goes_on() -> None:
    before = torch.get_default_device()
    with record_origins():
        torch.set_default_device("meta")
        assert torch.zeros(2).device.type == "meta"
    try:
        assert torch.zeros(2).device.type == "meta"
    finally:
        torch.set_default_device(before)
        torch._GLOBAL_DEVICE_CONTEXT.device_context.__exit__(None, None, None)
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def test_compiled_modules_raise_no_warning_for_our_hooks_but_do_for_others() -> None:
    torch._dynamo.reset()
    run = torch.compile(Net(), backend="eager")
    x = torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using `torch.compile")
        with record_origins(), record_origins():
            run(x)
    handle = modules.register_module_forward_pre_hook(lambda module, args: None)
    with record_origins(), pytest.warns(UserWarning, match="global hooks"):
        run(x)
    handle.remove()


def test_users_hooks_on_all_modules_stay_in_order() -> None:
    torch._dynamo.reset()
    run = torch.compile(nn.Linear(3, 3).forward, backend="eager")
    told: list[int] = []
    first = modules.register_module_forward_hook(lambda *_: told.append(1))
    with record_origins():
        second = modules.register_module_forward_hook(lambda *_: told.append(2))
        run(torch.randn(2, 3))
        nn.Identity()(torch.randn(3))
    nn.Identity()(torch.randn(3))
    first.remove()
    second.remove()
    assert told == [1, 2, 1, 2]


def test_compiled_code_in_one_thread_and_plain_in_another() -> None:
    torch._dynamo.reset()
    net, plain = Net(), Net()
    run = torch.compile(net, backend="eager")
    x = torch.randn(2, 3)
    expected, expected_plain = net(x), plain(x)
    wrong: list[int] = []

    def work() -> None:
        for turn in range(30):
            if not torch.equal(plain(x), expected_plain):
                wrong.append(turn)

    with record_origins():
        thread = threading.Thread(target=work)
        thread.start()
        for turn in range(30):
            if not torch.equal(run(x), expected):
                wrong.append(turn)
        thread.join()
    assert not wrong
