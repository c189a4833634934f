"""The flow of parameters into tensors, and its cuts from the graph, as seen by a function mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.core.hooks.calls import Logs
from retrograd.core.hooks.checkpoints import GradSwitch, find_cut_checkpoint
from retrograd.core.hooks.engine import grad_enabled, inference_enabled, uncompiled
from retrograd.core.hooks.function_mode import FunctionListener
from retrograd.core.hooks.nodes import root_edges, variable_of
from retrograd.core.hooks.reach import find_nodes
from retrograd.core.hooks.torch_calls import VALUES, TorchCall, called_name, is_bare, user_line

How = Literal["detached", "no_grad", "inference_mode", "left torch", "copied", "no derivative"]

_TORCH = Path(torch.__file__).parent
_FUNCTIONS = str(_TORCH / "autograd" / "function.py")
_OPTIMIZERS = str(_TORCH / "optim")

_DETACHING = frozenset({"detach", "detach_", "data", "__deepcopy__", "detach_copy"})
_COPYING = frozenset({"tensor", "as_tensor", "new_tensor", "asarray", "scalar_tensor"})
_UNRELATED = frozenset(
    {
        "grad", "_grad", "grad_fn", "backward", "requires_grad_", "register_hook", "retain_grad", "__repr__",
        "__format__", "__len__", "dim", "size", "stride",
        "numel", "is_floating_point", "_make_subclass",
    }
)  # fmt: skip
"""Functions whose result is not made of the values of their operands."""


@dataclass(frozen=True, slots=True)
class Cut:
    """An operation whose operand had a graph and whose result has none.

    Attributes:
        function: its name.
        how: why the result has none.
        line: ``file:line`` that called it.
        module: path of the module in whose call; None outside of all.
        sources: the parameters that the operand is made of, a bit for each.
        switched: ``file:line`` that had switched gradients off, where that was seen.
    """

    function: str
    how: How
    line: str
    module: str | None
    sources: int
    switched: str = ""


class ParameterUse(NamedTuple):
    """An operation that took a parameter itself."""

    function: str
    line: str
    module: str | None
    has_gradients: bool
    checkpoint: str = ""
    """Line of the reentrant checkpoint that ran it, where no pass comes to that."""


class _Flow(NamedTuple):
    sources: int = 0
    """The parameters to which a graph leads, a bit for each."""
    cuts: int = 0
    """The cuts that it was made behind, a bit for each."""


_NONE = _Flow()


class FlowNotes(FunctionListener):
    """Records what becomes of some tensors. It holds them alone, and no graph.

    Args:
        parameters: the tensors, in the order of their bits.
        logs: know which calls of modules run.

    Attributes:
        cuts: where what is made of them was cut off, in order.
        uses: of each of them the operations that took it, in order; those of an optimizer are left out.
        cleared: identity of a gradient, or of the tensor whose ``.grad`` was set, → the last line that cleared it.
        frozen: place of a tensor → the line that set ``requires_grad`` to False.
    """

    def __init__(self, parameters: Sequence[Tensor], logs: Logs) -> None:
        self._logs = logs
        self.parameters = list(parameters)
        self.cuts: list[Cut] = []
        self.uses: list[list[ParameterUse]] = [[] for _ in parameters]
        self.cleared: dict[int, str] = {}
        self.frozen: dict[int, str] = {}
        self.left = 0
        """Cuts behind which something left torch, a bit for each."""
        self._places = WeakTensorKeyDictionary()
        for place, parameter in enumerate(self.parameters):
            self._places[parameter] = place
        self._flows = WeakTensorKeyDictionary()
        self._switched = ""
        self._grad = GradSwitch()

    @uncompiled
    def after(self, call: TorchCall, seen: tuple[()]) -> None:
        """Record what its result is made of, or what it has switched."""
        name, given = called_name(call.function), (*call.args, *call.kwargs.values())
        if name == "_set_grad_enabled":
            self._switched = "" if given[0] else call.line
            self._grad.switched(bool(given[0]), call.frame)
        elif name in ("__set__ grad", "zero_", "_foreach_zero_"):
            if name != "__set__ grad" or given[1] is None:
                self.cleared |= dict.fromkeys(map(id, call.operands), call.line)
        elif name in ("requires_grad_", "__set__ requires_grad") and any(each is False for each in given):
            self._note_freezing(given[0], call)
        elif name not in _UNRELATED and not _takes_shape_alone(name) and not name.startswith("__set__"):
            operands = call.operands
            if operands and (grad_enabled() or not _is_in(_OPTIMIZERS, "step", call.frame)):
                self._follow(name, operands, call)

    def cuts_behind(self, tensor: Tensor) -> list[Cut]:
        """The cuts that a tensor was made behind."""
        return self._list(self._flow_of(tensor).cuts)

    @property
    def leaving(self) -> list[Cut]:
        """The cuts by which, or behind which, values became numbers and arrays, or were copied from such."""
        behind = self._list(self.left)
        return [cut for cut in self.cuts if cut.how in ("left torch", "copied") or cut in behind]

    def _list(self, bits: int) -> list[Cut]:
        return [cut for place, cut in enumerate(self.cuts) if bits >> place & 1]

    def _follow(self, name: str, operands: list[Tensor], call: TorchCall) -> None:
        sources = cuts = 0
        for operand in operands:
            flow = self._flow_of(operand)
            sources, cuts = sources | flow.sources, cuts | flow.cuts
            place = self._places.get(operand)
            if place is not None:
                self.uses[place].append(self._describe_use(name, operand, call))
        results = call.made
        is_cut = sources and (name in VALUES or any(not each.requires_grad for each in results))
        if name in VALUES:
            self.left |= cuts
        bit = 0
        if is_cut and not _is_in(_FUNCTIONS, "apply", call.frame):
            bit = 1 << len(self.cuts)
            self.cuts.append(self._describe_cut(name, sources, call))
        if sources or cuts:
            for each in results:
                kept = (sources, cuts) if each.requires_grad else (0, cuts | bit)
                self._flows[each] = _Flow(*kept)

    def _describe_use(self, name: str, parameter: Tensor, call: TorchCall) -> ParameterUse:
        is_on, caller = grad_enabled(), None
        if not is_on and parameter.requires_grad and self._grad.is_on:
            caller = find_cut_checkpoint(call.frame)
        line = "" if caller is None else user_line(caller)
        return ParameterUse(name, call.line, self._logs.running_path(), is_on, line)

    def _describe_cut(self, name: str, sources: int, call: TorchCall) -> Cut:
        how = _explain_cut(name, call.made)
        switched = self._switched if how == "no_grad" else ""
        return Cut(name, how, call.line, self._logs.running_path(), sources, switched)

    def _flow_of(self, tensor: Tensor) -> _Flow:
        place = self._places.get(tensor)
        if place is not None:
            return _Flow(1 << place if tensor.requires_grad else 0)
        known: _Flow = self._flows.get(tensor, _NONE)
        if tensor.requires_grad and not known.sources:  # made where the mode does not see: walk
            known = self._flows[tensor] = _Flow(self._walk(tensor), known.cuts)
        return known if tensor.requires_grad else _Flow(0, known.cuts)

    def _walk(self, tensor: Tensor) -> int:
        found = 0
        for node in find_nodes(root_edges(tensor)).nodes if tensor.grad_fn is not None else ():
            leaf = variable_of(node)
            place = None if leaf is None else self._places.get(leaf)
            found |= 0 if place is None else 1 << place
        return found

    def _note_freezing(self, tensor: Any, call: TorchCall) -> None:
        place = self._places.get(tensor) if isinstance(tensor, Tensor) else None
        if place is not None:
            self.frozen[place] = call.line


def _explain_cut(name: str, results: list[Tensor]) -> How:
    if name in _DETACHING:
        return "detached"
    if name in VALUES:
        return "left torch"
    if name in _COPYING:
        return "copied"
    if any(not (each.is_floating_point() or each.is_complex()) for each in results):
        return "no derivative"
    if inference_enabled():
        return "inference_mode"
    return "no derivative" if grad_enabled() else "no_grad"


def _takes_shape_alone(name: str) -> bool:
    return is_bare(name) and name != "new_tensor"


def _is_in(file: str, function: str, frame: FrameType | None) -> bool:
    """Return whether this runs in a function of one of torch's files, for code of the user's own lies in between."""
    for _ in range(_FAR):
        if frame is None:
            return False
        if frame.f_code.co_name == function and frame.f_code.co_filename.startswith(file):
            return True
        frame = frame.f_back
    return False


_FAR = 50
"""Frames that are looked at, outwards."""
