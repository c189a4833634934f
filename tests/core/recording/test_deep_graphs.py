"""Graphs of many thousand recorded calls are freed without exhausting the stack, on any thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.core.hooks.nodes import IDENTITIES_LAST

SCRIPT = """
import sys, threading
import torch
from torch import nn
import retrograd as rg
from retrograd.core.hooks import reach
from retrograd.core.recording.recorder import Recorder

calls, stack, guard, kinds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
torch.set_num_threads(1)
if guard == "bare":
    reach.DeepGraphGuard.string = lambda self, node: None
    Recorder.__init__.__kwdefaults__["sources"] = ()  # what measures a graph strings it, too


class Cell(nn.Module):
    "Returns what nobody uses last, so that half of the nodes end in nothing."

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(2))

    def forward(self, h):
        h = h * self.gate
        return h, h * 2


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def forward(self, h):
        for _ in range(calls):
            h, _ = self.cell(h)
        return h


class Stateful(nn.Module):
    "Keeps its state to itself: what it is called with is new each time."

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(20))
        self.h = torch.ones(2)

    def forward(self, x):
        for cell in self.cells:
            self.h, _ = cell(self.h + x)
        return self.h


def main():
    for kind in kinds:
        check(kind)
        print(kind, flush=True)


def check(what):
    if what == "watch":
        model = nn.Linear(2, 2)
        with rg.record(model) as recording:
            h = model(torch.ones(2))
            for _ in range(calls):
                h = rg.watch("h", h * 1.0)
            loss = h.sum()
            loss.backward()
            del h, loss
        assert recording.history["watch/h#1.grad"].count.sum() == 2
    elif what == "root":
        cell = Cell()
        with rg.record(cell) as recording:
            h = torch.ones(2)
            for _ in range(calls):
                h, _ = cell(h)
            loss = h.sum()
            loss.backward()
            del h, loss
        assert recording.history["self#1:output.0.grad"].count.sum() == 2
    elif what == "stateful":
        model = Stateful()
        with rg.record(model) as recording:
            for _ in range(calls // 20):
                h = model(torch.ones(2))
            loss = h.sum()
            del h
            loss.backward()
            del loss, model.h
    elif what == "forward":
        model = Loop()
        with rg.record(model):
            h = model(torch.ones(2))
            del h
            h = model(torch.ones(2))
        del h
    else:
        model = Loop()
        sites = {"outputs": None, "inputs": ["*:input*", "*:output*"]}[what]
        with rg.record(model, sites=sites) as recording:
            loss = model(torch.ones(2, requires_grad=True)).sum()
            loss.backward()
            del loss
        series = recording.history["cell#1:output.0.grad"]
        assert series.count.sum() == 2


if stack:
    threading.stack_size(stack * 1024)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
print("done")
"""

ROOT = Path(__file__).parents[3]


KINDS = ["outputs", "inputs", "watch", "root", "forward", "stateful"]


def run(calls: int, stack: int, kinds: list[str], guard: str = "guarded") -> subprocess.CompletedProcess[str]:
    """Record so many calls in one graph, on a stack of so many KiB (0: the main thread's), and drop it.

    In a new process: where a graph overflows the stack in one, it may not in a fork of another.
    """
    arguments = [sys.executable, "-c", SCRIPT, str(calls), str(stack), guard, *kinds]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "stack"), [(50_000, 0), (4_000, 512)], ids=["main thread", "small thread"])
def test_deep_graphs_are_freed(calls: int, stack: int) -> None:
    kinds = KINDS if stack else ["outputs", "watch"]
    result = run(calls, stack, kinds)
    assert (result.returncode, result.stdout.split()) == (0, [*kinds, "done"]), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not IDENTITIES_LAST, reason="before torch 2.13 what was seen of a graph does not make it crash")
def test_without_the_guard_they_crash() -> None:
    """If this fails, torch frees deep graphs without recursion, and the guard has had its day."""
    assert run(4_000, 512, ["outputs"], "bare").returncode in (-signal.SIGSEGV, -signal.SIGBUS)
