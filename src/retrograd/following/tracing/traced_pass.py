"""A backward pass that is being traced: its hooks, its log, and the gradients that are on their way when it fails."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrograd.core.errors import GraphError, StepperError
from retrograd.core.hooks.backward import EngineRun
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.hooks.node_tap import NodeGradients, NodeHooks, NodeTap, NodeTaps
from retrograd.core.hooks.nodes import (
    edges_of,
    holds,
    inputs_of,
    is_freed,
    is_leaf,
    is_python,
    name_of,
    number_of,
    root_edges,
    saved_tensors_of,
)
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.norms import norm
from retrograd.core.recording.scalar_watch import measure_memory
from retrograd.following.bundles.bundle import open_bundle
from retrograd.following.bundles.program import describe_error
from retrograd.following.bundles.writer import write_bundle
from retrograd.following.engine.one_node import InputBuffer, check_number
from retrograd.following.engine.replayer import Gradients, run_from
from retrograd.following.graph.node import matches
from retrograd.following.graph.origins import Origins
from retrograd.following.graph.overwritten import explain_overwritten
from retrograd.following.graph.walker import examine
from retrograd.following.tracing.pass_log import FindPlace, Marks, NameLeaf, PassLog
from retrograd.following.tracing.trace import Failure, NodeEvent

INCOMPLETE = "trace a backward pass as asked"
"""The consequence of a fault of ours."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The options of a trace: see :func:`retrograd.trace`."""

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
        """The folder for bundles, made if none was given."""
        return self.folder or Path(tempfile.mkdtemp(prefix="retrograd-bundle-"))


class TracedPass:
    """Watches the nodes that one run of the engine runs, until it is closed.

    Attributes:
        log: what has been seen so far.
        pending: gradients on their way, where the trace is resumable.
    """

    def __init__(
        self,
        run: EngineRun,
        log: PassLog,
        options: TraceOptions,
        name_leaf: NameLeaf,
        find_place: FindPlace,
        taps: NodeTaps,
    ) -> None:
        self.log = log
        self._taps = taps
        self._options = options
        self._name_leaf = name_leaf
        self._find_place = find_place
        self._found = PassNodes(run)
        nodes = self._found.nodes
        meter = choose_meter({each.device for node in nodes for each in inputs_of(node)}) if options.memory else None
        marks = log.make_marks(meter)
        self.pending = Pending(run.roots, run.gradients) if options.resumable else None
        self._examiner: _Examiner | None = None
        self._hooks: NodeHooks | NodeTap
        if options.is_thorough:
            log.learn(self._found.reach, name_leaf)
            self._examiner = _Examiner(nodes, log, options, self.pending, find_place, marks)
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
        """Return which node the pass has died in; None if none had begun."""
        log = self.log
        if not len(log):
            return None
        nodes = self._found.nodes
        node = next(node for node in nodes if id(node) == log.last_node())
        incoming = complete_incoming(node, log.current[0])
        had_run = self._find_whether_it_ran(node, error)
        log.has_ended = bool(had_run)
        failure = describe_failure(error, log.events(self._find_place), len(nodes), incoming)
        if had_run:
            hook_on = self._describe_hook() if failure.source or is_said_of_hook(error) else ""
            reason = "the node that ran last is not what failed" if hook_on else "the node had run"
            return replace(failure, no_bundle=reason, had_run=True, hook_on=hook_on)
        bundle, reason = bundle_node(node, incoming, self._options.make_folder, failure.event)
        if may_be_hook(node, error):
            had_run = False if bundle is not None and _raises_again(bundle, error) else None
            if bundle is not None and had_run is None:
                shutil.rmtree(bundle)
                bundle, reason = None, "run again by itself, the node does not raise that"
        failure = replace(failure, had_run=had_run)
        overwritten = explain_overwritten([node], origins, self._name_leaf)
        return replace(failure, bundle=bundle, no_bundle=reason, overwritten=overwritten)

    def _find_whether_it_ran(self, node: Any, error: Exception) -> bool | None:
        if str(error).startswith(f"Function '{name_of(node)}' returned"):  # anomaly mode looks at what it gave
            return False
        if self._examiner is not None:
            return self._examiner.ended == id(node)
        return find_whether_it_ran(node, error, keeps_graph=self._found.run.keeps_graph)

    def _describe_hook(self) -> str:
        """Describe the gradient whose hooks come next, by the node that takes it; empty where several may."""
        node = find_next(self._found.nodes, self.log.begun())
        if node is None or self._found.run.inputs:  # whose gradients are handed out before a node runs
            return ""
        if is_leaf(node):
            return f"of {self._name_leaf(node.variable) or 'a leaf'}"
        module, _, line = self._find_place(number_of(node), self.log.thread)
        made = f", made at {line}" if line is not None else ""
        return f"that comes to {f'{module}:' if module is not None else ''}{name_of(node)}{made}"

    def close(self) -> None:
        """Let go of the nodes."""
        self.log.current[0] = None
        self._found.release()
        if self._examiner is not None:
            self._examiner.tell(len(self.log) - 1, self.log.end)


