"""Records what autograd keeps: walks the graph when a backward pass begins, and follows which node runs when.

No saved-tensor hook is set. Torch goes on to check whether a saved tensor was written to; compiled code, checkpoints
and the program's own hooks see nothing of us.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.hooks.backward import EngineRun, backward_followers
from retrograd.core.hooks.checkpoints import arguments_of, recompute_listeners
from retrograd.core.hooks.engine import current_node, is_transformed, next_sequence_number
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.names import walk_buffers, walk_parameters
from retrograd.core.hooks.node_tap import NodeTap, NodeTaps
from retrograd.core.hooks.nodes import identity_of, name_of, variable_of
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.hooks.storages import (
    KeptByNode,
    ModuleArguments,
    ParameterStorages,
    is_blind,
    is_released,
    read_kept,
)
from retrograd.memory.inventory.notes import (
    HeldBy,
    Maker,
    NodeNotes,
    SlotNotes,
    StorageNumbers,
    TensorDescriber,
    is_output,
)

_now = time.perf_counter_ns

Key = tuple[int, int]
"""Identity and number of a node: both are the same only for one and the same."""


class InventoryWatch:
    """Follows every backward pass between ``start`` and ``stop``.

    Args:
        models: gives the models whose parameters and buffers are there anyway.

    Attributes:
        arguments: what was handed to modules.
        nodes: those that keep tensors, in the order in which they were found.
        clock: for each thread numbers of nodes, and a time at which all smaller ones had been made.
        blind: how many nodes keep what cannot be seen, by kind.
        skipped: passes that were not followed, by reason.
        passes: how many were.
        begin, end: when it listened.
    """

    def __init__(self, models: Callable[[], Iterable[tuple[str, nn.Module]]]) -> None:
        self._models = models
        self.arguments = ModuleArguments()
        self._storages = StorageNumbers()
        self._taps = NodeTaps()
        self._lock = threading.RLock()
        self._running: dict[EngineRun, _FollowedPass] = {}
        self._known: dict[Key, NodeNotes] = {}
        self._holders: dict[int, tuple[SlotNotes, NodeNotes, TensorDescriber]] = {}
        """Identity of a checkpoint's holder → what it stands for."""
        self._frames: dict[int, tuple[Callable[[], Any], int]] = {}
        """Identity of a checkpoint → the checkpoint while it lives, and its number."""
        self._checkpoints = itertools.count(1)
        self.nodes: list[NodeNotes] = []
        self.clock: list[tuple[int, int, int]] = []
        self.blind: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.passes = 0
        self.begin = self.end = 0

    def start(self) -> None:
        """Begin to listen."""
        self.begin = _now()
        backward_followers.add(self)
        self.arguments.start()
        recompute_listeners.add(self)

    def stop(self) -> None:
        """Listen no more."""
        recompute_listeners.remove(self)
        self.arguments.stop()
        backward_followers.remove(self)
        self.end = _now()
        self._holders.clear()
        self._frames.clear()

    @never_raise("complete the inventory")
    def run_begins(self, run: EngineRun) -> None:
        """A pass begins: what the graph keeps is all there now."""
        with self._lock:
            if run.is_batched:
                self.skipped["under vmap"] += 1
                return
            self.passes += 1
            self._running[run] = self._follow(run)

    @never_raise("complete the inventory")
    def run_ends(self, run: EngineRun, error: BaseException | None) -> None:
        """A pass has ended."""
        with self._lock:
            watched = self._running.pop(run, None)
            if watched is not None:
                self._finish(watched, failed=error is not None)

    @never_raise("complete the inventory")
    def recomputed(self, holder: object, tensor: Tensor) -> None:
        """A checkpoint has recomputed what this holder stands for."""
        slot, facts, describer = self._holders.get(id(holder), (None, None, None))
        if slot is None or facts is None or describer is None or slot.tensor is not None or is_transformed(tensor):
            return
        with torch.no_grad():
            described = describer.describe(tensor)
        if described.maker is None and described.kind == "intermediate" and is_output(slot.slot):
            described = described._replace(maker=Maker(facts.name, facts.number))
        slot.tensor, slot.packed = described, _now()

    def _follow(self, run: EngineRun) -> _FollowedPass:
        found = PassNodes(run)
        self._note_time()
        try:
            with torch.no_grad():
                self._read(found.reach.nodes)
        except BaseException:
            found.release()
            raise
        return _FollowedPass(found, self._taps)

    def _read(self, nodes: list[Any]) -> None:
        parameters = _find_parameters(self._models())
        inner: list[Any] = []
        for node in nodes:
            leaf = variable_of(node)
            if leaf is None:
                inner.append(node)
            elif isinstance(leaf, nn.Parameter) or not self.arguments.has(leaf):
                parameters.add("parameter", "", leaf)
        describer = TensorDescriber(self._storages, parameters, self.arguments)
        for node in inner:
            key = identity_of(node)
            known = self._known.get(key)
            if known is not None and known.released is None:
                continue
            if is_blind(node):
                self.blind[name_of(node)] += 1
            facts = NodeNotes(name_of(node), key[1], _now(), threading.get_ident(), [])
            for kept in read_kept(node):
                self._read_slot(facts, kept, node, describer)
            if facts.slots:
                self._known[key] = facts
                self.nodes.append(facts)

    def _read_slot(self, facts: NodeNotes, kept: KeptByNode, node: Any, describer: TensorDescriber) -> None:
        tensor, frame = kept.tensor, kept.checkpoint
        if tensor is not None and is_transformed(tensor):
            return
        number = self._read_checkpoint(facts, frame, describer) if frame is not None else 0
        described = describer.describe(tensor, node, kept.slot) if tensor is not None else None
        slot = SlotNotes(kept.slot, _holder_of(kept), described, frame=number)
        facts.slots.append(slot)
        if frame is not None:
            self._holders[id(kept.packed)] = slot, facts, describer

    def _read_checkpoint(self, facts: NodeNotes, frame: Any, describer: TensorDescriber) -> int:
        """The number of a checkpoint, whose arguments are noted with the first of its nodes."""
        known = self._frames.get(id(frame))
        if known is not None and known[0]() is frame:
            return known[1]
        number = next(self._checkpoints)
        self._frames[id(frame)] = weakref.ref(frame), number
        for place, argument in enumerate(arguments_of(frame)):
            given = describer.describe(argument)
            facts.slots.append(SlotNotes(f"checkpoint[{place}]", "argument", given, frame=number))
        return number

    def _finish(self, watched: _FollowedPass, *, failed: bool) -> None:
        self._note_time()
        end = _now()
        runs = watched.end()
        self.clock += watched.clock
        for key, begin in runs.items():
            facts = self._known.get(key)
            if facts is not None:
                facts.runs.append(begin)
        if not watched.found.run.keeps_graph or failed:
            for node in watched.found.nodes:
                self._note_release(node, runs, end, is_sure=not failed)
        watched.found.release()

    def _note_release(self, node: Any, runs: dict[Key, int], end: int, *, is_sure: bool) -> None:
        """The engine frees what a node kept when it has run; a node without a gradient it frees unseen."""
        key = identity_of(node)
        facts = self._known.get(key)
        if facts is None or facts.released is not None:
            return
        if (key in runs and is_sure) or is_released(node):
            if key not in runs:
                facts.runs.append(end)
            facts.released = len(facts.runs) - 1

    def _note_time(self) -> None:
        self.clock.append((threading.get_ident(), next_sequence_number(), _now()))


