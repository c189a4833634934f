"""Writes of operations into memory, and what they changed of what nodes have saved.

The writes are a log that explains an error afterwards. Of what nodes have saved digests are taken when they are made,
and held against what is there when they run: a write that autograd does not count is found too.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import plain_torch
from retrograd.core.hooks.engine import grad_enabled, uncompiled
from retrograd.core.hooks.function_mode import FunctionListener
from retrograd.core.hooks.nodes import LEAF_NUMBER, detach, edges_of, holds, identity_of, number_of, saved_tensors_of
from retrograd.core.hooks.reach import DeepGraphGuard
from retrograd.core.hooks.saved import is_plain, version_of
from retrograd.core.hooks.torch_calls import TorchCall, is_inner, tensors_of, user_line

_OPTIMIZERS = str(Path(torch.__file__).parent / "optim")
_LIMIT = 4096
TO_ARRAYS = (Tensor.numpy, Tensor.__array__)
"""Functions whose result shares memory with what they are given, out of torch's sight."""


class Write(NamedTuple):
    """A write in place.

    Attributes:
        storage: identity of the memory.
        version: of the tensor that was written to, afterwards.
        writer: the torch function; of an optimizer its update, as in ``SGD.step``.
        line: who called it.
        order: how many writes came before.
    """

    storage: int
    version: int
    writer: str
    line: str
    order: int = 0

    def __str__(self) -> str:
        return f"{self.writer} at {self.line}"


class WriteNotes(FunctionListener):
    """The last writes in place that torch functions made: version counters are compared around each, 3 µs a call.

    Writes that do not count (through NumPy, by hand-written kernels) are not seen, nor are those of scripted code and
    of autograd's own nodes. A write through ``.data`` is seen, with the version of what ``.data`` gave; and where NumPy
    was given the memory.

    Attributes:
        writes: the writes.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.writes: deque[Write] = deque(maxlen=_LIMIT)
        self.count = 0
        self._arrays: deque[Write] = deque(maxlen=_LIMIT)

    @uncompiled
    def before(self, call: TorchCall) -> list[tuple[Tensor, int]]:
        """Return the tensors that a function is given, and their versions."""
        seen: list[tuple[Tensor, int]] = []
        _find_versions(call.args, seen)
        if call.kwargs:
            _find_versions(call.kwargs.values(), seen)
        return seen

    @uncompiled
    def after(self, call: TorchCall, seen: list[tuple[Tensor, int]]) -> None:
        """Record what it has written to."""
        self.note(seen, call.function, call.frame)

    @uncompiled
    def note(self, seen: list[tuple[Tensor, int]], function: Any, frame: FrameType) -> None:
        """Record what a function wrote to of these tensors, with their versions before. Compiled code calls it."""
        for tensor, version in seen:
            if tensor._version != version and is_plain(tensor):
                self._add(self.writes, tensor, _name_writer(function, frame), user_line(frame))
        if function in TO_ARRAYS and seen and is_plain(seen[0][0]):
            self._add(self._arrays, seen[0][0], "NumPy, which was given its memory", user_line(frame))

    def _add(self, notes: deque[Write], tensor: Tensor, writer: str, line: str) -> None:
        notes.append(Write(id(tensor.untyped_storage()), tensor._version, writer, line, self.count))
        self.count += 1

    def note_update(self, tensors: Iterable[Tensor], writer: str, line: str) -> None:
        """Record that an optimizer has written to these."""
        for tensor in tensors:
            if is_plain(tensor):
                self._add(self.writes, tensor, writer, line)

    def since(self, storage: int, order: int) -> Write | None:
        """The last that wrote to a storage since there were so many; else who gave its memory to NumPy."""
        wrote = [each for each in self.writes if each.storage == storage and each.order >= order]
        given = [each for each in self._arrays if each.storage == storage]
        return next(iter((*reversed(wrote), *reversed(given))), None)

    def between(self, storage: int, then: int, now: int) -> list[Write]:
        """The writes that brought a storage from one version to another, each writer and line once."""
        seen = [each for each in self.writes if each.storage == storage and then < each.version <= now]
        return list({(each.writer, each.line): each for each in reversed(seen)}.values())[::-1]


def _name_writer(function: Any, frame: FrameType | None) -> str:
    """The name of a torch function; that of an optimizer's update, where it is part of one."""
    while frame is not None and is_inner[frame.f_code.co_filename]:
        if frame.f_code.co_name == "step" and frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return f"{type(frame.f_locals.get('self')).__name__}.step"
        frame = frame.f_back
    return str(getattr(function, "__name__", function))


def _find_versions(values: Iterable[Any], seen: list[tuple[Tensor, int]]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            try:
                seen.append((value, value._version))
            except RuntimeError:  # made in inference mode: it has none, and no graph has saved it
                continue
        elif isinstance(value, list | tuple):
            _find_versions(value, seen)
        elif isinstance(value, dict):
            _find_versions(value.values(), seen)


_MOST = 20_000
"""Nodes with digests that are remembered."""

_UPDATED_BY_THEIR_OWN = frozenset({"running_mean", "running_var"})
"""Tensors that batch norm saves, writes to itself, and does not use in training."""


class SavedDigest(NamedTuple):
    """A digest of something that a node saved when it was made.

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
    """Something that a node has saved and that is not what it was.

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
        """True if no digest is remembered."""
        return not self._digests

    def forward_begins(self) -> None:
        """A model is called by the program."""
        self._guard.part()

    def end(self) -> None:
        """Forget everything."""
        self._guard.part()
        self._digests.clear()

    @uncompiled
    def see_nodes(self, call: TorchCall, is_written: bool) -> None:
        """Take digests of what the nodes have saved that a call has made."""
        if grad_enabled():
            tensors = [each for each in tensors_of((call.result,), None) if not (is_written and each._is_view())]
            self._take_digests([each.grad_fn for each in tensors if each.requires_grad], call.first)

    def _take_digests(self, nodes: Iterable[Any], first: int) -> None:
        """Take digests of what these nodes saved, and those before them that were made since this number."""
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
        """Find what some nodes have saved and something has changed, where autograd does not see it.

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
        if name not in _UPDATED_BY_THEIR_OWN:
            for tensor in tensors_of((holds(raw),), None):
                if is_plain(tensor):
                    yield name, detach(tensor), raw.unpack_hook is not None


def digest_of(tensor: Tensor) -> int:
    """The same for the same bytes in the same order, but for moves of eight within 2,048. It waits for the device."""
    with plain_torch():
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        values = values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride
        whole = values.numel() // _ROW * _ROW if values.storage_offset() % _WORD == 0 else 0
        start = 0
        if whole:
            rows = values[:whole].view(torch.int64).view(-1, _ROW // _WORD).sum(1)  # 20 times as fast as summing bytes
            start = zlib.crc32(rows.cpu().numpy().data)
        return zlib.crc32(values[whole:].cpu().numpy().data, start)


_WORD = 8
_ROW = 2048
