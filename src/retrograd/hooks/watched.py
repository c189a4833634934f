"""Who may change the tensors that are handed over by hand, with ``rg.watch``."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from retrograd.hooks.engine import uncompiled


class TensorRewriter(Protocol):
    """Asked what takes the place of a tensor that is watched by hand."""

    def rewrite_watched(self, name: str, value: Any) -> Any:
        """What takes the place of ``value``, a tensor or a nest of them."""


rewriters: tuple[TensorRewriter, ...] = ()
"""Those who are asked, in their order."""

_lock = threading.Lock()


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
