"""State that torch keeps for each thread by itself, carried from one thread into another.

A backward pass that runs in a thread of its own must find what it would find in the thread that asked for it: the
program's hooks, custom functions and checkpoints that run again all depend on it. Nodes that it makes have
the numbers of its own thread, and are renumbered so that they count as made by the thread that asked.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _push_mode
from torch.utils import _python_dispatch

from retrograd.hooks.engine import current_graph_task, next_sequence_number
from retrograd.hooks.nodes import is_leaf, number_of, variable_of
from retrograd.hooks.reach import find_nodes, guard_nodes

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", torch._C._get_privateuse1_backend_name())

Restore = Callable[[], None]


class ThreadState:
    """State of the thread that makes this object.

    That is: grad mode and inference mode, autocast, default saved-tensor hooks, function and dispatch modes (the
    default device among them), current device and streams, and some switches of autograd.
    """

    def __init__(self) -> None:
        self._parts: list[Restore] = [
            *_keep_switches(),
            *_keep_autocast(),
            *_keep_saved_tensor_hooks(),
            *_keep_modes(),
            *_keep_cuda(),
        ]

    def enter(self) -> None:
        """Set all of it in this thread, which must be new and end afterwards: nothing is put back."""
        for restore in self._parts:
            restore()


def _keep_switches() -> list[Restore]:
    switches: list[tuple[Callable[[bool], Any], bool]] = [
        (torch._C._set_grad_enabled, torch.is_grad_enabled()),
        (torch._C._set_fwd_grad_enabled, torch._C._is_fwd_grad_enabled()),
        (torch._C._set_multithreading_enabled, torch._C._is_multithreading_enabled()),
        (torch._C._set_view_replay_enabled, torch._C._is_view_replay_enabled()),
    ]
    restores: list[Restore] = []
    if torch.is_inference_mode_enabled():
        restores.append(torch.inference_mode().__enter__)  # first: it sets grad mode too
    return [*restores, *(_call(put, value) for put, value in switches)]


def _keep_autocast() -> list[Restore]:
    restores = [_call(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())]
    for device in _AUTOCAST_DEVICES:
        with suppress(RuntimeError):  # this torch knows no autocast there
            restores.append(_call(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device)))
            restores.append(_call(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device)))
    return restores


def _keep_saved_tensor_hooks() -> list[Restore]:
    autograd = torch._C._autograd
    restores: list[Restore] = []
    hooks = autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        restores.append(_call(autograd._push_saved_tensors_default_hooks, *hooks))
    if not autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        why = autograd._saved_tensors_hooks_get_disabled_error_message()
        restores.append(_call(autograd._saved_tensors_hooks_disable, why))
    return restores


def _keep_modes() -> list[Restore]:
    functions = [_call(_push_mode, mode) for mode in _get_current_function_mode_stack()]
    dispatch = [
        _call(_python_dispatch._push_mode, mode) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    ]
    return [*functions, *dispatch]


def _keep_cuda() -> list[Restore]:
    if not torch.cuda.is_initialized():
        return []
    streams = [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]
    restores = [_call(torch.cuda.set_stream, stream) for stream in streams]
    return [*restores, _call(torch.cuda.set_device, torch.cuda.current_device())]  # last: a stream sets its device


def _call(function: Callable[..., Any], *values: Any) -> Restore:
    def restore() -> None:
        function(*values)

    return restore


T = TypeVar("T")


def run_in_fresh_thread(function: Callable[[], T]) -> T:
    """Call a function outside of the backward pass that this thread may be in, and wait for it.

    Torch tells by the thread which pass something belongs to, and some things go by that: a checkpoint, for one, lets
    each pass have what it recomputed only once. So inside of a pass the function runs in a thread of its own.
    """
    if current_graph_task() == -1:
        return function()
    state, context = ThreadState(), contextvars.copy_context()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            state.enter()
            results.append(context.run(function))
        except BaseException as error:  # raised where somebody waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="retrograd-aside", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()


_CHUNK = 4096


class Numbering:
    """Lets what a backward pass makes in a thread of its own count as made by the thread that asked for it.

    Each thread numbers the nodes that it makes, from 0 on, and the engine takes larger numbers for newer nodes and runs
    them first: the order of its sums, and so their last bits, depend on them.

    Args:
        nodes: those of the pass.
        others: tensors whose graphs the pass may use, but does not make.
    """

    def __init__(self, nodes: Sequence[Any], others: Iterable[Tensor]) -> None:
        self._offset = next_sequence_number()
        self._leaves = [leaf for node in nodes if (leaf := variable_of(node)) is not None]
        self._old = {*nodes, *_find_made([*others, *self._gradients()])}

    def move(self) -> None:
        """Renumber what the gradients of the leaves were made by; in the thread that asked, when the pass is over."""
        made = [node for node in _find_made(self._gradients()) if node not in self._old and not is_leaf(node)]
        for node in made:
            node._set_sequence_nr(number_of(node) + self._offset)
        guard_nodes(made)
        if made:
            _advance(max(map(number_of, made)) + 1)

    def _gradients(self) -> list[Tensor]:
        return [leaf.grad for leaf in self._leaves if leaf.grad is not None]


def _find_made(tensors: Iterable[Tensor]) -> list[Any]:
    return find_nodes([(tensor.grad_fn, 0) for tensor in tensors if tensor.grad_fn is not None]).nodes


def _advance(number: int) -> None:
    """Let the next node that this thread makes have this number: make nodes until it has."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C.DisableTorchFunction(),
        _python_dispatch._disable_current_modes(),
    ):
        source = torch.zeros((), device="cpu", requires_grad=True)
        while (missing := number - next_sequence_number()) > 0:
            torch._foreach_neg([source] * min(missing, _CHUNK))
