"""What an instance remembers: bounded, detached, its own memory, saved with the model, the same for all threads."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import FunctionError
from retrograd.tools.functions.function import Function
from tests.tools.functions.linear import MyLinear, RememberingLinear, tensors


class Layer(nn.Module):
    """A module that holds a Function and its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = RememberingLinear()
        self.weight = nn.Parameter(tensors(dtype=torch.float32)[1].detach())

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x, self.weight)
        assert isinstance(output, Tensor)
        return output


def step(module: nn.Module, factor: float) -> Tensor:
    """A pass whose gradient at the outputs is this factor everywhere."""
    output = module(tensors(dtype=torch.float32)[0])
    (output * factor).sum().backward()
    return torch.full_like(output, factor)


def remembered(module: nn.Module) -> list[float]:
    assert isinstance(module.linear, RememberingLinear)
    return [float(gradient[0, 0]) for gradient in module.linear.remembered["grad_output"]]


def test_the_last_tensors_oldest_first() -> None:
    layer = Layer()
    assert layer.linear.remembered["grad_output"] == ()
    assert "grad_output" not in layer.linear.remembered
    expected = [step(layer, factor) for factor in (1.0, 2.0, 3.0, 4.0, 5.0)]
    history = layer.linear.remembered
    assert list(history) == ["grad_output"]
    assert repr(history) == "Remembered(grad_output: 3)"
    for kept, gradient in zip(history["grad_output"], expected[-3:], strict=True):
        assert torch.equal(kept, gradient)
        assert not kept.requires_grad


def test_what_was_remembered_has_no_graph() -> None:
    x, weight, bias = tensors()
    linear = RememberingLinear()
    incoming = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(linear(x, weight, bias), x, incoming * 2, create_graph=True)
    (kept,) = linear.remembered["grad_output"]
    assert kept.grad_fn is None
    assert not kept.requires_grad


class Echo(Function):
    """Remembers what comes in, and hands the very same tensor on."""

    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
        self.remember("grad_output", grad_output)
        return grad_output


def test_a_gradient_that_becomes_the_grad_of_a_leaf_is_remembered_as_it_was() -> None:
    echo, leaf = Echo(), torch.zeros(3, requires_grad=True)
    for _ in range(2):
        (echo(leaf) * torch.ones(3)).sum().backward()  # the product's gradient is new, and becomes leaf.grad itself
    leaf.grad.mul_(10)  # type: ignore[union-attr]
    assert all(torch.equal(kept, torch.ones(3)) for kept in echo.remembered["grad_output"])


def test_remembering_changes_no_gradient() -> None:
    results = []
    for linear in (MyLinear(), RememberingLinear()):
        x, weight, bias = tensors()
        for _ in range(4):
            linear(x, weight, bias).square().sum().backward()
        results.append((x.grad, weight.grad, bias.grad))
    assert all(torch.equal(mine, other) for mine, other in zip(*results, strict=True))


def test_how_many_are_kept_may_change_and_names_are_apart() -> None:
    class Keeps(Function):
        def forward(self, ctx: Any, x: Tensor, last: int) -> Tensor:
            self.remember("x", x, last=last)
            self.remember("sum", x.sum(), last=1)
            return x.clone()

    keeps = Keeps()
    for number in range(5):
        keeps(torch.full((1,), float(number)), 4 if number < 4 else 2)
    assert [float(kept) for kept in keeps.remembered["x"]] == [3.0, 4.0]
    assert [float(kept) for kept in keeps.remembered["sum"]] == [4.0]
    assert set(keeps.remembered) == {"x", "sum"}
    keeps.memory.ema("norm", 0.9).add(2.0)
    assert set(keeps.remembered) == {"x", "sum"}
    with pytest.raises(ValueError, match="whole number"):
        keeps(torch.ones(1), 0)


def test_only_tensors_are_remembered() -> None:
    with pytest.raises(FunctionError, match="remember 3 as 'norm', which is not a tensor"):
        MyLinear().remember("norm", 3)  # type: ignore[arg-type]
    with pytest.raises(FunctionError, match="remember None"):
        MyLinear().remember("norm", None)  # type: ignore[arg-type]


def test_in_inference_mode_what_is_remembered_can_train_later() -> None:
    echo = Echo()
    with torch.inference_mode():
        echo.remember("x", torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    (x * echo.remembered["x"][0]).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]


