"""What a node of a graph keeps for its backward, read without unpacking any of it.

Nothing is run: a saved tensor is looked at where torch holds it, so hooks that would bring it back are not called, and
torch goes on to check that nobody has written into it. What the node of a Python ``Function`` has as attributes is
found too, which no saved-tensor hook ever sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from retrograd.hooks.checkpoints import frame_of
from retrograd.hooks.engine import is_transformed
from retrograd.hooks.nodes import is_leaf, is_python, saved_of

_BLIND = frozenset({"CopySlices", "CppFunction"})
"""Kinds of nodes that keep tensors which torch shows to nobody: a write into a view, and Functions written in C++."""


class Kept(NamedTuple):
    """One tensor that a node keeps.

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


def read_kept(node: Any) -> Iterator[Kept]:
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
                yield Kept(path, tensor, is_attribute=True)


def is_released(node: Any) -> bool:
    """Whether a pass has freed what the operation had saved; attributes stay for as long as the node."""
    return all(kept.is_attribute for kept in read_kept(node))


def is_blind(node: Any) -> bool:
    """Whether a node keeps tensors that cannot be seen."""
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


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor is one of the program's own, and not seen inside a transform of ``torch.func``."""
    return not is_transformed(tensor)


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


def _read_slot(slot: str, value: Any) -> Iterator[Kept]:
    if type(value).__name__ != "SavedTensor":
        return
    try:
        held = value.data
    except RuntimeError:  # freed
        return
    is_hooked = getattr(value, "unpack_hook", None) is not None or (held is not None and not isinstance(held, Tensor))
    if not is_hooked:
        if held is not None:
            yield Kept(slot, held)
        return
    inside = list(tensors_in(held, slot))
    if not inside:
        yield Kept(slot, None, held, frame_of(value))
    for _, tensor in inside:
        yield Kept(slot, tensor, held)


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple):
        return enumerate(value)
    return list(value.items()) if isinstance(value, Mapping) else ()


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts_of(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
