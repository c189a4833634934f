"""Every torch function that a thread calls for a while, as plain text: who called it, with what, and what came of it.

It costs some ten microseconds a call, so it is on for a few steps only. Nothing is held but texts and weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from retrograd.core.history.facts import CARRIED, MADE_BEFORE, Operation
from retrograd.core.hooks.calls import MODULE_CALLS
from retrograd.core.hooks.checkpoints import SWITCH_GRAD, GradSwitch, find_cut_checkpoint
from retrograd.core.hooks.engine import (
    grad_enabled,
    inference_enabled,
    is_in_backward,
    is_jit_tracing,
    is_tracing,
    next_sequence_number,
    uncompiled,
    without_functions,
)
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.functions import begins_function
from retrograd.core.hooks.nodes import edges_of, is_python, name_of, number_of
from retrograd.core.hooks.reach import DeepGraphGuard
from retrograd.core.hooks.torch_calls import (
    VALUES,
    TorchCall,
    describe_arguments,
    describe_frame,
    describe_tensor,
    is_bare,
    is_inner,
    is_ours,
    is_statement,
    user_line,
)


class _Taken(NamedTuple):
    """What an operation takes, as it is before it."""

    tensors: list[Tensor]
    operands: tuple[int, ...]
    described: tuple[str, ...]
    requires_grad: bool


class OperationNotes(ForwardListener):
    """Records operations of the thread that starts it, but for those within a backward pass.

    Args:
        name_module: the path of a module, None where it has no name.
        limit: operations that are noted at most.
        fault: called with an internal error; nothing is noted after it.
        see: shown each, with its number and the call.

    Attributes:
        noted: the operations, in order.
        spans: for each of them the number of the first node that was made meanwhile, and the one after the last,
            counted from the first that was made.
        dropped: numbers of those the result of which is thrown away by the statement that called them.
        is_cut: there were more than the limit.
    """

    def __init__(
        self,
        name_module: Callable[[nn.Module], str | None],
        limit: int,
        fault: Callable[[Exception], None],
        see: Sequence[Callable[[int, Operation, TorchCall], None]] = (),
    ) -> None:
        super().__init__()
        self._see = see
        self._name_module = name_module
        self._limit = limit
        self._fault = fault
        self._guard = DeepGraphGuard()
        self._is_forward = False
        self.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self.noted: list[Operation] = []
        self.spans: list[tuple[int, int]] = []
        self.dropped: list[int] = []
        self.is_cut = False
        self._first = next_sequence_number()
        self._grad = GradSwitch()
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._numbers: dict[int, int] = {}
        """Number of a node → of the operation whose result it belongs to."""
        self._applied: dict[int, tuple[str, str]] = {}
        """Number of an operation in the forward of a Python Function → line and module of the Function's call."""

    def begin(self) -> None:
        """Start recording."""
        self.clear()
        self.start()

    def forward_begins(self) -> None:
        """A model is called: nodes may be held, to guard its graph."""
        self._is_forward = True

    def forward_ends(self) -> None:
        """The call of a model is over: hold no nodes."""
        self._is_forward = False
        self._guard.part()

    def end(self) -> None:
        """Stop recording, and forget."""
        self.stop()
        self.forward_ends()
        self.clear()

    @uncompiled
    def before(self, call: TorchCall) -> _Taken | None:
        """Record what an operation takes; None of what is none, or is ours."""
        if call.function is SWITCH_GRAD and call.args:
            self._grad.switched(call.args[0], call.frame)
        if not call.name or is_ours[call.frame.f_code.co_filename] or not self._is_noting():
            return None
        with without_functions():
            tensors = call.operands
            return _Taken(
                tensors,
                tuple(map(self._find, tensors)),
                tuple(map(describe_tensor, tensors)),
                any(each.requires_grad for each in tensors),
            )

    @uncompiled
    def after(self, call: TorchCall, taken: _Taken) -> None:
        """Record it, unless it has made no tensor."""
        with without_functions():
            self._note(call, taken)
            self._span(call.first, next_sequence_number())

    def fail(self, error: Exception) -> None:
        """Record nothing more."""
        self._limit = 0
        self._fault(error)

    def _span(self, first: int, last: int) -> None:
        if len(self.spans) < len(self.noted):
            self.spans.append((first - self._first, last - self._first))

    def find(self, tensor: Tensor) -> int:
        """The number of the operation that made a tensor; one that was not seen when it was called is noted now."""
        try:
            with without_functions():
                return self._find(tensor)
        except Exception as error:
            self.fail(error)
            return MADE_BEFORE

    def number_of(self, tensor: Tensor) -> int:
        """The number of the operation that made a tensor, or wrote to it last; −1 for none of those noted."""
        known = self._made.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else MADE_BEFORE

    def made_by(self, number: int) -> Operation | None:
        """The operation whose result the node with this number belongs to."""
        place = self._numbers.get(number)
        return None if place is None else self.noted[place]

    def _is_noting(self) -> bool:
        if len(self.noted) >= self._limit:
            self.is_cut = True
            return False
        return self.is_started and not is_tracing() and not is_jit_tracing() and not is_in_backward()

    def _note(self, call: TorchCall, taken: _Taken) -> None:
        name, made = call.name, call.made
        first = taken.tensors[0] if taken.tensors else None
        if not made and name not in VALUES:
            return
        number = len(self.noted)
        mode = "" if grad_enabled() else "inference" if inference_enabled() else "no_grad"
        line, module, applied = self._locate(call.frame, is_whole=bool(mode))
        checkpoint = ""
        if applied is not None:
            if taken.requires_grad and self._grad.is_on and (caller := find_cut_checkpoint(call.frame)) is not None:
                checkpoint = user_line(caller)
            mode, module = "function", module or applied[1]
            self._applied[number] = applied
        requires_grad = any(each.requires_grad for each in made)
        cuts = taken.requires_grad and not requires_grad and mode != "function" and not is_bare(name)
        is_written = name == "setitem" or (name.endswith("_") and bool(made) and made[0] is first)
        node = self._name_node(made, number, is_written=is_written) if requires_grad else ""
        makes = tuple(map(describe_tensor, made))
        arguments = describe_arguments(name, call.args, call.kwargs)
        self.noted.append(
            Operation(
                name, line, module, node, taken.operands, taken.described, makes, arguments, cuts, mode, checkpoint
            )
        )
        self._remember(made, number, is_written=is_written)
        if made and not is_written and made[0] is not first and _is_dropped(call.frame):
            self.dropped.append(number)
        if made:
            for see in self._see:
                see(number, self.noted[-1], call)
        if not self._is_forward:
            self._guard.part()

    def _name_node(self, made: list[Tensor], number: int, *, is_written: bool) -> str:
        """The class of the node of what was made; that of a view that was written into is not asked for.

        Torch would make it then, and number it otherwise than without us.
        """
        for tensor in made:
            if is_written and tensor._is_view():
                return "CopySlices"
            node = tensor.grad_fn if tensor.requires_grad else None
            if node is not None:
                self._guard.saw(node)
                self._numbers[number_of(node)] = number
                return name_of(node)
        return ""

    def _remember(self, made: list[Tensor], number: int, *, is_written: bool) -> None:
        for tensor in made:
            self._made[id(tensor)] = weakref.ref(tensor), number
            if is_written and tensor._is_view() and tensor._base is not None:
                self._made[id(tensor._base)] = weakref.ref(tensor._base), number

    def _find(self, tensor: Tensor) -> int:
        number = self.number_of(tensor)
        if (number >= 0 and self.noted[number].node) or not tensor.requires_grad:
            return number
        if tensor._is_view() and not grad_enabled():  # what the node of a view is may be found out only when asked
            return number
        node = tensor.grad_fn
        if node is None:
            return number
        self._guard.saw(node)
        made_by = self._numbers.get(number_of(node), MADE_BEFORE)
        if made_by != MADE_BEFORE:
            return made_by
        return self._note_unseen(node, tensor, number) if number_of(node) >= self._first else CARRIED

    def _note_unseen(self, node: Any, tensor: Tensor, inner: int) -> int:
        """Record what made a tensor without passing through here: a Python Function, or compiled code."""
        line, module = self._applied.get(inner, ("", ""))
        kind = name_of(node)
        name = kind.removesuffix("Backward") if is_python(node) else kind
        before = [each for each, _ in edges_of(node) if each is not None]
        for each in before:
            self._guard.saw(each)
        operands = tuple(self._numbers.get(number_of(each), MADE_BEFORE) for each in before)
        number = self._numbers[number_of(node)] = len(self.noted)
        makes = (describe_tensor(tensor),)
        self.noted.append(Operation(name, line, module, kind, operands, (), makes, "", cuts=False, mode=""))
        self._made[id(tensor)] = weakref.ref(tensor), number
        self._span(number_of(node), number_of(node) + 1)
        return number

    def _locate(self, frame: FrameType | None, *, is_whole: bool) -> tuple[str, str, tuple[str, str] | None]:
        """Line and module of an operation; of a Python Function's own, those of the Function's call too.

        Args:
            frame: of the caller.
            is_whole: it may be in the forward of a Python Function, so look through the whole stack.
        """
        line = module = inner = None
        while frame is not None:
            code = frame.f_code
            if line is None and not is_inner[code.co_filename]:
                line = describe_frame(frame)
            if module is None and code in MODULE_CALLS:
                module = self._name_module(frame.f_locals[code.co_varnames[0]])
            if is_whole and inner is None and begins_function(code):
                inner, line, module = (line or "", module or ""), None, None
            if line is not None and module is not None and not is_whole:
                break
            frame = frame.f_back
        found = line or "", module or ""
        return (*found, None) if inner is None else (*inner, found)


def _is_dropped(frame: FrameType | None) -> bool:
    """Return whether a statement calls a function, or a module that is this function alone, and takes no result."""
    calls = 0
    while frame is not None and is_inner[frame.f_code.co_filename]:
        calls += frame.f_code in MODULE_CALLS
        frame = frame.f_back
    return frame is not None and calls <= 1 and is_statement(frame)
