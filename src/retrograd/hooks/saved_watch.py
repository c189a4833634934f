"""Watches a program's operations: where nodes were made, what was written to, and digests of what nodes have saved."""

from __future__ import annotations

import sys
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograd.hooks.calls import running_module
from retrograd.hooks.deep_graphs import DeepGraphGuard
from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.engine import (
    current_graph_task,
    grad_enabled,
    is_tracing,
    next_sequence_number,
    uncompiled,
    uncompiled_itself,
)
from retrograd.hooks.function_names import tensors_of
from retrograd.hooks.module_calls import OUTSIDE
from retrograd.hooks.nodes import LEAF_NUMBER, edges_of, identity_of, number_of, saved_tensors_of
from retrograd.hooks.quiet_mode import QuietMode, lowest_place
from retrograd.hooks.saved import is_plain, version_of
from retrograd.hooks.thread_logs import user_frame
from retrograd.hooks.writes import WriteNotes

_MOST = 20_000
"""Operations, and nodes with digests, that are remembered."""

_UPDATED_BY_THEIR_OWN = frozenset({"running_mean", "running_var"})
"""What batch norm saves, writes to itself, and does not use in training."""

_ATTRIBUTES = ("__get__", "__set__")

_first = itemgetter(0)

Made = tuple[int, int, CodeType, int, str]
"""First number of its nodes and the one after the last; code and offset in it; path of the module."""


class SavedDigest(NamedTuple):
    """What a node had saved, when it was made.

    Attributes:
        name: torch's name for it.
        digest: of its bytes.
        version: of the tensor; −1 where it has none.
        order: how many writes were noted before.
    """

    name: str
    digest: int
    version: int
    order: int


class Changed(NamedTuple):
    """What a node has saved is not what it was.

    Attributes:
        node: the node.
        name: torch's name for it.
        tensor: what is there now.
        then: its version when it was saved.
        order: how many writes were noted before that.
    """

    node: Any
    name: str
    tensor: Tensor
    then: int
    order: int


