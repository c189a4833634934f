"""Tensors that are handed over by hand, with ``rg.watch``: who may change them, and what leaves are called."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.hooks.engine import uncompiled
from retrograd.hooks.listeners import Listeners
from retrograd.hooks.nested import flatten
from retrograd.sites.site import WATCH, Site


class TensorRewriter(Protocol):
    """Changes tensors that are watched by hand."""

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """Return the tensor, or nest of tensors, that takes the place of ``value``."""


watched_rewriters = Listeners[TensorRewriter]()
"""Who may change tensors that are watched by hand."""

_leaves = WeakIdKeyDictionary()


def name_watched_leaves(name: str, value: Any) -> None:
    """Remember what the leaves of a graph are called that lie in a tensor or a nest of them; they are not held."""
    for keys, tensor in flatten(value, ()):
        if tensor.requires_grad and tensor.is_leaf:
            _leaves[tensor] = name, keys


def watched_name(leaf: torch.Tensor) -> str | None:
    """The name under which a leaf was watched: ``"watch/a"``."""
    found = _leaves.get(leaf) if len(_leaves) else None
    return None if found is None else str(Site(WATCH + found[0], found[1]))


@uncompiled
def rewrite_watched(name: str, value: Any) -> Any:
    """Let all rewriters change a value, one after the other; returns what takes its place."""
    for rewriter in watched_rewriters.all:
        value = rewriter.rewrite_watched(name, value)
    return value


rewrite_watched._torchdynamo_disable = True  # type: ignore[attr-defined]
rewrite_watched._torchdynamo_disable_msg = "a rule of retrograd acts here"  # type: ignore[attr-defined]
