"""Digests of what nodes have saved, taken when they are made, and held against what is there when they run."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.hooks.deep_graphs import DeepGraphGuard
from retrograd.hooks.dispatch import plain_torch
from retrograd.hooks.engine import grad_enabled, uncompiled
from retrograd.hooks.function_names import tensors_of
from retrograd.hooks.nodes import LEAF_NUMBER, detach, edges_of, identity_of, number_of, saved_tensors_of
from retrograd.hooks.saved import is_plain, version_of
from retrograd.hooks.writes import WriteNotes

_MOST = 20_000
"""Nodes with digests that are remembered."""

_UPDATED_BY_THEIR_OWN = frozenset({"running_mean", "running_var"})
"""What batch norm saves, writes to itself, and does not use in training."""


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


class SavedWatch:
    """Takes digests of what nodes save.

    Args:
        writes: the last writes in place.
    """

    def __init__(self, writes: WriteNotes) -> None:
        self._writes = writes
        self._guard = DeepGraphGuard()
        self._digests: OrderedDict[tuple[int, int], tuple[SavedDigest, ...]] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Whether no digest is remembered."""
        return not self._digests

    def forward_begins(self) -> None:
        """A model is called by the program."""
        self._guard.part()

    def end(self) -> None:
        """Forget everything."""
        self._guard.part()
        self._digests.clear()

    @uncompiled
    def see_nodes(self, first: int, result: Any, is_written: bool) -> None:
        """Take digests of what the nodes of a result have saved that were made since this number."""
        if grad_enabled():
            tensors = [each for each in tensors_of((result,), None) if not (is_written and each._is_view())]
            self._take_digests([each.grad_fn for each in tensors if each.requires_grad], first)

    def _take_digests(self, nodes: Iterable[Any], first: int) -> None:
        """Of all nodes that were made since this number."""
        waiting = [node for node in nodes if node is not None]
        for node in waiting:  # grows while it is walked
            self._guard.saw(node)
            number, key = number_of(node), identity_of(node)
            if first <= number < LEAF_NUMBER and key not in self._digests:
                order = self._writes.count
                found = tuple(
                    SavedDigest(name, digest_of(tensor), version_of(tensor), order)
                    for name, tensor, _ in _held_by(node)
                )
                self._digests[key] = found
                if len(self._digests) > _MOST:
                    self._digests.popitem(last=False)
                waiting.extend(following for following, _ in edges_of(node) if following is not None)

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
                    yield name, detach(tensor), raw.unpack_hook is not None


def digest_of(tensor: Tensor) -> int:
    """The same for the same bytes in the same order, but for moves of eight within 2,048. It waits for the device."""
    with plain_torch():
        values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        whole = values.numel() // _ROW * _ROW if values.storage_offset() % _WORD == 0 else 0
        rows = values[:whole].view(torch.int64).view(-1, _ROW // _WORD).sum(1)  # twenty times as fast as to sum bytes
        return zlib.crc32(values[whole:].cpu().numpy().data, zlib.crc32(rows.cpu().numpy().data))


_WORD = 8
_ROW = 2048
