"""Where the first number that is not finite is made: by an operation of the forward, or at a node of a backward pass.

Looking at every result of the forward costs some five microseconds an operation, and waits for the device where that is
not the CPU: it is for programs that are run to be explained. In a pass nodes are looked at, and the operations of the
``backward`` of Python Functions.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.hooks.backward import EngineRun
from retrograd.core.hooks.engine import current_node, uncompiled, without_functions
from retrograd.core.hooks.finite import is_fine, name_bad, read_saved
from retrograd.core.hooks.function_mode import FunctionListener, FunctionMode
from retrograd.core.hooks.node_tap import NodeTap, NodeTaps
from retrograd.core.hooks.nodes import is_python, name_of, number_of, variable_of
from retrograd.core.hooks.reach import PassNodes, read_links
from retrograd.core.hooks.torch_calls import TorchCall, describe_function, is_bare

_MASKING = frozenset(
    {"masked_fill", "where", "full", "full_like", "new_full", "fill", "setitem", "tensor", "as_tensor", "from_numpy"}
)
"""Functions by which a program writes −inf, or inf, on purpose."""


See = Callable[[TorchCall, Tensor | None], Any]
"""Given a call that has made numbers that are not finite, while its frame is on the stack, and an operand that was not
finite when the program brought it (a parameter, an input); returns the birth."""


class ResultWatch:
    """Checks results, and follows those that are not finite.

    Args:
        see: notified of each birth.
        search: what a tensor goes back to that is not finite, and was seen to be made by nobody; None if not known.

    Attributes:
        newest: the birth that the newest scalar goes back to, of those that are not finite.
    """

    def __init__(self, see: See, search: Callable[[Tensor], Any]) -> None:
        self._see = see
        self._search = search
        self.newest: Any = None
        self._births: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        """Identity of a tensor that is not finite → the birth that it goes back to; None where that was on purpose."""

    def forget(self) -> None:
        """Forget everything: the graph is done with."""
        self.newest = None
        self._births.clear()

    def birth_of(self, tensor: Tensor) -> Any:
        """The birth that a tensor goes back to that is not finite; None where nothing is known."""
        known = self._births.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def look(self, call: TorchCall) -> bool:
        """Check a result; return whether something is not finite, and not on purpose."""
        bad = [each for each in call.made if not is_fine(each)] if call.name else []
        return bool(bad) and self._trace(call, bad)

    def _trace(self, call: TorchCall, made: list[Tensor]) -> bool:
        """Find out what these go back to; whether that is a birth."""
        name = call.name
        operands = [] if is_bare(name) else [each for each in call.operands if not is_fine(each)]
        births = [self._births[id(each)] for each in operands if self._knows(each)]
        given = [each for each in operands if not self._knows(each)]
        carried = next((birth for _, birth in births if birth is not None), None)
        if carried is None:
            carried = next(filter(None, (self._search(each) for each in given if each.grad_fn is not None)), None)
        broken = next((each for each in given if each.isnan().any() or isinstance(each, torch.nn.Parameter)), None)
        is_meant = bool(operands) or name.rstrip("_") in _MASKING
        if carried is None and (broken is not None or not is_meant or any(bool(each.isnan().any()) for each in made)):
            carried = self._see(call, broken)
        for each in made:
            if carried is not None and each.ndim == 0:
                self.newest = carried
            self._births[id(each)] = weakref.ref(each), carried
            base = each._base if each._is_view() else None
            if base is not None and (name.endswith("_") or name == "setitem"):
                self._births[id(base)] = weakref.ref(base), carried
        return carried is not None

    def _knows(self, tensor: Tensor) -> bool:
        known = self._births.get(id(tensor))
        return known is not None and known[0]() is tensor


class BackwardLook(FunctionListener):
    """Its mode is on the stack of the thread that runs the node, from the hook before it to that before the next one.

    Args:
        see: notified of what makes it of finite numbers, while its frame is on the stack; what it returns is kept.
        fault: called with an internal error; nothing is looked at after it.
    """

    def __init__(self, see: See, fault: Callable[[Exception], None]) -> None:
        self._see = see
        self._fault = fault
        self._has_failed = False
        self._mode = FunctionMode()
        self._node: Any = None
        self._results: ResultWatch | None = None  # while a node runs: it refers to this object
        self._found: dict[int, Any] = {}

    def next_node(self, node: Any) -> None:
        """This node is about to run; None where the pass is over."""
        if self._node is not None:
            self._mode.leave()
            self._node = self._results = None
        if node is not None and is_python(node) and not self._has_failed:
            self._node = node
            self._results = ResultWatch(self._note, lambda tensor: None)
            self._mode.listeners = (self,)
            self._mode.put_on()

    def found_in(self, node: Any) -> Any:
        """The note of a birth in this node; None if there was none."""
        return self._found.get(id(node))

    @uncompiled
    def after(self, call: TorchCall, seen: tuple[()]) -> None:
        """Check what it returned."""
        if self._results is not None:
            with without_functions():
                self._results.look(call)

    def fail(self, error: Exception) -> None:
        """Check nothing more."""
        self._has_failed = True
        self._fault(error)

    def _note(self, call: TorchCall, broken: Tensor | None) -> Any:
        if broken is None and self._node is not None:
            self._found.setdefault(id(self._node), self._see(call, None))
        return self._found.get(id(self._node), "")


_WATCHED = frozenset(
    {"SqrtBackward0", "RsqrtBackward0", "ReciprocalBackward0", "PowBackward0", "PowBackward1", "StdBackward0",
     "DivBackward0", "LogBackward0", "Log2Backward0", "Log10Backward0", "Log1PBackward0", "AcosBackward0",
     "AsinBackward0", "AtanhBackward0", "AcoshBackward0", "ExpBackward0", "MulBackward0", "NormBackward1",
     "LinalgVectorNormBackward0", "LogsumexpBackward0", "NormBackward0", "NormBackward2", "Atan2Backward0"}
)  # fmt: skip
"""Kinds of nodes of which values are needed to say why: they are held until the pass has ended."""


class BornGradient(NamedTuple):
    """A node that took finite gradients and gave one that is not.

    Attributes:
        node: its class.
        number: its sequence number.
        saved: what it had saved, where that was watched.
        leaf: the leaf at which it was found; None for another node.
        made: what it gave: ``NaN``, ``inf`` or ``−inf``.
        inside: what was kept of the operation of a Python Function that made it; None if it is none.
        source: ``file:line`` of the ``backward`` of that Function; empty for another node.
    """

    node: str
    number: int
    saved: dict[str, Any]
    leaf: Tensor | None
    made: str
    inside: Any = None
    source: str = ""


class GradientBirths:
    """Watches one run of the engine, in the thread that asked for it, for what comes to a leaf.

    Args:
        taps: of the watcher.
        run: the run that is about to begin.
        fault: called with an internal error.
        see: notified of what a Python Function makes in its backward.
    """

    def __init__(self, taps: NodeTaps, run: EngineRun, fault: Callable[[Exception], None], see: See) -> None:
        self._look = BackwardLook(see, fault)
        self._taps = taps
        self._fault = fault
        self._pass = PassNodes(run)
        self._ran: list[Any] = []
        self._saved: dict[int, dict[str, Any]] = {}
        self._found: tuple[Any, Tensor | None, str] | None = None
        self._is_over = self._is_applied = False
        self._tap: NodeTap | None = taps.tap(self._pass, self._see_first, self._see, self._see_leaf)

    def end(self) -> BornGradient | None:
        """The run has ended: what was found, if anything."""
        tap, self._tap = self._tap, None  # it refers to this object
        if tap is not None:
            self._taps.end(tap)
        self._look.next_node(None)
        try:
            return self._blame(*self._found) if self._found is not None and self._is_applied else None
        finally:
            self._pass.release()
            self._ran.clear()
            self._saved.clear()
            self._found = None

    def _see_first(self, incoming: Tensor | None) -> None:
        self._see((incoming,))

    def _see_leaf(self, incoming: tuple[Tensor | None, ...]) -> None:
        """Observe what comes to a leaf; numbers that come to none have been masked."""
        if not self._is_applied:
            self._see(incoming)
            self._is_applied = self._found is not None and not _are_fine(incoming)

    def _see(self, incoming: tuple[Tensor | None, ...]) -> None:
        self._look.next_node(None)
        if self._is_over or self._found is not None:
            return
        try:
            node = current_node()
            if not _are_fine(incoming):
                with without_functions():
                    self._found = node, variable_of(node), next(filter(None, map(name_bad, incoming)))
                return
            self._ran.append(node)
            self._look.next_node(node)
            if type(node).__name__ in _WATCHED:
                self._saved[id(node)] = read_saved(node)
        except Exception as error:
            self._is_over = True
            self._fault(error)

    def _blame(self, node: Any, leaf: Tensor | None, made: str) -> BornGradient | None:
        """The node that ran before this one and gave it what is not finite."""
        reach = self._pass.reach
        place = reach.nodes.index(node)
        givers = {
            id(reach.nodes[giver])
            for giver, edges in enumerate(read_links(reach.links))
            if any(edge is not None and edge[0] == place for edge in edges)
        }
        ran = [each for each in self._ran if id(each) in givers]
        if not ran:
            return None
        blamed = next((each for each in reversed(ran) if id(each) in self._saved), ran[-1])
        saved = self._saved.get(id(blamed), {})
        return BornGradient(
            name_of(blamed), number_of(blamed), saved, leaf, made, self._look.found_in(blamed), source_of(blamed)
        )


def source_of(node: Any) -> str:
    """``file:line`` of the ``backward`` of a Python ``Function``; empty for another node."""
    backward = getattr(getattr(type(node), "_forward_cls", None), "backward", None) if is_python(node) else None
    return describe_function(inspect.unwrap(backward))[1] if callable(backward) else ""


def _are_fine(incoming: tuple[Tensor | None, ...]) -> bool:
    with without_functions():
        return all(each is None or is_fine(each) for each in incoming)
