"""Watches what a program does step by step: at which lines nodes are made, what is written to, and every result.

What an error or a NaN needs afterwards has to be noted at every step, for it is not known ahead which one fails. So
this is one mode, and most functions cost it no more than a number and a line: only those that may write have versions
compared around them.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.hooks.calls import span_at
from retrograd.hooks.engine import (
    OUTSIDE,
    current_graph_task,
    is_tracing,
    next_sequence_number,
    uncompiled,
    without_functions,
)
from retrograd.hooks.function_mode import ForwardListener
from retrograd.hooks.nodes import LEAF_NUMBER
from retrograd.hooks.torch_calls import TorchCall, line_at, name_function, user_frame
from retrograd.hooks.writes import WriteNotes

_Seen = tuple[int, list[tuple[Tensor, int]] | None]
"""A function's kind, and the versions of what it may write to."""


class ProgramWatch(ForwardListener):
    """Notes operations of the thread that starts it, but for those within a backward pass.

    Args:
        name_module: the path of a module, None where it has no name.
        fault: told of an error of ours; nothing is noted after it.

    Attributes:
        places: where nodes were made.
        writes: the last writes in place.
        see_result: shown calls that have returned, while the frame is on the stack.
        see_nodes: shown calls that have made nodes, and whether something was written to.
        tables: of hooks on tensors, where one was set since the last step began.
        is_bad: something is not finite, so that also what functions only carry on is shown.
        is_rough: since the step began a node may have been made whose derivative is infinite.
    """

    def __init__(self, name_module: Callable[[nn.Module], str | None], fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._fault = fault
        self._thread = 0
        self._has_failed = False
        self._put_on: Callable[[], None] | None = None
        self.places = NodePlaces(name_module)
        self.writes = WriteNotes()
        self.see_result: Callable[[TorchCall], None] | None = None
        self.see_nodes: Callable[[TorchCall, bool], None] | None = None
        self.tables: list[weakref.ref[Any]] = []
        self.is_bad = self.is_rough = False
        self._last = 0

    def begin(self) -> None:
        """Watch this thread from now on."""
        if not self.is_started and not self._has_failed:
            self._thread = threading.get_ident()
            self.begin_step()
            self.start()

    def end(self) -> None:
        """Watch no more, and forget."""
        self._put_on = self.see_result = self.see_nodes = None
        self.stop()
        self.places.clear()
        self.tables.clear()

    @property
    def is_here(self) -> bool:
        """True if this is the thread that is watched."""
        return self._thread == threading.get_ident()

    def pause(self) -> None:
        """Be out of the way of an optimizer, which reads a thousand attributes."""
        if self._put_on is None:
            self._put_on = self.take_off()

    def resume(self) -> None:
        """Take that back."""
        put_on, self._put_on = self._put_on, None
        if put_on is not None and self.is_started:
            put_on()

    def begin_step(self) -> None:
        """Ask anew whether derivatives may be infinite."""
        self.is_rough = False
        self._last = next_sequence_number()

    @uncompiled
    def before(self, call: TorchCall) -> _Seen | None:
        """Note the versions of what may be written to; None of what makes nothing."""
        kind = kind_of(call.function)
        if kind == IDLE or current_graph_task() != OUTSIDE or is_tracing():
            return None
        return kind, self.writes.before(call) if kind & WRITES or "out" in call.kwargs else None

    @uncompiled
    def after(self, call: TorchCall, seen: _Seen) -> None:
        """Note where its nodes are made, and show what is asked for."""
        kind, versions = seen
        if kind & HOOKS:
            self._note_hook(call.args)
        first, last = call.first, next_sequence_number()
        if last != first:
            if first != self._last or not kind & SMOOTH:  # nodes that no function was seen to make, or rough ones
                self.is_rough = True
            self._last = last
            outer = user_frame(call.frame)
            self.places.note(first, last, outer.f_code, outer.f_lasti, call.function)
        if versions or self.see_nodes is not None or not self._is_dull(kind, call.result):
            with without_functions():
                self._show(call, versions)

    def fail(self, error: Exception) -> None:
        """Watch nothing more."""
        self._has_failed = True
        self._fault(error)

    def _note_hook(self, args: tuple[Any, ...]) -> None:
        with without_functions():
            table = args[0]._backward_hooks if args else None
        if table is not None and len(self.tables) < _MOST:
            self.tables.append(weakref.ref(table))

    def _is_dull(self, kind: int, result: Any) -> bool:
        """Tell whether nobody asks for this result."""
        if self.see_result is None:
            return True
        if not kind & CARRIES or self.is_bad:
            return False
        return type(result) is not Tensor or (result.dtype is not torch.float16 and result.dim() > 0)

    def _show(self, call: TorchCall, versions: list[tuple[Tensor, int]] | None) -> None:
        is_written = any(tensor._version != version for tensor, version in versions or ())
        if versions:
            self.writes.after(call, versions)
        if self.see_nodes is not None and next_sequence_number() > call.first:
            self.see_nodes(call, is_written)
        if self.see_result is not None:
            self.see_result(call)

    @uncompiled
    def module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called."""
        super().module_begins(module, args)
        if current_graph_task() == OUTSIDE and self.is_here:
            self.places.enter(module)

    @uncompiled
    def module_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its call has ended."""
        is_fused = self._fused is not None
        super().module_ends(module, args, output)
        if is_fused and self._fused is None:  # its nodes were not seen, and are smooth
            self._last = next_sequence_number()
        if current_graph_task() == OUTSIDE and self.is_here:
            self.places.leave(module)


_TO_ARRAYS = ("numpy", "__array__", "__dlpack__")

_CARRYING = frozenset(
    {"linear", "bilinear", "matmul", "rmatmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "embedding", "tanh", "sigmoid", "relu",
     "gelu", "silu", "elu", "selu", "leaky_relu", "hardtanh", "hardswish", "logsigmoid", "softplus", "mish", "relu6",
     "dropout", "feature_dropout", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d",
     "adaptive_max_pool2d", "view", "reshape", "flatten", "unflatten", "ravel", "transpose", "permute", "movedim",
     "contiguous", "squeeze", "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "getitem", "chunk",
     "split", "unbind", "select", "narrow", "index_select", "gather", "cat", "concat", "stack", "hstack", "vstack",
     "t", "T", "mT", "flip", "roll", "pad", "abs", "neg", "clone", "detach", "data", "sin", "cos", "relu_"}
)  # fmt: skip


IDLE = 0
"""Nothing of interest: it reads or sets an attribute, or registers something."""
MAKES = 1
"""Makes tensors."""
WRITES = 2
"""May write to what it is given, or hand the memory to NumPy."""
CARRIES = 4
"""Makes what is not finite out of what is not, or by overflow, and in no other way."""
SMOOTH = 8
"""Has a finite derivative where it is finite itself, but for overflow."""
HOOKS = 16
"""Sets a hook on a tensor."""

_SMOOTH = frozenset(
    {"add", "__add__", "radd", "sub", "__sub__", "rsub", "mul", "__mul__", "rmul", "__iadd__", "__isub__", "__imul__",
     "add_", "sub_", "mul_", "square", "exp", "sum", "mean", "max", "min", "amax", "amin", "maximum", "minimum",
     "where", "masked_fill", "masked_fill_", "clamp", "clamp_", "clip", "softmax", "log_softmax", "layer_norm",
     "batch_norm", "group_norm", "instance_norm", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
     "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "avg_pool1d",
     "avg_pool2d", "adaptive_avg_pool1d", "tril", "triu", "einsum", "interpolate", "setitem", "cumsum", "sort", "topk"}
)  # fmt: skip


_MANY = 4096
_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_known: dict[Any, int] = {}


def kind_of(function: Any) -> int:
    """The kind of a torch function: what it can do, as flags."""
    try:
        return _known[function]
    except KeyError:
        if len(_known) > _MANY:
            _known.clear()
        kind = _known[function] = _find_kind(function)
        return kind
    except TypeError:  # somebody's own, that cannot be hashed
        return MAKES | WRITES


def _find_kind(function: Any) -> int:
    name, plain = name_function(function), str(getattr(function, "__name__", ""))
    kind = MAKES if name else IDLE
    if function is Tensor.register_hook:
        return HOOKS
    if plain not in ("__get__", "__set__", "__delete__") and _may_write(function, plain):
        kind |= WRITES
    if name in _CARRYING:
        kind |= CARRIES
    return kind | SMOOTH if name in _CARRYING or name in _SMOOTH else kind


def _may_write(function: Any, name: str) -> bool:
    """Tell by its name whether a function of torch's may write in place; one in Python may call any."""
    if not isinstance(function, _BUILT_IN):
        return True
    is_operator = name.startswith("__") and name.endswith("__")
    if is_operator:
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE) or name in _TO_ARRAYS
    return name.endswith("_") or name in _TO_ARRAYS or name in _WRITING


