"""Graphs of 100,000 nodes are walked, traced and freed, on any thread, and when a node in their middle is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from retrograd.core.hooks.nodes import IDENTITIES_LAST

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys, threading
import torch
import retrograd as rg
from retrograd.following.graph import walker

stack, jobs = int(sys.argv[1]), [word.split("=") for word in sys.argv[2:]]
torch.set_num_threads(1)


def chain(depth):
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(depth):
        y = y * 1.0
    return x, y


def main():
    for what, depth in jobs:
        make_and_drop(what, int(depth))
        print(what)


def make_and_drop(what, depth):
    if what == "unguarded":
        walker.guard_nodes = lambda nodes: None
    x, y = chain(depth)
    if what in ("walked", "unguarded"):
        graph = rg.walk(y, saved=False)
        assert len(graph) == depth + 1
        del graph
    elif what == "middle kept":
        middle = rg.walk(y, saved=False).live(depth // 2)
        del y
        assert len(rg.walk(middle, saved=False)) == depth - depth // 2 + 1
        del middle
        y = None
    elif what == "traced":
        with rg.trace() as trace:
            y.backward(retain_graph=True)
            y.backward()
        assert len(trace.events) == 2 * (depth + 1)
        assert x.grad.item() == 2
    elif what == "root dropped":
        with rg.trace(origins=False):
            (y * 1.0).backward(retain_graph=True)
    del y


if stack:
    threading.stack_size(stack * 1024)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
"""


def run(stack: int, depths: Mapping[str, int]) -> subprocess.CompletedProcess[str]:
    """Make chains so deep, on a stack of so many KiB (0: the main thread's), and drop each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    arguments = [sys.executable, "-c", SCRIPT, str(stack), *(f"{what}={depth}" for what, depth in depths.items())]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "depths"),
    [
        (0, {"walked": 100_000, "middle kept": 100_000, "traced": 60_000}),
        (512, dict.fromkeys(("walked", "middle kept", "traced", "root dropped"), 20_000)),
    ],
)
def test_deep_graphs_are_freed(stack: int, depths: dict[str, int]) -> None:
    """On the main thread's 8 MiB, 40,000 levels are too many; on 512 KiB, 2,400 are."""
    result = run(stack, depths)
    assert (result.returncode, result.stdout.splitlines()) == (0, list(depths)), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not IDENTITIES_LAST, reason="before torch 2.13 what was seen of a graph does not make it crash")
def test_without_the_guard_they_crash() -> None:
    """If this fails, torch frees deep graphs without recursion, and the guard has had its day."""
    assert run(512, {"unguarded": 50_000}).returncode in (-signal.SIGSEGV, -signal.SIGBUS)
