"""One backward pass that is being traced: its hooks, and its log."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.graph.node import matches
from retrograd.graph.origins import Origins
from retrograd.graph.overwritten import explain_overwritten
from retrograd.hooks.backward import EngineRun
from retrograd.hooks.faults import never_raise
from retrograd.hooks.node_tap import Gradients, NodeHooks, NodeTap, NodeTaps
from retrograd.hooks.nodes import inputs_of, is_leaf
from retrograd.hooks.reach import PassNodes
from retrograd.norms import norm
from retrograd.tracing.failure import bundle_node, complete_incoming, describe_failure
from retrograd.tracing.meter import choose_meter
from retrograd.tracing.pass_log import FindPlace, Marks, NameLeaf, PassLog
from retrograd.tracing.pending import Pending
from retrograd.tracing.trace import Failure, NodeEvent

INCOMPLETE = "a backward pass was not traced as asked"
"""What follows from a fault of ours."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a trace is to hold, and do: see :func:`retrograd.trace`."""

    norms: bool = False
    memory: bool = False
    live: Callable[[NodeEvent], None] | None = None
    passes: Container[int] | None = None
    bundle: str | None = None
    folder: Path | None = None
    resumable: bool = False
    limit: int = 1_000_000

    @property
    def is_thorough(self) -> bool:
        """Whether something is to be done at each node, and not only noted."""
        return self.norms or self.resumable or self.live is not None or self.bundle is not None

    def make_folder(self) -> Path:
        """Where bundles are written."""
        return self.folder or Path(tempfile.mkdtemp(prefix="retrograd-"))


class WatchedPass:
    """Watches the nodes that one run of the engine runs, until it is closed.

    Attributes:
        log: what has been seen so far.
        pending: gradients on their way, where the trace is resumable.
    """

    def __init__(
        self, run: EngineRun, log: PassLog, wishes: Wishes, name_leaf: NameLeaf, find_place: FindPlace, taps: NodeTaps
    ) -> None:
        self.log = log
        self._taps = taps
        self._wishes = wishes
        self._name_leaf = name_leaf
        self._find_place = find_place
        self._found = PassNodes(run)
        nodes = self._found.nodes
        meter = choose_meter({each.device for node in nodes for each in inputs_of(node)}) if wishes.memory else None
        marks = log.make_marks(meter)
        self.pending = Pending(run.roots, run.gradients) if wishes.resumable else None
        self._examiner: _Examiner | None = None
        self._hooks: NodeHooks | NodeTap
        if wishes.is_thorough:
            log.learn(self._found.reach, name_leaf)
            self._examiner = _Examiner(nodes, log, wishes, self.pending, find_place, marks)
            self._hooks = NodeHooks(nodes, self._examiner)
        else:
            self._hooks = taps.tap(self._found, *marks)

    def end(self, *, failed: bool) -> None:
        """The pass has ended: take the hooks away, and ask the nodes for the last time."""
        self.log.close(failed=failed)
        if isinstance(self._hooks, NodeTap):
            self._taps.end(self._hooks)
        else:
            self._hooks.remove()
        self.log.learn(self._found.reach, self._name_leaf)

    def explain(self, error: Exception, origins: Origins | None) -> Failure | None:
        """Say which node the pass has died in; None if none had begun."""
        log = self.log
        if not len(log):
            return None
        nodes = self._found.nodes
        node = next(node for node in nodes if id(node) == log.last_node())
        incoming = complete_incoming(node, log.current[0])
        failure = describe_failure(error, log.events(self._find_place), len(nodes), incoming)
        bundle, reason = bundle_node(node, incoming, self._wishes.make_folder, failure.event)
        overwritten = explain_overwritten([node], origins, self._name_leaf)
        return replace(failure, bundle=bundle, no_bundle=reason, overwritten=overwritten)

    def close(self) -> None:
        """Let go of the nodes."""
        self.log.current[0] = None
        self._found.release()
        if self._examiner is not None:
            self._examiner.tell(len(self.log) - 1, self.log.end)


class _Examiner:
    """Looks at what goes into each node and what comes out."""

    def __init__(
        self,
        nodes: Sequence[Any],
        log: PassLog,
        wishes: Wishes,
        pending: Pending | None,
        find_place: FindPlace,
        marks: Marks,
    ) -> None:
        self._nodes = nodes
        self._log = log
        self._wishes = wishes
        self._pending = pending
        self._marks = marks
        self._describe = log.describe_while_running(nodes, find_place)

    def tell(self, place: int, end: int = 0) -> None:
        """Say live that the node at this place in the pass has run: until now, unless its end is known."""
        if self._wishes.live is not None and place >= 0:
            self._wishes.live(self._describe.event(place, end))

    @never_raise(INCOMPLETE)
    def before(self, index: int, incoming: Gradients) -> None:
        """A node is about to run."""
        node = self._nodes[index]
        self.tell(len(self._log) - 1)
        (self._marks.leaf if is_leaf(node) else self._marks.several)(incoming)
        if self._pending is not None:
            self._pending.begins(node, () if is_leaf(node) else incoming)
        if self._wishes.norms:
            self._log.norms[id(node)] = tuple(map(_measure, incoming)), ()
        if self._wishes.bundle is not None:
            event = self._describe.event(len(self._log) - 1)
            if matches(self._wishes.bundle, event) and not is_leaf(node):
                bundle, _ = bundle_node(node, incoming, self._wishes.make_folder, event)
                if bundle is not None:
                    self._log.bundles[id(node)] = str(bundle)

    @never_raise(INCOMPLETE)
    def after(self, index: int, outgoing: Gradients) -> None:
        """It has run."""
        node = self._nodes[index]
        if self._pending is not None:
            self._pending.ends(node, outgoing)
        if self._wishes.norms:
            self._log.norms[id(node)] = self._log.norms[id(node)][0], tuple(map(_measure, outgoing))


@torch.no_grad()
def _measure(gradient: Tensor | None) -> Tensor | None:
    """The norm, still on its device; None where there is none to be had."""
    if gradient is None:
        return None
    try:
        return norm(gradient.detach())
    except (RuntimeError, NotImplementedError):  # sparse, nested, quantised
        return None
