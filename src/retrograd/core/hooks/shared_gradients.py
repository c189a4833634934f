"""Gradients that are handed to several nodes in the same memory, and hooks that write into it.

The backward of ``a + b`` hands one tensor to both branches. A hook on ``a`` that writes into it changes what ``b`` is
still to be given; torch allows it. So it is followed who was handed what and has not begun, and around each hook of the
program's the contents of that are compared. No gradient is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import BackwardHook

from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.engine import current_node, uncompiled, without_functions
from retrograd.core.hooks.listeners import HookEntry, enter_node
from retrograd.core.hooks.nodes import edges_of, is_leaf, is_python, name_of, root_edges, variable_of
from retrograd.core.hooks.reach import PassNodes
from retrograd.core.hooks.saved import is_plain
from retrograd.core.hooks.storages import key_of
from retrograd.core.hooks.torch_calls import describe_function, is_inner, is_ours
from retrograd.core.hooks.writes import digest_of

MODULE_HOOK = "BackwardHookFunctionBackward"
"""Kind of the nodes at which torch calls full backward hooks of modules."""


class GradientWrite(NamedTuple):
    """Something of the program's wrote into memory in which other nodes were handed their gradient.

    Attributes:
        hook: the hook, or the backward of a Function; None for one of several hooks of a module.
        node: the node that was to run, or ran.
        harmed: those that had not begun, and are given something else now.
        module: whose hook it is; None for another.
    """

    hook: Callable[..., Any] | None
    node: Any
    harmed: list[Any]
    module: nn.Module | None = None


class _Handed(NamedTuple):
    """A gradient that was handed to a node and waits for it."""

    node: Any
    memory: StorageWeakRef
    layout: tuple[int, torch.Size, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    def digest(self) -> int | None:
        """Of what is there now; None if it is gone, for it was added to another."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        with plain_torch(), torch.no_grad():
            return digest_of(torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.layout))


_Before = Sequence[tuple[tuple[int, int], int | None]]
"""Which gradients could be written to, with their digests."""