class _Examiner:
    """Examines what goes into each node and what comes out."""

    def __init__(
        self,
        nodes: Sequence[Any],
        log: PassLog,
        options: TraceOptions,
        pending: Pending | None,
        find_place: FindPlace,
        marks: Marks,
    ) -> None:
        self._nodes = nodes
        self._log = log
        self._options = options
        self._pending = pending
        self._marks = marks
        self._describe = log.describe_while_running(nodes, find_place)
        self.ended = 0
        """Identity of the node that has run to its end last."""

    def tell(self, place: int, end: int = 0) -> None:
        """Show live that the node at this place in the pass has run: until now, unless its end is known."""
        if self._options.live is not None and place >= 0:
            self._options.live(self._describe.event(place, end))

    @never_raise(INCOMPLETE)
    def before(self, index: int, incoming: NodeGradients) -> None:
        """Record what the node is given."""
        node = self._nodes[index]
        self.tell(len(self._log) - 1)
        (self._marks.leaf if is_leaf(node) else self._marks.several)(incoming)
        if self._pending is not None:
            self._pending.begins(node, () if is_leaf(node) else incoming)
        if self._options.norms:
            self._log.norms[id(node)] = tuple(map(_measure, incoming)), ()
        if self._options.bundle is not None:
            event = self._describe.event(len(self._log) - 1)
            if matches(self._options.bundle, event) and not is_leaf(node):
                bundle, _ = bundle_node(node, incoming, self._options.make_folder, event)
                if bundle is not None:
                    self._log.bundles[id(node)] = str(bundle)

    @never_raise(INCOMPLETE)
    def after(self, index: int, outgoing: NodeGradients) -> None:
        """Record what the node has given."""
        node = self._nodes[index]
        self.ended = id(node)
        if self._pending is not None:
            self._pending.ends(node, outgoing)
        if self._options.norms:
            self._log.norms[id(node)] = self._log.norms[id(node)][0], tuple(map(_measure, outgoing))


@torch.no_grad()
def _measure(gradient: Tensor | None) -> Tensor | None:
    """The norm, still on its device; None where it cannot be taken."""
    if gradient is None:
        return None
    try:
        return norm(gradient.detach())
    except (RuntimeError, NotImplementedError):  # sparse, nested, quantised
        return None


# ---- failure ----

_BEFORE = 5
"""Nodes before it that are told."""

_ENGINE = "_engine_run_backward"

_FUNCTION = "torch/autograd/function.py"
"""Where the engine calls the backward of a Python Function."""

_AGAIN = "Trying to backward through the graph a second time"
_OF_HOOKS = ("hook '", "expected Variable, but hook returned ")
"""How what torch says of the result of a hook begins."""


def is_said_of_hook(error: BaseException) -> bool:
    """Return whether torch has refused what a hook returned."""
    return str(error).startswith(_OF_HOOKS)