def test_a_model_is_saved_with_its_memory() -> None:
    layer = Layer()
    for factor in (1.0, 2.0):
        step(layer, factor)
    buffer = io.BytesIO()
    torch.save(nn.Sequential(layer).state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert set(saved) == {"0.weight", "0.linear._extra_state"}
    for strict in (True, False):
        fresh = Layer()
        step(fresh, 7.0)
        nn.Sequential(fresh).load_state_dict(saved, strict=strict)
        assert remembered(fresh) == [1.0, 2.0]
        step(fresh, 3.0)
        assert remembered(fresh) == [1.0, 2.0, 3.0]
    step(layer, 4.0)
    assert remembered(layer) == [1.0, 2.0, 4.0]
    assert [float(kept[0, 0]) for kept in saved["0.linear._extra_state"]["grad_output/last"]] == [1.0, 2.0]


def test_an_empty_memory_leaves_no_key_and_misses_none() -> None:
    empty = Layer().state_dict()
    assert set(empty) == {"weight"}
    fresh = Layer()
    assert fresh.load_state_dict(empty).missing_keys == []
    assert remembered(fresh) == []


def test_a_memory_that_a_state_knows_nothing_of_is_not_kept_in_silence() -> None:
    layer, empty = Layer(), Layer().state_dict()
    step(layer, 1.0)
    with pytest.raises(RuntimeError, match=r"Missing key.*linear\._extra_state"):
        layer.load_state_dict(empty)
    assert layer.load_state_dict(empty, strict=False).missing_keys == ["linear._extra_state"]
    assert remembered(layer) == [1.0]


def test_a_state_with_memory_is_not_lost_in_silence() -> None:
    layer = Layer()
    step(layer, 1.0)
    plain = nn.Module()
    plain.weight = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*linear\._extra_state"):
        plain.load_state_dict(layer.state_dict())


def test_a_subclass_may_save_more() -> None:
    class Counts(RememberingLinear):
        def __init__(self) -> None:
            self.count = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"memory": super().get_extra_state(), "count": self.count}

        def set_extra_state(self, state: Any) -> None:
            super().set_extra_state(state["memory"])
            self.count = state["count"]

    counts, other = Counts(), Counts()
    counts.count = 3
    counts(*tensors()).sum().backward()
    other.load_state_dict(counts.state_dict())
    assert other.count == 3
    assert len(other.remembered["grad_output"]) == 1
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_a_copy_has_a_memory_of_its_own(clone: Any) -> None:
    layer = Layer()
    step(layer, 1.0)
    twin = clone(layer)
    assert type(twin.linear) is type(layer.linear)
    step(layer, 2.0)
    step(twin, 3.0)
    assert remembered(layer) == [1.0, 2.0]
    assert remembered(twin) == [1.0, 3.0]


def test_a_whole_module_is_saved_by_torch() -> None:
    layer = Layer()
    step(layer, 1.0)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    step(loaded, 2.0)
    assert remembered(loaded) == [1.0, 2.0]


def test_memory_moves_with_the_model_and_keeps_its_dtype() -> None:
    layer = Layer()
    step(layer, 1.5)
    layer.linear.memory.ema("norm", 0.9).add(torch.tensor(2.0))
    layer.half().double()
    (kept,) = layer.linear.remembered["grad_output"]
    assert kept.dtype is torch.float32
    assert torch.equal(kept, torch.full((4, 2), 1.5))
    assert float(layer.linear.memory.ema("norm", 0.9).value) == pytest.approx(2.0)
    layer.to("meta")
    (kept,) = layer.linear.remembered["grad_output"]
    assert kept.device.type == "meta"
    assert layer.linear.memory.ema("norm", 0.9).value.device.type == "meta"


def test_a_loaded_memory_comes_to_the_device_of_the_parameters() -> None:
    class Owns(RememberingLinear):
        def __init__(self) -> None:
            self.weight = nn.Parameter(tensors()[1].detach())

    owns = Owns()
    owns(tensors()[0]).sum().backward()
    elsewhere = Owns().to("meta")
    elsewhere.set_extra_state(owns.get_extra_state())
    assert elsewhere.remembered["grad_output"][0].device.type == "meta"


