"""Isolated work: other things that run in the middle of a forward or a pass, unseen by those who watch training.

They run on copies of models and arguments, in float64 if asked, that share nothing with what they are made of; or in a
thread of their own, with the state that torch keeps for each thread by itself.

A backward pass that runs in a thread of its own must find what it would find in the thread that asked for it: the
program's hooks, custom functions and checkpoints that run again all depend on it. Nodes that it makes have the numbers
of its own thread, and are renumbered so that they count as made by the thread that asked.
"""

from __future__ import annotations

import contextvars
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _push_mode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from retrograd.core.errors import RetrogradError
from retrograd.core.hooks.discovery import ModelDiscovery
from retrograd.core.hooks.engine import is_in_backward, next_sequence_number
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.nodes import is_leaf, number_of, variable_of
from retrograd.core.hooks.reach import find_nodes, guard_nodes

_autograd = torch._C._autograd


@contextmanager
def unseen_by_discovery() -> Iterator[None]:
    """Within it, nobody who looks for the program's models is notified of modules that run: they are none of it."""
    table = modules._global_forward_pre_hooks
    taken = {
        number: hook for number, hook in table.items() if isinstance(getattr(hook, "__self__", None), ModelDiscovery)
    }
    for number in taken:
        del table[number]
    try:
        yield
    finally:
        for number, hook in taken.items():
            if hook.__self__.armed:  # type: ignore[attr-defined]  # else it was disarmed meanwhile
                table[number] = hook


@contextmanager
def isolated_autograd() -> Iterator[None]:
    """Within it, this thread has no default hooks on saved tensors, no dispatch modes, and records gradients.

    So a checkpoint that the forward is in neither drops nor computes again what is saved here, and one that chooses
    which results to keep does not count what is run here. The default device stays.
    """
    hooks = _take_hooks()
    try:
        with _disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """``torch.autograd.backward``, but nobody who listens to backward passes is told: it is none of training."""
    _engine_run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _take_hooks() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    taken: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    return taken


T = TypeVar("T")
MakeCopy = Callable[[Tensor], Tensor]

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def widen(tensor: Tensor) -> Tensor:
    """The tensor in float64 or complex128; integers and booleans as they are."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def clone(tensor: Tensor) -> Tensor:
    """A copy outside of every graph."""
    return tensor.detach().clone()


def clone_wide(tensor: Tensor) -> Tensor:
    """A copy in float64, outside of every graph."""
    return widen(tensor.detach()).clone()


class _Copying(TorchFunctionMode):
    """Within it, ``copy.deepcopy`` makes copies of tensors by a function of ours.

    Torch itself refuses to copy what an operation has computed: a cache of keys and values, a weight that a hook
    computes anew before each call, an activation that somebody has put aside on the module.
    """

    def __init__(self, make: MakeCopy) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = made = self._make(tensor)
        return made


def copy_nest(nest: T, make: MakeCopy) -> T:
    """A deep copy of anything that holds tensors; a tensor that occurs twice occurs twice in it.

    Args:
        nest: what to copy.
        make: the copy of one tensor.
    """
    memo: dict[int, Any] = {id(tensor): make(tensor) for _, tensor in flatten(nest, ())}
    with _Copying(make):
        return copy.deepcopy(nest, memo)


def copy_module(module: nn.Module, *, wide: bool) -> nn.Module:
    """A deep copy of a module, with the hooks that its user has set and without ours.

    Args:
        module: the module.
        wide: in float64 and complex128, plain tensors on the module included.
    """
    with _Copying(clone_wide if wide else clone):
        copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        if not parameter.is_leaf:  # those of a scripted module are copied as a part of the graph, its gradients flow on
            parameter.detach_().requires_grad_()
        if wide:
            parameter.data = widen(parameter.data)
    return copied


def copy_or_refuse(model: nn.Module, kind: type[RetrogradError], repair: str) -> nn.Module:
    """A deep copy of a model, to ask it something.

    Args:
        model: the model.
        kind: of the error.
        repair: what to do where it cannot be copied.

    Raises:
        RetrogradError: it cannot; of that kind.
    """
    try:
        return copy_module(model, wide=False)
    except Exception as error:
        raise kind(
            f"The model cannot be copied: {type(error).__name__}: {error}",
            repair=repair,
            reason="everything is done on a copy, so that the model stays as it is.",
        ) from error


_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def strip_hooks(module: nn.Module) -> bool:
    """Take all hooks off a module and the modules in it. Only for copies: they do not come back.

    Returns:
        Whether there were any.
    """
    had_any = False
    for each in module.modules():
        for name in _TABLES:
            table: dict[int, Any] | None = vars(each).get(name)
            if table:
                table.clear()
                had_any = True
    return had_any


class NoTensorHooks(TorchFunctionMode):
    """Within it, ``tensor.register_hook`` does nothing: not for the module's own code either.

    Attributes:
        left_out: whether it was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left_out = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            self.left_out = True
            return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))


# ---- in a thread of its own ----

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
    restores: list[Restore] = []
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        restores.append(_call(_autograd._push_saved_tensors_default_hooks, *hooks))
    if not _autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        why = _autograd._saved_tensors_hooks_get_disabled_error_message()
        restores.append(_call(_autograd._saved_tensors_hooks_disable, why))
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


def run_in_fresh_thread(function: Callable[[], T]) -> T:
    """Call a function outside of the backward pass that this thread may be in, and wait for it.

    Torch tells by the thread which pass something belongs to, and some things go by that: a checkpoint, for one, lets
    each pass have what it recomputed only once. So inside of a pass the function runs in a thread of its own.
    """
    if not is_in_backward():
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