def find_whether_it_ran(node: Any, error: BaseException, *, keeps_graph: bool) -> bool | None:
    """Find whether the node that began last had run to its end when a pass failed.

    Torch frees what a node has saved right after the node and its hooks have run, and before the hooks of tensors whose
    gradients it gave. Of a node that saves nothing, or of a graph that is kept, this does not tell.

    Args:
        node: the node.
        error: what the pass raised.
        keeps_graph: the pass frees nothing.

    Returns:
        None where it cannot be told.
    """
    if str(error).startswith(_AGAIN):
        return False
    if is_freed(node):
        return True
    is_whole = not keeps_graph and any(holds(raw) is not None for _, raw in saved_tensors_of(node))
    return None if may_be_hook(node, error) and not is_whole else False


def may_be_hook(node: Any, error: BaseException) -> bool:
    """Return whether an error may be of a hook: of Python code that is not the backward of the node, or said of one."""
    inner = _find_inner_frames(error)
    is_own = is_python(node) and inner and inner[0].filename.endswith(_FUNCTION)
    return (bool(inner) or is_said_of_hook(error)) and not is_own


def find_next(nodes: Sequence[Any], begun: Container[int]) -> Any:
    """Find the node that torch takes next: of those for which all has arrived the one that was made last.

    Args:
        nodes: those of the pass.
        begun: identities of those that have run.

    Returns:
        None where several may come next, as on several devices.
    """
    awaited = {id(following) for node in nodes if id(node) not in begun for following, _ in edges_of(node)}
    ready = [node for node in nodes if id(node) not in begun and id(node) not in awaited]
    latest = max(map(number_of, ready), default=0)
    found = [node for node in ready if number_of(node) == latest]
    if len(found) > 1:  # leaves, which come before all else
        found = [node for node in found if is_leaf(node) and node.variable._backward_hooks]
    devices = {each.device for node in nodes for each in inputs_of(node)}
    return found[0] if len(found) == 1 and len(devices) == 1 else None


def describe_failure(
    error: BaseException, events: Sequence[NodeEvent], count: int, incoming: tuple[Tensor | None, ...]
) -> Failure:
    """Describe a pass that ended in an exception.

    Args:
        error: the exception.
        events: those of the pass; the last one is of the node that began last.
        count: how many nodes the pass would have run.
        incoming: what came in to the last one.
    """
    return Failure(
        error="".join(traceback.format_exception_only(error)).strip(),
        event=events[-1],
        place=(len(events), count),
        incoming=tuple(map(examine, incoming)),
        before=tuple(reversed(events[-1 - _BEFORE : -1])),
        source=find_source(error),
    )


def bundle_node(
    node: Any, incoming: tuple[Tensor | None, ...], make_folder: Callable[[], Path], event: NodeEvent
) -> tuple[Path | None, str]:
    """Write a replay bundle; returns its path, or None and why there is none."""
    if is_leaf(node):
        return None, "a leaf's node only adds to .grad"
    if is_freed(node):
        return None, "a pass has freed what the node had saved; backward(retain_graph=True) keeps it"
    about: dict[str, Any] = {"module": event.module, "call": event.call, "place": event.place}
    if event.line is not None:
        about |= {"file": event.line.file, "line": event.line.line, "function": event.line.function}
    name = "".join(letter if letter.isalnum() or letter in ".#_" else "-" for letter in event.place)
    try:
        return write_bundle(node, incoming, make_folder() / name, about=about), ""
    except (GraphError, OSError) as problem:
        return None, problem.problem if isinstance(problem, GraphError) else str(problem)


def _raises_again(bundle: Path, error: Exception) -> bool:
    """Return whether the node raised the same when it was run again for its bundle."""
    failure = open_bundle(bundle).node.failure
    return failure is not None and failure.error.kind == describe_error(error).kind


def complete_incoming(node: Any, seen: Any) -> tuple[Tensor | None, ...]:
    """Complete the gradients that a node takes; the first alone is seen where the others are of no use."""
    known = seen if isinstance(seen, tuple) else (seen,)
    return known + (None,) * (len(inputs_of(node)) - len(known))


