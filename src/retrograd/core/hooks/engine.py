"""The state of torch: its version, what its engine runs, which modes are on, and whether it compiles.

A torch that is older than the oldest that the tests run with is refused when this is imported.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from retrograd.core.errors import TorchVersionError

F = TypeVar("F", bound=Callable[..., object])

OLDEST = (2, 11)
"""The oldest torch that is supported, as in ``pyproject.toml``."""


def parse_version(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 11) of ``"2.11.0a0+git1234"``."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def check_torch(version: str) -> None:
    """Refuse a torch that is too old.

    Raises:
        TorchVersionError: it is.
    """
    if parse_version(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TorchVersionError(
            f"This is torch {version}, and retrograd needs {oldest} or later.",
            repair=f'pip install "torch>={oldest}"',
            reason="older ones do not show what their graphs hold, so much of what is said of a graph would be wrong.",
        )


TORCH = parse_version(torch.__version__)
"""The torch that is imported."""

check_torch(torch.__version__)  # first of all, since what is below may not be there in an old torch

OUTSIDE = -1
"""The number of the running backward pass where none runs."""

current_graph_task = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread, or ``OUTSIDE``."""

current_node = torch._C._current_autograd_node
"""The node that the running backward pass is at; None outside of one."""

is_jit_tracing = torch._C._is_tracing
"""Return whether ``torch.jit.trace`` records what this thread carries out."""

is_compiling = torch.compiler.is_dynamo_compiling
"""True while torch.compile traces the code. The first question of every hook, so that nothing of ours is traced."""

grad_enabled = torch.is_grad_enabled
inference_enabled = torch.is_inference_mode_enabled
next_sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that the next node made in this thread will have."""


dispatch_modes = torch._C._len_torch_dispatch_stack
"""Count the dispatch modes that this thread is in, torch's own included."""


count_function_modes = torch._C._len_torch_function_stack
"""Count the function modes that this thread is in: every use of torch passes through them first."""


without_functions = torch._C.DisableTorchFunction
"""A block in which torch's functions go past modes and subclasses of the program's."""

_mode_of_kind = torch._C._get_dispatch_mode
_FAKE, _FUNCTIONAL, _PROXY = (getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "FUNCTIONAL", "PROXY"))
_AS_EVER = eval_frame._FrameAction.DEFAULT
_SKIP = eval_frame._FrameAction.SKIP


def uncompiled(function: F) -> F:
    """Decorator for what torch calls: torch.compile leaves it, and all that it calls, to the interpreter.

    After a graph break, and during a backward pass that compiled code asks for, every Python function that runs is
    compiled, ours among them. Code that is traced as a part of a graph is not concerned: it asks ``is_compiling``.
    """
    return _leave(function, eval_frame._FrameExecStrategy(_SKIP, _SKIP))


def uncompiled_itself(function: F) -> F:
    """As :func:`uncompiled`, but for functions that call torch's or the user's code, which may be compiled.

    ``warnings.warn(…, stacklevel=n)`` in there does not count the frame, so that the warning is placed where it is
    without us: Python passes over frames of files whose name has both words in it, for its own sake.
    """
    assert isinstance(function, FunctionType)
    function.__code__ = _uncounted(function.__code__)
    room = function.__globals__
    loader = room["__loader__"]
    if not hasattr(loader, "get_source"):  # pytest's own, which loads the packages of its plugins
        loader = SourceFileLoader(room["__name__"], room["__file__"])
    # tracebacks show its lines all the same
    linecache.lazycache(function.__code__.co_filename, {"__name__": room["__name__"], "__loader__": loader})
    return _leave(function, eval_frame._FrameExecStrategy(_SKIP, _AS_EVER))


@cache
def _uncounted(code: CodeType) -> CodeType:
    return code.replace(co_filename=f"{code.co_filename} (importlib, _bootstrap)")


def breaks_graph(function: F) -> F:
    """Decorator for hooks that torch.compile must call as they are, between two graphs: a rule has a memory."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a rule of retrograd acts here, and it has a memory"  # type: ignore[attr-defined]
    return function


def knows_at_once(function: F) -> F:
    """Decorator for functions that torch.compile calls while it traces; what they return becomes a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def may_break_graph() -> bool:
    """While torch.compile traces, tell whether a graph may be broken: not with ``fullgraph=True``."""
    tracing: Any = sys.modules["torch._dynamo.symbolic_convert"]
    now = tracing.InstructionTranslator.current_tx()
    return not (getattr(now, "one_graph", False) or getattr(now, "error_on_graph_break", False))


def break_graph() -> None:
    """Have torch.compile end the graph that it traces here."""
    torch._dynamo.graph_break()


_is_wrapped, _is_batched = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_legacy_batchedtensor


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is seen inside a ``torch.func`` transform, where it has no values of its own.

    Or where ``torch.autograd.grad`` takes batches of gradients, which vectorized jacobians do.
    """
    return _is_wrapped(tensor) or _is_batched(tensor)


def has_transform() -> bool:
    """Return whether this thread is inside a ``torch.func`` transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def without_transforms() -> AbstractContextManager[Any]:
    """What is made meanwhile is a tensor of its own, though this thread may be inside a ``torch.func`` transform."""
    return temporarily_clear_interpreter_stack() if has_transform() else nullcontext()


def _leave(function: F, strategy: eval_frame._FrameExecStrategy) -> F:
    assert isinstance(function, FunctionType)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


@uncompiled
def is_backward_compiled() -> bool:
    """Return whether a backward pass that begins now is compiled as one graph, hooks and all."""
    module = sys.modules.get(_COMPILED_AUTOGRAD)  # not loaded by us: that takes more than a second
    return bool(getattr(module, "compiled_autograd_enabled", False))


@uncompiled
def is_in_compiled_backward() -> bool:
    """Return whether the backward pass that runs now is compiled as one graph; at its end torch calls nobody."""
    module = sys.modules.get(_COMPILED_AUTOGRAD)
    return bool(getattr(module, "in_compiled_autograd_region", False))


_HAS_CUDA = torch.backends.cuda.is_built()


@uncompiled
def is_tracing() -> bool:
    """Whether what runs now only makes a graph (ahead-of-time autograd, export, the capture of a CUDA graph).

    Its tensors have no values yet, and nothing may wait for a device.
    """
    if _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    if not dispatch_modes():  # as nearly always
        return False
    return not (_mode_of_kind(_FAKE) is _mode_of_kind(_FUNCTIONAL) is _mode_of_kind(_PROXY) is None)


def mode_that_traces() -> Any:
    """The mode below autograd that writes what runs into a graph; None if there is none."""
    return _mode_of_kind(_PROXY)


def is_abstract() -> bool:
    """Return whether tensors stand for others: in ``torch.func``, in ``torch.jit.trace``, or while a graph is made."""
    return has_transform() or is_jit_tracing() or is_tracing()


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass. In a forward hook: whether this forward is a recomputation.

    A checkpointed part is computed again then, and it is not a new call.
    """
    return current_graph_task() != OUTSIDE


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback()`` when the backward pass that runs now has ended. Only to be used inside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
