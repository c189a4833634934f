"""The memory of tensors: whose it is, who else holds it, and what a node of a graph keeps of it for its backward.

Nothing is run or unpacked: a saved tensor is looked at where torch holds it, so hooks that would bring it back are not
called, and torch goes on to check that nobody has written into it. What the node of a Python ``Function`` has as
attributes is found too, which no saved-tensor hook ever sees.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from retrograd.core.hooks.checkpoints import frame_of
from retrograd.core.hooks.compiled import compiled_call_listeners
from retrograd.core.hooks.dispatch import sparse_parts
from retrograd.core.hooks.engine import is_compiling, is_transformed, uncompiled
from retrograd.core.hooks.module import ModuleHooks
from retrograd.core.hooks.nodes import SHARED_KIND, is_leaf, is_python, is_saved_tensor, saved_of
from retrograd.core.hooks.saved import base_of, is_cast_of_parameter

_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc})
_LOW = frozenset({torch.bfloat16, torch.float16})

Layout = tuple[torch.Size, tuple[int, ...], int]


class ParameterStorage(NamedTuple):
    """The memory of a parameter or buffer, or of several that share it.

    Attributes:
        storage: the memory, which is not held.
        kind: ``parameter`` or ``buffer``.
        name: as in ``"blocks.3.fc:weight"``; empty where no model names it.
        layout: size, strides and offset of the first of them; None where there is no such thing.
    """

    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    name: str
    layout: Layout | None


class ParameterStorages:
    """The storages of parameters and buffers. A Linear saves ``weight.t()``, a plain tensor: its storage tells it."""

    def __init__(self) -> None:
        self._known: dict[int, ParameterStorage] = {}
        self._shapes: set[torch.Size] = set()

    def learn(self, module: nn.Module) -> None:
        """Record the parameters and buffers of one module, those of its children left out."""
        replicated = vars(module).get("_former_parameters", {})  # of nn.DataParallel's replicas
        for tensor in (*module._parameters.values(), *replicated.values()):
            self.add("parameter", "", tensor)
        for tensor in module._buffers.values():
            self.add("buffer", "", tensor)

    def add(self, kind: str, name: str, tensor: Tensor | None) -> None:
        """Record one parameter or buffer. Memory that is known keeps its name."""
        if tensor is None or is_lazy(tensor):
            return
        layout = _layout_of(tensor)
        if layout is not None:
            self._shapes |= {tensor.shape, tensor.shape[::-1]}
        for storage, _ in storages_of(tensor):
            key = id(storage)
            if self.find(storage) is None:
                reference = weakref.ref(storage, partial(_forget, weakref.ref(self), key))
                self._known[key] = ParameterStorage(reference, kind, name, layout)

    def find(self, storage: torch.UntypedStorage) -> ParameterStorage | None:
        """Find the parameter or buffer that lies in this memory; None where none does."""
        known = self._known.get(id(storage))
        return known if known is not None and known.storage() is storage else None

    def describe(self, storage: torch.UntypedStorage, tensor: Tensor) -> tuple[str, str] | None:
        """Kind and name of a tensor that lies there: ``parameter view`` if it is not the parameter as it is."""
        found = self.find(storage)
        if found is None:
            return None
        return found.kind if found.layout == _layout_of(tensor) else f"{found.kind} view", found.name

    def include(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether a tensor lies in lasting memory: of a parameter, a buffer, or a cast that autocast holds."""
        if self.find(storage) is not None or type(tensor) is nn.Parameter or isinstance(base_of(tensor), nn.Parameter):
            return True
        return (
            tensor.dtype in _LOW
            and tensor.requires_grad
            and tensor.shape in self._shapes
            and is_cast_of_parameter(tensor)
        )


def _layout_of(tensor: Tensor) -> Layout | None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def _forget(storages: weakref.ref[ParameterStorages], key: int, gone: weakref.ref[torch.UntypedStorage]) -> None:
    held = storages()
    known = None if held is None else held._known.get(key)
    if held is not None and known is not None and known.storage is gone:
        del held._known[key]


