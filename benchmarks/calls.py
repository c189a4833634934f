"""What single calls cost that documents give a number for: microseconds of CPU, or a share of the same by hand.

    python benchmarks/calls.py --rounds 200

In every round each row and what it is compared with run once, one after the other, and a row is the median of the
differences or ratios.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg
from retrograd.rewriting.rules.rule import SiteState
from timing import keep_freed_memory, make_plain_parser, say

LAST = 8
MANY = 200
"""Calls, or operations, in one measurement."""

NODES = 1_000_000


class Row(NamedTuple):
    """What is measured.

    Attributes:
        name: in the table.
        run: does it.
        bare: does the same by hand, or without.
        calls: by how many the difference is divided; 0 where the ratio is asked for.
    """

    name: str
    run: Callable[[], object]
    bare: Callable[[], object]
    calls: int = MANY


# ---- a linear layer with a backward by hand ----


class ByHand(torch.autograd.Function):
    """As torch's documentation writes it."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(given, weight)
        return F.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        given, weight = ctx.saved_tensors
        return grad_output @ weight, grad_output.T @ given, grad_output.sum(0)


class ByHandThatKeeps(ByHand):
    """And a list of the last gradients."""

    last: ClassVar[deque[Tensor]] = deque(maxlen=LAST)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        ByHandThatKeeps.last.append(grad_output.clone())
        return ByHand.backward(ctx, grad_output)


class Linear(rg.Function):
    """The same, gradients by name."""

    def forward(self, ctx: Any, given: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(given, weight)
        return F.linear(given, weight, bias)

    def backward(self, ctx: Any, grad_output: Tensor) -> Any:
        given, weight = ctx.saved_tensors
        return {"given": grad_output @ weight, "weight": grad_output.T @ given, "bias": grad_output.sum(0)}


class LinearThatRemembers(Linear):
    """And its memory of the last gradients."""

    def backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.remember("grad_output", grad_output, last=LAST)
        return super().backward(ctx, grad_output)


def functions() -> Iterator[Row]:
    for n in (16, 128):
        given = [torch.randn(32, n), torch.randn(n, n), torch.randn(n)]
        for each in given:
            each.requires_grad_()
        gradient = torch.ones(32, n)

        def repeat(call: Callable[..., Tensor], given: Any = given, gradient: Tensor = gradient) -> Callable[[], None]:
            def run() -> None:
                for _ in range(MANY):
                    torch.autograd.grad(call(*given), given, gradient)

            return run

        bare = repeat(ByHand.apply)
        yield Row(f"n = {n}: by hand, against itself", repeat(ByHand.apply), bare, 0)
        yield Row(f"n = {n}: rg.Function", repeat(Linear()), bare, 0)
        yield Row(f"n = {n}: by hand, with a list of the last eight", repeat(ByHandThatKeeps.apply), bare, 0)
        yield Row(f"n = {n}: rg.Function that remembers the last eight", repeat(LinearThatRemembers()), bare, 0)


# ---- rules ----


def clip(gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient)
    return gradient * torch.clamp(1e-3 / (norm + 1e-6), max=1.0)


def rules() -> Iterator[Row]:
    gradient = torch.randn(8, 32)

    def repeat(call: Callable[..., object], *more: object) -> Callable[[], None]:
        def run() -> None:
            for _ in range(MANY):
                call(gradient, *more)

        return run

    yield Row(
        "rg.rules.ClipNorm, beyond two lines by hand", repeat(rg.rules.ClipNorm(1e-3), SiteState("")), repeat(clip)
    )
    for rule in (rg.rules.AutoClip(size=128), rg.rules.ZClip(), rg.rules.AdaGC(), rg.rules.SkipStep()):
        yield Row(f"rg.rules.{type(rule).__name__}", repeat(rule, SiteState("")), repeat(lambda given: given))


# ---- nodes and operations ----


def chain(length: int) -> Tensor:
    x = torch.ones(4, requires_grad=True)
    for _ in range(length):
        x = x.sin()
    return x


def hook_nodes(hooked: bool) -> None:
    node = chain(MANY).grad_fn
    while node is not None and node.next_functions:
        if hooked:
            node.register_prehook(print)
        node = node.next_functions[0][0]


def count_nodes(root: Tensor) -> int:
    """The walk that a person would write."""
    queue = [root.grad_fn]
    seen = set(queue)
    for node in queue:
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return len(queue)


def run_operations(watch_writes: bool) -> None:
    with rg.keep_saved(None, rg.saved.AsIs(), watch_writes=watch_writes), torch.no_grad():
        chain(MANY)


def others() -> Iterator[Row]:
    yield Row("a hook on a node, by hand", lambda: hook_nodes(True), lambda: hook_nodes(False))
    yield Row("an operation with watch_writes=True", lambda: run_operations(True), lambda: run_operations(False))


def walks() -> Iterator[Row]:
    root = chain(NODES)
    rg.walk(root)  # which sees to it that a graph so deep can be freed after the loop by hand
    bare = partial(count_nodes, root)
    yield Row("rg.walk, a node", partial(rg.walk, root), lambda: None, NODES)
    yield Row("rg.walk, over a bare loop", partial(rg.walk, root), bare, 0)
    yield Row("rg.walk(saved=False), over the same", partial(rg.walk, root, saved=False), bare, 0)


# ---- the measurement ----


def seconds_of(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def measure(row: Row, rounds: int) -> float:
    """The median of the ratios, or microseconds a call."""
    row.run()
    row.bare()
    gc.collect()
    found = [(seconds_of(row.run), seconds_of(row.bare)) for _ in range(rounds)]
    if row.calls:
        return statistics.median((run - bare) / row.calls for run, bare in found) * 1e6
    return statistics.median(run / bare for run, bare in found)


def main() -> None:
    parser = make_plain_parser(__doc__ or "", [])
    keep_freed_memory()
    parser.set_defaults(rounds=100)
    arguments = parser.parse_args()
    print("| | |\n|---|---:|")
    for rows, rounds in (
        (functions, arguments.rounds),
        (rules, arguments.rounds),
        (others, arguments.rounds),
        (walks, 3),
    ):
        for row in rows():
            if any(text in row.name for text in arguments.only):
                found = measure(row, rounds)
                say(f"| {row.name} | {f'{found:.1f} µs' if row.calls else f'{found:.2f}'} |")


if __name__ == "__main__":
    main()