@pytest.mark.parametrize("way", ["plain", "nested", "without grad"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing_each_call_is_remembered_once(reentrant: bool, way: str) -> None:
    class Both(MyLinear):
        def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.remember("x", x)
            return super().forward(ctx, x, weight, bias)

        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            self.remember("grad_output", grad_output)
            return super().backward(ctx, grad_output)

    gradients = []
    for keep in (False, True):
        both = Both()
        x, weight, _ = tensors()
        for factor in (1.0, 2.0):

            def part(x: Tensor, factor: float = factor) -> Tensor:
                with torch.set_grad_enabled(torch.is_grad_enabled() and way != "without grad"):
                    inner = both(factor * x, weight)  # noqa: B023
                return (inner * x.sum()).sin()

            def around(x: Tensor, part: Any = part) -> Any:
                return checkpoint(part, x, use_reentrant=reentrant) if way == "nested" else part(x)

            output = checkpoint(around, x, use_reentrant=reentrant) if keep else part(x)
            output.sum().backward()
        gradients.append((x.grad, weight.grad))
        assert [torch.equal(kept, factor * x) for factor, kept in zip((1, 2), both.remembered["x"], strict=True)]
        assert len(both.remembered["grad_output"]) == (0 if way == "without grad" else 2)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_a_function_that_is_called_in_a_backward_pass_remembers() -> None:
    class Inner(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            self.remember("x", x)
            return x * 3

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            return grad_output * 3

    inner = Inner()

    class Outer(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            return x * 3

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            output = inner(grad_output)
            assert isinstance(output, Tensor)
            return output

    for create_graph in (False, True):
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(Outer()(x).sum(), x, create_graph=create_graph)
    assert len(inner.remembered["x"]) == 2


def test_threads_share_one_instance() -> None:
    """Each thread runs passes of its own through it; nothing that it remembers is lost or torn."""

    class Keeps(MyLinear):
        def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor | None]:
            self.remember("grad_output", grad_output, last=1000)
            return super().backward(ctx, grad_output)

    keeps, threads, calls = Keeps(), 4, 50
    wrong: list[Any] = []
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        start.wait()
        for call in range(calls):
            x, weight, _ = tensors()
            factor = float(number * calls + call)
            (keeps(x, weight) * factor).sum().backward()
            if not torch.allclose(weight.grad, factor * x.sum(0).expand(2, 3)):  # type: ignore[arg-type]
                wrong.append(factor)
            keeps.state_dict()

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(patience)
    assert not wrong
    history = keeps.remembered["grad_output"]
    assert all(torch.equal(kept, kept[0, 0].expand(4, 2)) for kept in history)
    assert sorted(float(kept[0, 0]) for kept in history) == list(map(float, range(threads * calls)))
    for number in range(threads):  # in each thread's own order
        own = [float(kept[0, 0]) for kept in history if number * calls <= kept[0, 0] < (number + 1) * calls]
        assert own == sorted(own)


def test_replicas_of_data_parallel_share_the_memory() -> None:
    layer = Layer()
    replica = layer.linear._replicate_for_data_parallel()
    replica(*tensors()).sum().backward()
    assert len(layer.linear.remembered["grad_output"]) == 1


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_that_is_computed_again_finds_the_memory_of_then(reentrant: bool, nested: bool) -> None:
    """Calls and passes that came since have changed it, and what the part computes again must be what it was."""

    class Scales(Function):
        def forward(self, ctx: Any, x: Tensor) -> Tensor:
            factor = 1 + self.memory.get("calls", 0) + 10 * len(self.remembered["x"]) + self.memory.get("passes", 0)
            self.memory.put("calls", self.memory.get("calls", 0) + 1)
            self.remember("x", x)
            ctx.factor = factor * (1 + len(self.remembered["x"]))
            return x * ctx.factor

        def backward(self, ctx: Any, grad_output: Tensor) -> Tensor:
            self.memory.put("passes", self.memory.get("passes", 0) + 0.5)
            return grad_output * ctx.factor

    def run(checkpointed: bool) -> tuple[list[Tensor], dict[str, Any]]:
        scales = Scales()
        x = torch.linspace(0.1, 0.4, 4).requires_grad_()

        def part(x: Tensor) -> Tensor:
            return torch.sin(scales(torch.sin(scales(x))))

        def around(x: Tensor) -> Any:
            return checkpoint(part, x, use_reentrant=reentrant) if nested else part(x)

        found = []
        for _ in range(2):
            outs = [checkpoint(around, x, use_reentrant=reentrant) if checkpointed else part(x) for _ in range(3)]
            for out in outs:
                out.sum().backward(retain_graph=True)
                out.sum().backward()
            found += [*outs, x.grad.clone()]  # type: ignore[union-attr]
        return found, scales.memory.state_dict()

    (found, kept), (expected, state) = run(True), run(False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert kept.keys() == state.keys()
    assert (kept["calls"], kept["passes"]) == (state["calls"], state["passes"]) == (12, 12)
    assert all(torch.equal(one, other) for one, other in zip(kept["x/last"], state["x/last"], strict=True))