_BYTES = 512
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def first_bytes(tensor: Tensor, most: int = _BYTES) -> bytes | Tensor:
    """Some of the first bytes of a tensor's elements, or where they are on a device, a copy of them there.

    Empty for one that does not lie in memory one element after the other.
    """
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return b""
    size = tensor.nbytes
    if not size or tensor.is_conj() or tensor.is_neg():
        return b""
    size = min(most, size)
    if tensor.is_cpu:
        return ctypes.string_at(tensor.data_ptr(), size)
    with torch.no_grad():
        return tensor.detach().as_strided((size // tensor.element_size(),), (1,)).view(torch.uint8).clone()


_OWN = 2
"""The tensor that is asked about, and the Python object of its storage."""


def is_held_elsewhere(values: Tensor) -> bool:
    """Return whether anything but this tensor object keeps its memory alive."""
    storage = values.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > _OWN)


_BLIND = frozenset({"CopySlices", SHARED_KIND})
"""Kinds of nodes that keep tensors which torch shows to nobody: a write into a view, and Functions written in C++."""


class KeptByNode(NamedTuple):
    """A tensor that a node keeps.

    Attributes:
        slot: torch's name for it, ``tensors[0]`` of a Python ``Function``, or ``ctx.NAME`` for an attribute.
        tensor: the tensor itself; not to be held. None if hooks have packed it into something without tensors.
        packed: what hooks have packed it into; None if there were none. Not to be held.
        checkpoint: the checkpoint whose hooks have; not to be held.
        is_attribute: it is an attribute of the node, and lives until the node dies.
    """

    slot: str
    tensor: Tensor | None
    packed: Any = None
    checkpoint: Any = None
    is_attribute: bool = False


def read_kept(node: Any) -> Iterator[KeptByNode]:
    """All tensors that a node keeps. What a pass has freed is not there any more."""
    if is_leaf(node):
        return
    for name, value in saved_of(node).items():
        if isinstance(value, list | tuple):
            for place, each in enumerate(value):
                yield from _read_slot(f"{name}[{place}]", each)
        else:
            yield from _read_slot(name, value)
    if is_python(node):
        for name, value in list(vars(node).items()):
            for path, tensor in tensors_in(value, f"ctx.{name}"):
                yield KeptByNode(path, tensor, is_attribute=True)


def is_released(node: Any) -> bool:
    """Return whether a pass has freed what the operation had saved; attributes stay for as long as the node."""
    return all(kept.is_attribute for kept in read_kept(node))


def is_blind(node: Any) -> bool:
    """Return whether a node keeps tensors that cannot be seen."""
    return type(node).__name__ in _BLIND


def storages_of(tensor: Tensor) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The memory that a tensor keeps alive, with its bytes: several pieces for sparse and nested ones, and subclasses.

    Of a tensor on the ``meta`` device, what it would take. Nothing where a tensor has no memory of its own to be told.
    """
    try:
        storages = [part.untyped_storage() for part in _parts_of(tensor)]
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):  # opaque: mkldnn, some subclasses
        return
    for storage in storages:
        yield storage, storage.nbytes()


def key_of(storage: torch.UntypedStorage) -> int:
    """The identity of memory for as long as it lives, or :func:`hold_key` is held."""
    return int(storage._cdata)


def hold_key(storage: torch.UntypedStorage) -> object:
    """Keeps the identity from being given to other memory; the memory itself is not kept."""
    return StorageWeakRef(storage)


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors in tuples, lists and dicts, with where they are; no deeper than two levels."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, each in _items_of(value):
        inner = f"{path}[{key}]"
        if isinstance(each, Tensor):
            yield inner, each
        else:
            yield from ((f"{inner}[{k}]", t) for k, t in _items_of(each) if isinstance(t, Tensor))


def _read_slot(slot: str, value: Any) -> Iterator[KeptByNode]:
    if not is_saved_tensor(value):
        return
    try:
        held = value.data
    except RuntimeError:  # freed
        return
    is_hooked = getattr(value, "unpack_hook", None) is not None or (held is not None and not isinstance(held, Tensor))
    if not is_hooked:
        if held is not None:
            yield KeptByNode(slot, held)
        return
    inside = list(tensors_in(held, slot))
    if not inside:
        yield KeptByNode(slot, None, held, frame_of(value))
    for _, tensor in inside:
        yield KeptByNode(slot, tensor, held)


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        return enumerate(value)
    return list(value.items()) if isinstance(value, Mapping) else ()


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts_of(getattr(tensor, name))
    elif tensor.layout in _SPARSE:
        yield from sparse_parts(tensor)
    else:
        yield tensor


class ModuleArguments:
    """Records the memory of arguments that have no graph, of every module called between ``start`` and ``stop``.

    Attributes:
        at_next_call: called once, before the next module is.
    """

    def __init__(self) -> None:
        self._held: dict[int, object] = {}
        self._undo: list[Callable[[], None]] = []
        self._calls: ModuleHooks | None = None
        self.at_next_call: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to listen."""
        self._calls = ModuleHooks(self._see)
        self._undo.append(self._calls.remove)
        compiled_call_listeners.add(self)
        self._undo.append(lambda: compiled_call_listeners.remove(self))

    def stop(self) -> None:
        """Listen no more. What was noted stays."""
        while self._undo:
            self._undo.pop()()
        self._calls = None
        self.at_next_call = None

    def note(self, value: Any) -> None:
        """Record the memory of a tensor, or of those in tuples, lists and dicts, no deeper than two levels."""
        for _, tensor in tensors_in(value, ""):
            if tensor.grad_fn is None and not isinstance(tensor, nn.Parameter) and not is_transformed(tensor):
                for storage, _ in storages_of(tensor):
                    key = key_of(storage)
                    if key not in self._held:
                        self._held[key] = hold_key(storage)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a module was handed this tensor, or one in the same memory."""
        return any(key_of(storage) in self._held for storage, _ in storages_of(tensor))

    def __contains__(self, key: int) -> bool:
        return key in self._held

    @uncompiled
    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_compiling():
            return
        callback, self.at_next_call = self.at_next_call, None
        if callback is not None:
            callback()
        self.note(args)

    @uncompiled
    def compiled_call_begins(self, function: object, frame: FrameType) -> None:
        """Compiled code begins: torch would take the hook for a part of it."""
        if self._calls is not None:
            self._calls.pause()

    @uncompiled
    def compiled_call_ends(self) -> None:
        """Compiled code has ended."""
        if self._calls is not None:
            self._calls.resume()
