"""Taps on functions: every call of a torch function within a call of a named module, with what it returns.

A function has no module of its own: it is called by one, the innermost around it that has a name. A function mode
shows the calls; it is on while a named module runs, in the thread that runs it, and nowhere else. What torch does in
C++ (the inside of ``F.multi_head_attention_forward``, recurrent layers), what a Python Function does in its forward,
and compiled code do not pass through it.

A part of a forward that a checkpoint computes again may have no module around it then. So each call is remembered by
the line that made it, and found again in the order in which such lines ran the first time.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from retrograd.core.hooks.calls import MODULE_CALLS, CallStack, frame_of_call
from retrograd.core.hooks.checkpoints import CallsOfParts, is_computed_again, is_reentrant, part_computed_again
from retrograd.core.hooks.compiled import compiled_call_listeners
from retrograd.core.hooks.engine import grad_enabled, is_compiling, is_in_backward, is_jit_tracing, uncompiled
from retrograd.core.hooks.function_mode import FunctionListener, FunctionMode, is_fused, lowest_place
from retrograd.core.hooks.functions import begins_function
from retrograd.core.hooks.module import ModuleHooks
from retrograd.core.hooks.names import ModelNames
from retrograd.core.hooks.nodes import name_of
from retrograd.core.hooks.torch_calls import AnswerCache, TorchCall, is_machinery
from retrograd.core.sites.pattern import UNKNOWN_NODE
from retrograd.core.sites.selection import Selection

Entry = TypeVar("Entry")


IN_CODE = "Inside of compiled code functions cannot be seen: compile other parts, or leave that one eager."


@dataclass(eq=False, slots=True)
class _Switch:
    """A call of a module for which the mode was put on, or taken off; what takes that back may be called twice."""

    frame: int
    around: Any
    leave: Callable[[], None]


class _Here(threading.local):
    def __init__(self) -> None:
        self.switches = CallStack[_Switch]()
        self.put_back: Callable[[], None] | None = None
        self.undo_pass: list[Callable[[], None] | None] = []


class FunctionTap(FunctionListener, Generic[Entry]):
    """Shows calls of functions until it is removed. A subclass says what there is at which site, and is shown that.

    Args:
        models: names the modules.
        selections: what is asked for; each may mean functions.

    Attributes:
        paths: ``MODULE/FUNCTION`` of what was called; ``*/FUNCTION`` where no pattern has that name.
        has_compiled: compiled code has run, of which nothing is shown.
    """

    height: ClassVar[int]
    """Of its mode: 1 for who rewrites, the later above the earlier, 2 for who reads what they have made of it."""

    def __init__(self, models: ModelNames, selections: Sequence[Selection]) -> None:
        self._models = models
        self._selections = selections
        self._is_asked_for = AnswerCache[str, bool](self._ask)
        self._asks_for_nodes = any(each.asks_for_nodes for each in selections)
        self._mode = FunctionMode(height=self.height)
        self._hooks: ModuleHooks | None = None
        self._here = _Here()
        self._entries: dict[tuple[str, str, str], Entry | None] = {}
        self._parts: dict[Hashable, CallsOfParts[Entry]] = {}
        self.paths: dict[str, None] = {}
        self.has_compiled = False

    @staticmethod
    def are_named(selections: Sequence[Selection]) -> bool:
        """Return whether functions are asked for at all."""
        return any(each.names_functions for each in selections)

    def attach(self) -> None:
        """Begin to listen."""
        self._hooks = ModuleHooks(self._module_begins, self._module_ends)
        compiled_call_listeners.add(self)

    def remove(self) -> None:
        """Listen no more, maybe in the middle of a forward."""
        compiled_call_listeners.remove(self)
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
            self._mode.leave()
            self._here.switches = CallStack[_Switch]()

    # ---- what a subclass does ---------------------------------------------------------------------------------

    def is_wanted(self, module: nn.Module) -> bool:
        """Return whether functions are to be shown in a call of this module, which no named one has called."""
        return True

    def make_entry(self, module: nn.Module, path: str, node: str) -> Entry | None:
        """What there is at the site of a function, with this path and kind of node; None for nothing."""
        raise NotImplementedError

    def take(self, call: TorchCall) -> Any:
        """Take what is needed of a call before it is made."""
        return ()

    def show(self, entry: Entry, call: TorchCall, taken: Any) -> None:
        """Receive a call that has returned; what is put in the place of its result is what the caller gets."""
        raise NotImplementedError

    def explain(self, pattern: object) -> str:
        """Say which functions were called that a pattern may have meant, and what could not be seen."""
        text = str(pattern).partition(":")[0]
        near = difflib.get_close_matches(text, self.paths, n=5, cutoff=0.3) or list(self.paths)[:5]
        seen = f"Those called are {', '.join(near)}." if near else "None was seen."
        return f"{seen} {IN_CODE}" if self.has_compiled else seen

    # ---- the mode ---------------------------------------------------------------------------------------------

    @uncompiled
    def _module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_compiling():
            return
        switches, frame = self._here.switches, frame_of_call()
        switches.settle(frame)
        is_named = self._models.path_of(module) is not None
        if is_fused(module, args):
            undo = self._mode.take_off()
        elif is_named and switches.top is None and (is_in_backward() or self.is_wanted(module)):
            undo = self._put_on()
        else:
            return
        if undo is not None:
            switches.top = _Switch(id(frame), switches.top, leave=undo)

    @uncompiled
    def _module_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling() and self._here.switches.top is not None:
            self._here.switches.pop(id(frame_of_call()))

    def _put_on(self) -> Callable[[], None] | None:
        self._mode.listeners = (self,)
        return self._mode.put_on(lowest_place(self.height))

    def pass_begins(self) -> None:
        """A backward pass begins in this thread: it may compute parts again in which functions were shown."""
        is_needed = any(part.is_any for part in self._parts.values())
        self._here.undo_pass.append(self._put_on() if is_needed else None)

    def pass_ends(self) -> None:
        """It has ended."""
        undo = self._here.undo_pass.pop() if self._here.undo_pass else None
        if undo is not None:
            undo()

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins: be out of its way."""
        put_back = self._mode.take_off()
        if self._hooks is not None:
            owner = getattr(function, "__self__", None)
            is_named = isinstance(owner, nn.Module) and self._models.path_of(owner) is not None
            self.has_compiled |= put_back is not None or is_named
            self._hooks.pause()
            self._here.put_back = put_back or _nothing

    @uncompiled
    def compiled_call_ends(self) -> None:
        """Compiled code has ended."""
        put_back, self._here.put_back = self._here.put_back, None
        if put_back is not None:
            if self._hooks is not None:
                self._hooks.resume()
            put_back()

    # ---- what it is shown -------------------------------------------------------------------------------------

    @uncompiled
    def before(self, call: TorchCall) -> Any:
        """A function is about to be called; None if it is none of the program's that makes tensors."""
        if self._hooks is None or not self._is_asked_for[call.name] or is_jit_tracing():
            return None
        return None if is_machinery[call.frame.f_code.co_filename] else self.take(call)

    @uncompiled
    def after(self, call: TorchCall, taken: Any) -> None:
        """It has returned."""
        made = call.made if call.result is not None else ()
        if not made:
            return
        frame = call.frame
        key = call.name, id(frame.f_code), frame.f_lasti
        if is_in_backward():
            parts = self._parts.get(key)
            part = part_computed_again() if parts is not None else None
            entry = parts.find_next(part) if parts is not None and parts.knows(part) else None
            if entry is not None:
                self.show(entry, call, taken)
            return
        module = self._find_module(frame)
        if module is None:
            return
        entry = self._find_entry(module, call.name, self._find_node(made[0]) if self._asks_for_nodes else "")
        if entry is not None:
            if key not in self._parts:
                self._parts[key] = CallsOfParts()
            self._parts[key].add(entry)
            self.show(entry, call, taken)

    def _find_node(self, tensor: Tensor) -> str:
        if not grad_enabled():
            return UNKNOWN_NODE if is_computed_again() else ""
        node = tensor.grad_fn if tensor.requires_grad else None
        return "" if node is None else name_of(node)

    def _ask(self, name: str) -> bool:
        is_asked_for = bool(name) and any(each.may_mean(name) for each in self._selections)
        if name and not is_asked_for:
            self.paths[f"*/{name}"] = None
        return is_asked_for

    def _find_entry(self, module: nn.Module, name: str, node: str) -> Entry | None:
        key = self._models.path_of(module) or "", name, node
        if key not in self._entries:
            path = f"{key[0]}/{name}"
            self.paths[path] = None
            self._entries[key] = self.make_entry(module, path, node)
        return self._entries[key]

    def _find_module(self, frame: FrameType | None) -> nn.Module | None:
        """The innermost module with a name around a frame; None inside of a Python Function, which is one operation."""
        is_graded = grad_enabled()
        while frame is not None:
            code = frame.f_code
            if code in MODULE_CALLS:
                module: Any = frame.f_locals[code.co_varnames[0]]
                if self._models.path_of(module) is not None:
                    return module  # type: ignore[no-any-return]
            elif not is_graded and is_reentrant(code):
                is_graded = True
            elif not is_graded and begins_function(code):
                return None
            frame = frame.f_back
        return None


def _nothing() -> None:
    """There is nothing to put back."""
