"""No tool of ours, open or closed, keeps anything of a model alive that the program has dropped."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

import retrograd as rg

BATCH = torch.ones(4, 3)
REWRITTEN = ("*:output", "*:output.grad", "*:input.*", "*:input.*.grad", "0:weight", "*:weight.grad", "*:bias.grad")


class Halve(rg.Function):
    def forward(self, ctx: Any, x: Tensor) -> Tensor:
        self.memory.put("seen", x.detach().sum())
        return x / 2

    def backward(self, ctx: Any, gradient: Tensor) -> Tensor:
        self.memory.mean("norm").add(gradient.norm())
        return gradient / 2


Tool = Callable[[nn.Module, torch.optim.Optimizer], Any]

TOOLS: dict[str, Tool] = {
    "none": lambda model, optimizer: None,
    "record": lambda model, optimizer: rg.record(model, sites="*", tensors="*:output*"),
    "rewrite": lambda model, optimizer: rg.rewrite(model, dict.fromkeys(REWRITTEN, rg.rules.Scale(1.0))),
    "rewrite with a memory": lambda model, optimizer: rg.rewrite(
        model, {"*:output.grad": rg.rules.ZClip(), "*:weight.grad": rg.rules.Grokfast()}
    ),
    "rewrite an optimizer": lambda model, optimizer: rg.rewrite(optimizer, rg.rules.ClipNorm(1.0)),
    "combine passes": lambda model, optimizer: rg.rewrite(optimizer, rg.rules.PCGrad()),
    "keep_saved": lambda model, optimizer: rg.keep_saved(model, rg.saved.Lossless()),
    "keep_saved on disk": lambda model, optimizer: rg.keep_saved(model, rg.saved.Disk()),
    "keep_saved by running again": lambda model, optimizer: rg.keep_saved(model, {"0": rg.saved.Recompute()}),
    "keep_saved by a budget": lambda model, optimizer: rg.keep_saved(model, budget="1GB"),
    "keep_saved in the process": lambda model, optimizer: rg.keep_saved(None, rg.saved.Cpu()),
    "origins": lambda model, optimizer: rg.record_origins(model),
    "trace": lambda model, optimizer: rg.trace(model, norms=True, memory=True),
    "trace without a model": lambda model, optimizer: rg.trace(),
    "trace of events alone": lambda model, optimizer: rg.trace(origins=False),
    "trace of everything": lambda model, optimizer: rg.trace(
        norms=True, memory=True, resumable=True, live=lambda event: None
    ),
    "inventory": lambda model, optimizer: rg.take_inventory(model),
    "inventory of a batch": lambda model, optimizer: rg.take_inventory(model, BATCH),
    "extract": lambda model, optimizer: rg.extract(model, BATCH, "0:output"),
    "check_adjoint": lambda model, optimizer: rg.check_adjoint(model, BATCH),
    "watch_hangs": lambda model, optimizer: rg.watch_hangs(),
}


HOLD_VALUES = {"record"}
"""Tools that keep tensors, as they were asked to."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads the compiler, which leaves frames about
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def keep_output(outputs: list[Tensor], module: nn.Module, args: object, output: Tensor) -> None:
    outputs.append(output)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[WeakIdRef]:
    """What the last step was given and has made, for as long as that lives."""
    for _ in range(3):
        optimizer.zero_grad()
        batch = torch.randn(4, 3)
        outputs: list[Tensor] = []
        keep = functools.partial(keep_output, outputs)
        handles = [module.register_forward_hook(keep) for module in model]
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
    return [WeakIdRef(each) for each in (batch, loss, *outputs)]


@pytest.mark.filterwarnings("ignore::retrograd.RetrogradWarning")
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_the_program_drops_is_freed(tool: str, is_open: bool) -> None:
    """Without the collector, with the handle of the tool still there."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Halve(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    handle = TOOLS[tool](model, optimizer)
    with ExitStack() as ending:
        if hasattr(handle, "__enter__"):
            ending.enter_context(handle)
        if hasattr(handle, "stop"):
            ending.callback(handle.stop)
        made = train(model, optimizer)
        assert tool in HOLD_VALUES or [each() for each in made if each() is not None] == []
        if not is_open:
            ending.close()
        parts: list[Callable[[], object]] = [weakref.ref(each) for each in (*model.modules(), optimizer)]
        parts += [WeakIdRef(each) for each in (*model.parameters(), *model.buffers())]
        parts += [WeakIdRef(each.grad) for each in model.parameters() if each.grad is not None]
        del model, optimizer
        assert [part() for part in parts if part() is not None] == []