def find_source(error: BaseException) -> str:
    """Find where Python code raised that the engine had called: a hook, or the backward of a Function."""
    inner = _find_inner_frames(error)
    return f"{inner[-1].filename}:{inner[-1].lineno} in {inner[-1].name}" if inner else ""


def _find_inner_frames(error: BaseException) -> Sequence[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    engine = max((index for index, frame in enumerate(frames) if frame.name == _ENGINE), default=len(frames))
    return frames[engine + 1 :]


# ---- meter ----

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]  # as ctypes wants it


def choose_meter(devices: set[torch.device]) -> Callable[[], int]:
    """A function that says how many bytes are in use: on the first device that is not a CPU, else by this process.

    On a CPU it asks glibc, which knows to the byte what is allocated, and takes the longer the more pieces are free
    (2 to 70 µs); elsewhere it is the resident memory, in pages.
    """
    others = sorted((device for device in devices if device.type == "cuda"), key=str)
    if others:
        return lambda: torch.cuda.memory_allocated(others[0])
    return _ask_glibc() or (lambda: int(measure_memory(()) or 0))


def _ask_glibc() -> Callable[[], int] | None:
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another libc, or an old one
        return None
    mallinfo.restype = _Mallinfo

    def read() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return read


# ---- pending ----


class Pending:
    """The gradients that can finish a pass that has failed: ``trace.pending``, where the trace is resumable.

    Attributes:
        node: torch's node that was running last.
        incoming: the gradients that came in to it, after the program's own hooks.
    """

    def __init__(self, roots: Sequence[Any], gradients: Sequence[Any]) -> None:
        self.node: Any = None
        self.incoming: NodeGradients = ()
        self._roots = tuple(roots)  # before torch 2.13 the object of a Python Function does not keep its node
        self._buffers: dict[Any, InputBuffer] = {}
        for (node, slot), gradient in zip(root_edges(list(roots)), gradients, strict=True):
            self._arrive(node, slot, gradient)

    def begins(self, node: Any, incoming: NodeGradients) -> None:
        """A node takes what has arrived for it."""
        self._buffers.pop(node, None)
        self.node, self.incoming = node, incoming

    def ends(self, node: Any, outgoing: NodeGradients) -> None:
        """A node has run."""
        self.node, self.incoming = None, ()
        edges = edges_of(node)
        check_number(node, outgoing, edges)
        for gradient, (following, slot) in zip(outgoing, edges, strict=False):
            if following is not None:
                self._arrive(following, slot, gradient)

    @property
    def waiting(self) -> dict[Any, NodeGradients]:
        """The nodes that something has arrived for, and what; the one that failed is not among them."""
        return {node: tuple(buffer.gradients) for node, buffer in self._buffers.items()}

    def resume(self, incoming: Tensor | Sequence[Tensor | None] | None = None, *, accumulate: bool = True) -> Gradients:
        """Finish the pass with :func:`rg.run_from`, from the node that failed on.

        What ran before is not run again. With ``accumulate`` every ``.grad`` becomes what the whole pass would give.

        Args:
            incoming: gradients for the node that failed, instead of those that came in.
            accumulate: whether to add to the ``.grad`` of the leaves.

        Raises:
            StepperError: no node had begun, or all had ended.
            Exception: whatever a node raises.
        """
        if self.node is None:
            raise StepperError(
                "The pass did not fail inside a node, so there is nowhere to go on from.",
                repair="run it from another node: rg.run_from({node: gradients}).",
            )
        if incoming is None:
            given = self.incoming
        elif isinstance(incoming, Tensor):
            given = (incoming, *self.incoming[1:])
        else:
            given = tuple(incoming)
        return run_from({**self.waiting, self.node: given}, accumulate=accumulate)

    def _arrive(self, node: Any, slot: int, gradient: Tensor | None) -> None:
        if node not in self._buffers:
            self._buffers[node] = InputBuffer(node)
        self._buffers[node].add(slot, gradient)
