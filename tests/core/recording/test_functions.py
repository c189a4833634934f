"""Functions that modules call, recorded where a pattern names them: held against plain torch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg


class Block(nn.Module):
    def __init__(self, part: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.fc = nn.Linear(8, 24), nn.Linear(8, 8)
        self.part = part

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.gelu(self.fc((q @ k.mT).softmax(-1) @ v))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.mix, x)


def plainly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def reentrantly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrantly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return checkpoint(function, *args, use_reentrant=False)


class Net(nn.Module):
    def __init__(self, part: Callable[..., Tensor] = plainly) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(part) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(net: nn.Module, steps: int = 2) -> list[Tensor]:
    """Every number that a training has come to."""
    torch.manual_seed(1)
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(steps):
        x = torch.randn(3, 5, 8, requires_grad=True)
        loss = net(x).square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(each.grad.clone() for each in net.parameters())]  # type: ignore[list-item]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *net.parameters()]


@pytest.mark.parametrize("part", [plainly, reentrantly, not_reentrantly])
def test_recording_all_functions_changes_no_bit(part: Callable[..., Tensor]) -> None:
    net = Net(part)
    other = copy.deepcopy(net)
    with rg.record(net, sites=["*", "*/*"]):
        given = train(net)
    assert all(map(torch.equal, given, train(other)))
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("part", [plainly, reentrantly, not_reentrantly])
def test_values_and_gradients_are_those_of_plain_torch(part: Callable[..., Tensor]) -> None:
    net = Net(part).eval()
    x = torch.randn(3, 5, 8, requires_grad=True)
    with rg.record(net, sites="*/softmax", tensors="*/softmax") as recording:
        net(x).sum().backward()
    history = recording.history
    assert history.sites == [
        *("blocks.0/softmax:output", "blocks.0/softmax:output.grad"),
        *("blocks.1/softmax:output", "blocks.1/softmax:output.grad"),
    ]

    block: Any = net.blocks[1]
    h = net.blocks[0](x)
    q, k, v = block.qkv(h).chunk(3, -1)
    weights = (q @ k.mT).softmax(-1)
    weights.retain_grad()
    net.head(h + F.gelu(block.fc(weights @ v))).sum().backward()
    for name, want in (("blocks.1/softmax:output", weights), ("blocks.1/softmax:output.grad", weights.grad)):
        series = history[name]
        (kept,) = series.tensors
        assert kept.tensor is not None
        assert want is not None
        torch.testing.assert_close(kept.tensor, want)
        assert series.count.tolist() == [75]  # once, though it was computed twice


def test_every_operation_is_listed_in_its_order() -> None:
    net = Net()
    with rg.record(net, sites=["*/*:output", "*/chunk:output.?"]) as recording:
        net(torch.randn(3, 5, 8)).sum().backward()
    table = recording.history.table().to_pandas().sort_values("order")
    block = """b.qkv/linear:output b/chunk:output.0 b/chunk:output.1 b/chunk:output.2 b/mT:output b/matmul#1:output
        b/softmax:output b/matmul#2:output b.fc/linear:output b/gelu:output b/add:output"""
    first, second = (block.replace("b/", f"blocks.{i}/").replace("b.", f"blocks.{i}.").split() for i in range(2))
    head = ["head.0/linear:output", "head.1/dropout:output", "head.2/relu:output"]
    assert table.site.tolist() == [*first, *second, *head]


def test_names_choose_functions_and_nothing_else_does() -> None:
    def sites(*patterns: str) -> list[str]:
        net = Net()
        with rg.record(net, sites=[*patterns]) as recording:
            net(torch.randn(3, 5, 8)).sum().backward()
        return recording.history.sites

    assert not [name for name in sites("*", "!*:input*") if "/" in name]
    assert not [name for name in sites("blocks.*:output") if "/" in name]
    assert sites("blocks.0/softmax:output") == ["blocks.0/softmax:output"]
    assert sites("blocks.%/matmul#2:output.grad") == ["blocks.0/matmul#2:output.grad", "blocks.1/matmul#2:output.grad"]
    assert sites("*/softmax", "*/gelu", "!blocks.0*", "!*/gelu:output") == [
        "blocks.1/softmax:output",
        "blocks.1/softmax:output.grad",
        "blocks.1/gelu:output.grad",
    ]
    assert sites("blocks.*:SoftmaxBackward0") == ["blocks.0/softmax:output.grad", "blocks.1/softmax:output.grad"]
    with pytest.raises(rg.RetrogradError, match="before the slash stands a module: blocks"):
        sites("block/softmax")
    with pytest.warns(UserWarning, match=r"'\*/softmin': no site .* Those called are .*softmax"):
        assert sites("*/softmin") == []
    assert "*/relu" in str(rg.plan_recording(Net(), sites="*/relu"))


def test_steps_of_a_schedule_and_forwards_without_grad() -> None:
    net = Net()
    with rg.record(net, sites="*/gelu:output", schedule=2) as recording:
        train(net, 4)
        with torch.no_grad():
            for _ in range(3):
                net.eval()(torch.randn(3, 5, 8))
    series = recording.history["blocks.0/gelu:output"]
    assert series.select(phase="train").steps.tolist() == [0, 2]
    assert series.select(phase="no_grad").steps.tolist() == [4]
    assert series.select(phase="no_grad").count.tolist() == [3 * 3 * 5 * 8]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.mul(2)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x).sin()  # type: ignore[no-any-return,no-untyped-call]


def test_a_python_function_is_one_operation_without_an_inside() -> None:
    odd = Odd()
    with rg.record(odd, sites="*/*") as recording:
        odd(torch.randn(3, requires_grad=True)).sum().backward()
    assert recording.history.sites == ["self/sin:output", "self/sin:output.grad"]


def test_modules_that_have_other_kernels_where_a_mode_is_on() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model = nn.ModuleDict({"attention": attention})
    x, kernels = torch.randn(2, 5, 8), []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kernels.append(str(function))
            return function(*args, **(kwargs or {}))

    model.forward = lambda x: attention(x, x, x)[0].relu()  # type: ignore[assignment,method-assign]
    with torch.no_grad(), Names():
        want = model(x)
    plain = kernels.copy()
    kernels.clear()
    with torch.no_grad(), Names(), rg.record(model, sites="*/relu:output") as recording:
        given = model(x)
    assert torch.equal(given, want)
    assert any("_native_multi_head_attention" in each for each in kernels) == any(
        "_native_multi_head_attention" in each for each in plain
    )
    assert recording.history.sites == ["self/relu:output"]


def test_a_model_is_not_held() -> None:
    net = Net()
    find = weakref.ref(net)
    gc.disable()
    try:
        with rg.record(net, sites="*/*") as recording:
            net(torch.randn(3, 5, 8)).sum().backward()
            del net
            assert find() is None
    finally:
        gc.enable()
    assert "blocks.0/gelu:output.grad" in recording.history.sites


def test_a_run_with_functions_is_read_and_explained(tmp_path: Path) -> None:
    net = Net()
    with rg.record(net, tmp_path / "run", sites=["*", "*/*"]):
        train(net, 3)
    run = rg.open_run(tmp_path / "run")
    assert run.history["blocks.1/softmax:output.grad"].steps.tolist() == [0, 1, 2]
    assert list(run.history.select("*/softmax:output")) == ["blocks.0/softmax:output", "blocks.1/softmax:output"]
    assert [each.kind for each in rg.explain(run)] == []
