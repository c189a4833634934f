"""Watches what a program does step by step: at which lines nodes are made, what is written to, and every result.

What an error or a NaN needs afterwards has to be noted at every step, for it is not known ahead which one fails. So
this is one mode, and most functions cost it no more than a number and a line: only those that may write have versions
compared around them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, Self

import torch
from torch import Tensor, nn

from retrograd.core.hooks.calls import ThreadLog, frame_of_call
from retrograd.core.hooks.engine import is_in_backward, is_tracing, next_sequence_number, uncompiled, without_functions
from retrograd.core.hooks.function_mode import ForwardListener
from retrograd.core.hooks.torch_calls import AnswerCache, TorchCall, name_function, user_frame
from retrograd.core.hooks.writes import WriteNotes

_Seen = tuple[int, list[tuple[Tensor, int]] | None]
"""A function's kind, and the versions of what it may write to."""


class ProgramWatch(ForwardListener):
    """Records operations of the thread that starts it, but for those within a backward pass.

    Args:
        name_module: the path of a module, None where it has no name.
        fault: called with an internal error; nothing is noted after it.

    Attributes:
        log: which operations made nodes, and in which calls of modules; None until it begins.
        writes: the last writes in place.
        see_result: shown calls that have returned, while the frame is on the stack.
        see_nodes: shown calls that have made nodes, and whether something was written to.
        tables: of hooks on tensors, where one was set since the last step began.
        is_bad: something is not finite, so that also what functions only carry on is shown.
        is_rough: since the step began a node may have been made whose derivative is infinite.
    """

    def __init__(self, name_module: Callable[[nn.Module], str | None], fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._names = _GivenPaths(name_module)
        self._fault = fault
        self._thread = 0
        self._has_failed = False
        self._put_on: Callable[[], None] | None = None
        self.log: ThreadLog | None = None
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
            self.log = ThreadLog(_MOST)
            self.begin_step()
            self.start()

    def end(self) -> None:
        """Watch no more, and forget."""
        self._put_on = self.see_result = self.see_nodes = None
        self.stop()
        self.log = None
        self.tables.clear()

    def logs(self, thread: int | None = None) -> Iterator[ThreadLog]:
        """Its log."""
        if self.log is not None:
            yield self.log

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
        """Check again whether derivatives may be infinite."""
        self.is_rough = False
        self._last = next_sequence_number()

    @uncompiled
    def before(self, call: TorchCall) -> _Seen | None:
        """Record the versions of what may be written to; None of what makes nothing."""
        kind = kind_of(call.function)
        if kind == IDLE or is_in_backward() or is_tracing():
            return None
        return kind, self.writes.before(call) if kind & WRITES or "out" in call.kwargs else None

    @uncompiled
    def after(self, call: TorchCall, seen: _Seen) -> None:
        """Record where its nodes are made, and show what is asked for."""
        kind, versions = seen
        if kind & HOOKS:
            self._note_hook(call.args)
        first, last = call.first, next_sequence_number()
        if last != first:
            if first != self._last or not kind & SMOOTH:  # nodes that no function was seen to make, or rough ones
                self.is_rough = True
            self._last = last
            outer, log = user_frame(call.frame), self.log
            if log is not None:
                log.insert(first, last, outer.f_code, outer.f_lasti, call.function, log.top)
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
        """Return whether nobody asks for this result."""
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
        if self.log is not None and not is_in_backward() and self.is_here:
            self.log.open(module, frame_of_call(), self._names, ())

    @uncompiled
    def module_ends(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Its call has ended."""
        is_fused = self._fused is not None
        super().module_ends(module, args, output)
        if is_fused and self._fused is None:  # its nodes were not seen, and are smooth
            self._last = next_sequence_number()
        if self.log is not None and not is_in_backward() and self.is_here:
            self.log.close(id(frame_of_call()))


class _GivenPaths:
    """Names of modules that are the same wherever they are called."""

    def __init__(self, path_of: Callable[[nn.Module], str | None]) -> None:
        self.path_of = path_of

    def tree_of(self, module: nn.Module, *, is_recomputed: bool) -> Self:
        """Itself."""
        return self


_MOST = 20_000
"""Operations, and calls, that are remembered."""

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


_BUILT_IN = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


def kind_of(function: Any) -> int:
    """The kind of a torch function: what it can do, as flags."""
    try:
        return _kinds[function]
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


_kinds = AnswerCache[Any, int](_find_kind)


def _may_write(function: Any, name: str) -> bool:
    """Return whether, by its name, a function of torch's may write in place; one in Python may call any."""
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