class SharedGradients:
    """Watches one run of the engine, in the thread that asked for it, until :meth:`end`.

    Args:
        found: its nodes; released at the end.
        tables: of hooks on tensors of the program's, with those that are on leaves.
        tell: notified of each write.
        fault: called with an internal error; nothing is watched after it.
    """

    def __init__(
        self,
        found: PassNodes,
        tables: Iterable[Any],
        tell: Callable[[GradientWrite], None],
        fault: Callable[[Exception], None],
    ) -> None:
        self._found = found
        self._tell = tell
        self._fault = fault
        self._waiting: dict[tuple[int, int], _Handed | None] = {}
        """Identity of a node, and which of its gradients → what it was handed; None where that was added up."""
        self._before: dict[int, _Before] = {}
        self._of_modules: dict[int, BackwardHook] = {}
        self._is_over = False
        self._entries: list[HookEntry] = []
        try:
            self._enter(tables)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Leave nothing behind."""
        self._is_over = True
        while self._entries:
            self._entries.pop().remove()
        self._waiting.clear()
        self._before.clear()
        self._of_modules.clear()
        self._found.release()

    def _enter(self, tables: Iterable[Any]) -> None:
        run = self._found.run
        for (node, slot), gradient in zip(root_edges(run.roots), run.gradients, strict=False):
            self._hand(node, slot, gradient)
        for node in self._found.nodes:
            self._entries.append(enter_node(node.register_prehook, partial(self._see, self._begin_node)))
            if not is_leaf(node):  # else torch would copy what it may keep
                entry = enter_node(node.register_hook, partial(self._see, self._end_node))
                self._entries.append(entry)
                if name_of(node) == MODULE_HOOK:
                    self._of_modules |= {id(node): each for each in _module_hooks_in(entry.place[0]())}
        for table in tables:
            for number, hook in list(table.items()):
                is_theirs = is_of_program(hook)
                if is_theirs:
                    self._entries.append(HookEntry(partial(self._see, self._begin_hook, hook), table))
                table[number] = table.pop(number)  # torch goes by the order of insertion
                if is_theirs:
                    self._entries.append(HookEntry(partial(self._see, self._end_hook, hook), table))

    @uncompiled
    def _see(self, what: Callable[..., None], *about: Any) -> None:
        if self._is_over:
            return
        try:
            with without_functions():
                what(*about)
        except Exception as error:
            self._is_over = True
            self._fault(error)

    # ---- what happens ----

    def _begin_node(self, incoming: tuple[Tensor | None, ...]) -> None:
        node = current_node()
        for slot in range(len(incoming)):
            self._waiting.pop((id(node), slot), None)
        if is_written_by_program(node):
            is_module = id(node) in self._of_modules  # its hooks are given gradients of another node, too
            self._before[id(node)] = self._look(None if is_module else incoming, node)

    def _end_node(self, outgoing: tuple[Tensor | None, ...], incoming: tuple[Tensor | None, ...]) -> None:
        node = current_node()
        self._compare(self._before.pop(id(node), ()), node, None)
        for (following, slot), gradient in zip(edges_of(node), outgoing, strict=False):
            self._hand(following, slot, gradient)

    def _begin_hook(self, hook: Callable[..., Any], gradient: Tensor | None) -> None:
        self._before[id(hook)] = self._look((gradient,), current_node())

    def _end_hook(self, hook: Callable[..., Any], gradient: Tensor | None) -> None:
        self._compare(self._before.pop(id(hook), ()), current_node(), hook)

    def _hand(self, node: Any, slot: int, gradient: Tensor | None) -> None:
        if node is None or gradient is None:
            return
        key, handed = (id(node), slot), None
        if key not in self._waiting and is_plain(gradient):  # else it is added to what is there, in other memory
            layout = int(gradient.storage_offset()), gradient.shape, gradient.stride()
            memory = StorageWeakRef(gradient.untyped_storage())
            handed = _Handed(node, memory, layout, gradient.dtype, gradient.device)
        self._waiting[key] = handed

    def _look(self, given: tuple[Tensor | None, ...] | None, node: Any) -> _Before:
        """Take digests of what other nodes wait with in the same memory; given None, in any."""
        memory = None if given is None else {key_of(each.untyped_storage()) for each in given if _is_there(each)}
        others = [(key, each) for key, each in self._waiting.items() if each is not None and each.node is not node]
        return [(key, each.digest()) for key, each in others if memory is None or each.memory.cdata in memory]

    def _compare(self, before: _Before, node: Any, hook: Callable[..., Any] | None) -> None:
        """Report those that have changed while a hook on a tensor ran, or the node itself."""
        waiting = [(self._waiting.get(key), digest) for key, digest in before if digest is not None]
        harmed = [each.node for each, digest in waiting if each is not None and each.digest() not in (digest, None)]
        of_module = self._of_modules.get(id(node)) if hook is None else None
        if harmed and of_module is None:
            self._tell(GradientWrite(hook or _backward_of(node), node, harmed))
        elif harmed and of_module is not None:
            hooks = [*of_module.user_hooks, *of_module.user_pre_hooks]
            self._tell(GradientWrite(hooks[0] if len(hooks) == 1 else None, node, harmed, of_module.module))


def _module_hooks_in(table: Any) -> Iterator[BackwardHook]:
    """What torch has set on a node to call hooks of a module."""
    for hook in list(table.values()):
        for cell in getattr(hook, "__closure__", None) or ():
            if isinstance(cell.cell_contents, BackwardHook):
                yield cell.cell_contents


def _is_there(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and is_plain(tensor)


def is_of_program(hook: Any) -> bool:
    """Return whether a hook is a Python function that is not torch's, and not ours."""
    file = describe_function(hook)[1].rpartition(":")[0]
    return bool(file) and not is_inner[file] and not is_ours[file]


def is_written_by_program(node: Any) -> bool:
    """Return whether code of the program's runs in a node: the backward of a Function, or hooks of a module."""
    if not is_python(node):
        return False
    return name_of(node) == MODULE_HOOK or is_of_program(_backward_of(node))


def _backward_of(node: Any) -> Any:
    return getattr(type(node)._forward_cls, "backward", None)


def has_hooks_of_program(table: Any) -> bool:
    """Return whether one of the hooks in a table is the program's."""
    return any(is_of_program(hook) for hook in list(table.values()))


def tables_of_leaves(nodes: Iterable[Any]) -> list[Any]:
    """The hooks on the leaves among some nodes, where there are any."""
    leaves = [variable_of(node) for node in nodes if is_leaf(node)]
    return [leaf._backward_hooks for leaf in leaves if leaf is not None and leaf._backward_hooks]