def _find_parameters(models: Iterable[tuple[str, nn.Module]]) -> ParameterStorages:
    """The memory of all parameters and buffers of some models, as it is now."""
    named, found = list(models), ParameterStorages()
    for name, parameter in walk_parameters(named):
        found.add("parameter", name, parameter)
    for name, buffer in walk_buffers(named):
        found.add("buffer", name, buffer)
    return found


def _holder_of(kept: KeptByNode) -> HeldBy:
    if kept.is_attribute:
        return "attribute"
    if kept.checkpoint is not None:
        return "checkpoint"
    return "hooks" if kept.packed is not None else "saved"


class _FollowedPass:
    """A pass that is being followed: each node is noted just before it runs."""

    def __init__(self, found: PassNodes, taps: NodeTaps) -> None:
        self.found = found
        self.clock: list[tuple[int, int, int]] = []
        self._taps = taps
        self._marks: list[tuple[int, int, int, Any]] = []
        marks = self._marks

        def see(_: Any) -> None:
            marks.append((threading.get_ident(), next_sequence_number(), _now(), current_node()))

        self._tap: NodeTap = taps.tap(found, see, see)

    def end(self) -> dict[Key, int]:
        """Take the hooks away; returns when each node began to run."""
        self._taps.end(self._tap)
        marks = [mark for mark in self._marks if mark[3] is not None]
        self.clock = [(thread, number, when) for thread, number, when, _ in marks]
        self._marks.clear()
        return {identity_of(node): begin for _, _, begin, node in marks}