class SavedWatch(QuietMode):
    """Notes operations of the thread that starts it, but for those within a backward pass.

    Args:
        name_module: the path of a module, None where it has no name.
        fault: told of an error of ours; nothing is noted behind it.

    Attributes:
        writes: the last writes in place.
        takes_digests: whether digests are taken of what nodes save.
    """

    def __init__(self, name_module: Callable[[nn.Module], str | None], fault: Callable[[Exception], None]) -> None:
        super().__init__()
        self._name_module = name_module
        self._fault = fault
        self._guard = DeepGraphGuard()
        self._made: list[Made] = []
        self._digests: OrderedDict[tuple[int, int], tuple[SavedDigest, ...]] = OrderedDict()
        self._has_failed = False
        self._put_on: Callable[[], None] | None = None
        self.writes = WriteNotes()
        self.takes_digests = False

    def begin(self) -> None:
        """Watch from now on."""
        if not self.is_started:
            self.start(lowest_place())

    def end(self) -> None:
        """Watch no more, and forget."""
        self._put_on = None
        self.stop()
        self._guard.part()
        self._made.clear()
        self._digests.clear()

    @uncompiled_itself
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attribute = getattr(function, "__name__", "") in _ATTRIBUTES
        if is_attribute or self._has_failed or not self.is_started or current_graph_task() != OUTSIDE or is_tracing():
            return function(*args, **kwargs) if kwargs else function(*args)
        seen = self.writes.before(args, kwargs or {})
        first = next_sequence_number()
        result = self.frames.call(sys._getframe(1), function, args, kwargs)
        try:
            with torch._C.DisableTorchFunction():
                is_written = any(tensor._version != version for tensor, version in seen)
                self.writes.after(seen, function, result, sys._getframe(1))
                if next_sequence_number() > first:
                    self._note(first, result, is_written=is_written)
        except Exception as error:
            self._has_failed = True
            self._fault(error)
        return result

    @uncompiled
    def _note(self, first: int, result: Any, *, is_written: bool) -> None:
        frame = user_frame(sys._getframe(2))
        module = running_module()
        path = self._name_module(module) if module is not None else None
        if len(self._made) >= _MOST:
            del self._made[: _MOST // 2]
        self._made.append((first, next_sequence_number(), frame.f_code, frame.f_lasti, path or ""))
        if self.takes_digests and grad_enabled():
            tensors = [each for each in tensors_of((result,), None) if not (is_written and each._is_view())]
            self._take_digests([each.grad_fn for each in tensors if each.requires_grad], first)

    def _take_digests(self, nodes: Iterable[Any], first: int) -> None:
        """Of all nodes that were made since this number."""
        waiting = [node for node in nodes if node is not None]
        for node in waiting:  # grows while it is walked
            self._guard.saw(node)
            number, key = number_of(node), identity_of(node)
            if first <= number < LEAF_NUMBER and key not in self._digests:
                order = self.writes.count
                found = tuple(
                    SavedDigest(name, digest_of(tensor), version_of(tensor), order)
                    for name, tensor, _ in _held_by(node)
                )
                self._digests[key] = found
                if len(self._digests) > _MOST:
                    self._digests.popitem(last=False)
                waiting.extend(following for following, _ in edges_of(node) if following is not None)

    def forward_begins(self) -> None:
        """A model is called by the program."""
        self._guard.part()
        self.resume()

    def pause(self) -> None:
        """Be out of the way of an optimizer, which reads a thousand attributes."""
        if self._put_on is None:
            self._put_on = self.take_off()

    def resume(self) -> None:
        """Take that back."""
        put_on, self._put_on = self._put_on, None
        if put_on is not None and self.is_started:
            put_on()

    def find_changed(self, nodes: Iterable[Any], *, is_kept: bool) -> list[Changed]:
        """What some nodes have saved and something has changed, where autograd does not see it.

        Args:
            nodes: those that are about to run.
            is_kept: they may run again; else their digests are forgotten.
        """
        found = []
        for node in nodes:
            key = identity_of(node)
            then = {each.name: each for each in self._digests.get(key, ())}
            for name, tensor, has_hooks in _held_by(node) if then else ():
                old = then.get(name)
                is_seen = old is not None and not has_hooks and version_of(tensor) != old.version
                if old is not None and not is_seen and digest_of(tensor) != old.digest:
                    found.append(Changed(node, name, tensor, old.version, old.order))
            if not is_kept:
                self._digests.pop(key, None)
        return found

    def made_at(self, number: int) -> tuple[str, int, str, str] | None:
        """File, line, function and module of the operation that made the node with this number."""
        place = bisect_right(self._made, number, key=_first) - 1
        if place < 0 or number >= self._made[place][1]:
            return None
        _, _, code, offset, path = self._made[place]
        lines = [each[0] for each in code.co_positions()]
        return code.co_filename, lines[offset // 2] or code.co_firstlineno, code.co_name, path


def _held_by(node: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """The memory that a node holds, by name, and whether hooks have packed it: a copy of theirs is theirs."""
    for name, raw in saved_tensors_of(node):
        try:
            held = raw.data
        except RuntimeError:  # freed
            continue
        if name not in _UPDATED_BY_THEIR_OWN:
            for tensor in tensors_of((held,), None):
                if is_plain(tensor):
                    yield name, tensor.detach(), raw.unpack_hook is not None


def digest_of(tensor: Tensor) -> int:
    """The same for the same bytes in the same order, but for moves of eight within 2,048. It waits for the device."""
    with plain_torch():
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        whole = values.numel() // _ROW * _ROW if values.storage_offset() % _WORD == 0 else 0
        rows = values[:whole].view(torch.int64).view(-1, _ROW // _WORD).sum(1)  # twenty times as fast as to sum bytes
        return zlib.crc32(values[whole:].cpu().numpy().data, zlib.crc32(rows.cpu().numpy().data))


_WORD = 8
_ROW = 2048
