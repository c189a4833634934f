"""``rg.take_inventory``: of one step of a model, or around any block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor, nn

from retrograd.core.amounts import count_of
from retrograd.core.errors import SavedTensorError
from retrograd.core.hooks.calls import Logs
from retrograd.core.hooks.forward_log import ForwardLog, OperationClock
from retrograd.core.hooks.nodes import root_edges, variable_of
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.core.trials import check_loss, check_loss_function, everything_restored
from retrograd.following.graph.module_names import find_names
from retrograd.following.graph.origins import LIMIT, Origins
from retrograd.memory.inventory.inventory import Inventory
from retrograd.memory.inventory.rows import make_table
from retrograd.memory.inventory.watch import InventoryWatch

Model = nn.Module | Mapping[str, nn.Module]
Loss = Callable[[Any], Tensor]


class _NoBatch:
    """No batch was given; None may be one."""


_NO_BATCH = _NoBatch()


@overload
def take_inventory(model: nn.Module, batch: Any, loss: Loss | None = None, *, timed: bool = False) -> Inventory: ...


@overload
def take_inventory(model: Model | None = None, *, timed: bool = False) -> InventoryRecorder: ...


def take_inventory(
    model: Model | None = None, batch: Any = _NO_BATCH, loss: Loss | None = None, *, timed: bool = False
) -> Inventory | InventoryRecorder:
    """Find every tensor that autograd keeps between forward and backward.

    ::

        inventory = rg.take_inventory(model, batch, loss_of_output)

        with rg.take_inventory(model) as inventory:     # around any block; of the process's every backward pass
            loss = criterion(model(x), y)
            loss.backward()
        print(inventory)

    Nothing is changed. No saved-tensor hook is set: the graph is read when a backward pass begins, so torch goes on to
    check whether a saved tensor was written to. With a batch, the gradients are computed and thrown away: ``.grad``,
    buffers and random states are afterwards what they were. It is meant for a step or a few: each saved tensor
    takes a kilobyte of notes.

    Args:
        model: names modules, parameters and buffers. Left out, those that are called in the block.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        loss: from what the model returns to a tensor with one element; by default all its floating-point tensors are
            added up, and of complex ones the real parts.
        timed: measure how long operations take, on a GPU how long they run there. It costs microseconds an operation.

    Returns:
        The inventory; without a batch what is to be entered, which gives an inventory that is filled when it is left.

    Raises:
        SavedTensorError: a batch without a model; a loss that is not a function; or what it returns, or the model, is
            nothing to start a backward pass from.
        TraceError: ``model`` is not a module.
    """
    recorder = InventoryRecorder(model, timed=timed)
    if isinstance(batch, _NoBatch):
        if loss is not None:
            raise SavedTensorError("A loss was given, and no batch.", repair="rg.take_inventory(model, batch, loss)")
        return recorder
    if not isinstance(model, nn.Module):
        raise SavedTensorError(
            "A batch was given, and not one model to call with it.", repair="rg.take_inventory(model, batch)"
        )
    if loss is not None:
        check_loss_function(loss)
    with everything_restored(model), recorder as inventory:
        recorder.note_input(batch)
        _run_step(_without_reducer(model), batch, loss)
    return inventory


class InventoryRecorder:
    """An inventory that is being taken. Entering it gives the :class:`Inventory`, and leaving it fills that."""

    def __init__(self, model: Model | None, *, timed: bool) -> None:
        self._clock = OperationClock() if timed else None
        names = find_names(model)
        listeners = () if self._clock is None else (self._clock,)
        origins = self._origins = Origins(ForwardLog(names, Logs(LIMIT), *listeners), names)
        self._inventory = Inventory()
        self._watch = InventoryWatch(lambda: origins.models)
        self._thread = 0
        self._stack = ExitStack()

    def __enter__(self) -> Inventory:
        if self._thread:
            raise SavedTensorError(
                "This inventory is not reusable.", repair="call rg.take_inventory() once for each block."
            )
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            stack.enter_context(self._origins)
            for part in (self._clock, self._watch):
                if part is not None:
                    stack.callback(part.stop)
                    part.start()
            self._stack = stack.pop_all()
        return self._inventory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._clock is not None:
            self._clock.read_device()
        watch, origins = self._watch, self._origins
        modules: dict[str, float] = {}
        for span in origins.spans:
            if not span.recompute:
                modules[span.module] = modules.get(span.module, 0.0) + (span.end - span.begin) / 1e9
        table = make_table(watch, origins, self._clock, self._thread)
        self._inventory._fill(table, watch.passes, modules, tuple(_describe_omissions(watch)))

    def note_input(self, value: Any) -> None:
        """Record that these tensors are inputs of the model."""
        self._watch.arguments.note(value)

    def at_next_call(self, callback: Callable[[], None]) -> None:
        """Call this once, before the next module is called: there it may be left, and not while ``backward()`` runs."""
        self._watch.arguments.at_next_call = callback


def _describe_omissions(watch: InventoryWatch) -> Iterator[str]:
    for name, count in watch.blind.items():
        yield f"{count:,} {name}: torch does not show what these nodes keep, so it is not in this inventory."
    for reason, count in watch.skipped.items():
        passes = count_of(count, "backward pass", "backward passes")
        yield f"{passes} {reason} {'was' if count == 1 else 'were'} not followed."
    absent = sum(slot.tensor is None for node in watch.nodes for slot in node.slots)
    if absent:
        yield (
            f"{absent:,} saved tensors were packed by hooks into something without tensors (a checkpoint that was "
            "never run again, a file): they count for nothing here."
        )


def _run_step(model: nn.Module, batch: Any, loss: Loss | None) -> None:
    with torch.enable_grad():
        output = _call(model, batch)
        value: Any = loss(output) if loss is not None else _add_up(output)
    check_loss(value)
    torch.autograd.grad(value, _find_leaves(value), allow_unused=True)


def _without_reducer(model: nn.Module) -> nn.Module:
    """DDP waits for gradients that are accumulated, and here none are."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _add_up(output: Any) -> Tensor | None:
    total: Tensor | None = None
    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            summed = tensor.sum().real if tensor.is_complex() else tensor.sum()
            total = summed if total is None else total + summed
    return total


def _find_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _find_tensors(each)
    elif isinstance(output, list | tuple):
        for each in output:
            yield from _find_tensors(each)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _find_tensors(getattr(output, field.name))


def _find_leaves(value: Tensor) -> list[Tensor]:
    reach = find_nodes(root_edges(value))
    leaves = [leaf for node in reach.nodes if (leaf := variable_of(node)) is not None]
    guard_nodes(reach.nodes, reach.links)
    return leaves