_NOT_IN_PLACE = ("__int__", "__index__", "__invert__", "__iter__")

_WRITING = frozenset(
    {"batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm", "rrelu",
     "fake_quantize_per_channel_affine", "fused_moving_avg_obs_fake_quant"}
)  # fmt: skip
"""Functions that write to what they are given, though their names do not say so."""


_MOST = 20_000
"""Operations, and calls, that are remembered."""


class NodeOrigin(NamedTuple):
    """Where a node was made.

    Attributes:
        file, line, function: of the program's; empty where that is not known.
        operation: name of the function that was called there.
        module: path of the innermost named module in whose call; empty outside of all.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    operation: str = ""
    module: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


class NodePlaces:
    """Places in the program where the nodes of one thread were made.

    Args:
        name_module: the path of a module, None where it has no name.
    """

    def __init__(self, name_module: Callable[[nn.Module], str | None]) -> None:
        self._name_module = name_module
        self._lines: list[tuple[int, int, CodeType, int, Any]] = []
        """First number of an operation's nodes and the one after the last; code and offset of its caller; itself."""
        self._calls: list[_OpenCall] = []
        self._open: list[_OpenCall] = []

    def note(self, first: int, last: int, code: CodeType, offset: int, operation: Any) -> None:
        """An operation has made nodes."""
        if len(self._lines) >= _MOST:
            del self._lines[: _MOST // 2]
        self._lines.append((first, last, code, offset, operation))

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if len(self._calls) >= _MOST:
            del self._calls[: _MOST // 2]
        call = _OpenCall(module)
        self._calls.append(call)
        self._open.append(call)

    def leave(self, module: nn.Module) -> None:
        """The call of this module has ended, and so have calls in it that were left by Ctrl-C."""
        if any(call.module() is module for call in self._open):
            last = next_sequence_number()
            while self._open:
                call = self._open.pop()
                call.last = last
                if call.module() is module:
                    break

    def clear(self) -> None:
        """Forget everything."""
        self._lines.clear()
        self._calls.clear()
        self._open.clear()

    def find(self, number: int) -> NodeOrigin:
        """Where the node with this number was made, as far as that is known."""
        if number >= LEAF_NUMBER:
            return NodeOrigin()
        module = self._find_module(number)
        index = span_at(self._lines, number)
        if index is None:
            return NodeOrigin(module=module)
        _, _, code, offset, operation = self._lines[index]
        line = line_at(code, offset)
        return NodeOrigin(code.co_filename, line, code.co_name, name_function(operation), module)

    def _find_module(self, number: int) -> str:
        end = bisect_right(self._calls, number, key=_OpenCall.begins_at)
        for call in reversed(self._calls[:end]):
            module = call.module() if call.holds(number) else None
            path = self._name_module(module) if module is not None else None
            if path:
                return path
        return ""


class _OpenCall:
    """A call of a module, and the numbers that nodes made in it can have."""

    __slots__ = ("first", "last", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.first = next_sequence_number()
        self.last: int | None = None

    def begins_at(self) -> int:
        return self.first

    def holds(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number < self.last)
