"""Tensors that are handed over by hand, with ``rg.watch``: who may change them, and what leaves are called."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.hooks.engine import uncompiled
from retrograd.hooks.nested import flatten
from retrograd.sites.site import WATCH, Site


class TensorRewriter(Protocol):
    """Asked what takes the place of a tensor that is watched by hand."""

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """What takes the place of ``value``, a tensor or a nest of them."""


rewriters: tuple[TensorRewriter, ...] = ()
"""Those who are asked, in their order."""

_lock = threading.Lock()
_leaves = WeakIdKeyDictionary()


def name_watched_leaves(name: str, value: Any) -> None:
    """Remember what the leaves of a graph are called that lie in a tensor or a nest of them; they are not held."""
    for keys, tensor in flatten(value, ()):
        if tensor.requires_grad and tensor.is_leaf:
            _leaves[tensor] = name, keys


def watched_name(leaf: torch.Tensor) -> str | None:
    """What a leaf was watched as: ``"watch/a"``."""
    found = _leaves.get(leaf) if len(_leaves) else None
    return None if found is None else str(Site(WATCH + found[0], found[1]))


def rewrite_watched_tensors(rewriter: TensorRewriter) -> None:
    """Ask this one, too."""
    global rewriters
    with _lock:
        rewriters = (*rewriters, rewriter)


def leave_watched_tensors(rewriter: TensorRewriter) -> None:
    """Ask it no longer."""
    global rewriters
    with _lock:
        rewriters = tuple(other for other in rewriters if other is not rewriter)


@uncompiled
def rewrite_watched(name: str, value: Any) -> Any:
    """What all of them together make of it."""
    for rewriter in rewriters:
        value = rewriter.rewrite_watched(name, value)
    return value


rewrite_watched._torchdynamo_disable = True  # type: ignore[attr-defined]
rewrite_watched._torchdynamo_disable_msg = "a rule of retrograd acts here"  # type: ignore[attr-defined]
