"""What a compiled module returns: seen in its own graph, or by the hook at its boundary, which is outside of the graph.

Torch calls the hooks of a module whose forward it compiles outside of its graph. What the graph itself uses further is
shown within (``dynamo.py``), for its gradient comes to the boundary in part alone; the hook at the boundary sees the
rest.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.compiled.handles import make_handle
from retrograd.core.hooks.calls import find_call_of, hooked_call
from retrograd.core.hooks.engine import uncompiled
from retrograd.core.hooks.in_graphs import READERS, UntracedHook
from retrograd.core.hooks.listeners import TAP_OF_WRAPPER
from retrograd.core.hooks.module import EndHook, ForwardTap, set_after
from retrograd.core.hooks.nested import Keys, flatten

BETWEEN = "\x1f"
"""Between the keys of a tensor, which the graph holds as one text."""

RETURNED = "\x1e"
"""Before them, where the whole graph is the call of the module that returns the tensor."""


def name_tensors(tensors: Sequence[Tensor], names: Sequence[str]) -> list[tuple[Keys, Tensor]]:
    """Tensors, each with its keys."""
    if len(tensors) == 1 and not names[0]:
        return [((), tensors[0])]
    return [(tuple(name.split(BETWEEN)) if name else (), tensor) for name, tensor in zip(names, tensors, strict=True)]


def find_boundary(
    found: Any, tensors: Sequence[Tensor], names: Sequence[str]
) -> tuple[ForwardTap | None, Sequence[str]]:
    """The tap that is shown what a compiled module is about to return, and its names; None if its hook sees that.

    Args:
        found: the tap on the module, or what stands there for the taps on its wrappers.
        tensors: what is returned and used in the graph.
        names: of the tensors, each of them marked.
    """
    tap = found.find_called() if isinstance(found, TapOfWrappers) else found
    if tap is None:
        return None, names
    tap.is_compiled = True
    module = tap.find_module()
    if module is None or not any(watcher.switch.awake for watcher in tap.watchers):
        return None, names
    frame = find_call_of(module) if _returns_as_it_is(module) else None
    if frame is None:  # its forward alone is called, or somebody changes what it returns
        return None, names
    names = [name.removeprefix(RETURNED) for name in names]
    shapes = {keys: tensor.shape for keys, tensor in name_tensors(tensors, names)}
    tap.shown[threading.get_ident()] = _Shown(id(frame), shapes)
    return tap, names


@dataclass(frozen=True, slots=True)
class _Shown:
    """What compiled code has shown of that which its module is about to return.

    Attributes:
        frame: identity of the frame of the call, which may have raised since.
        shapes: of these tensors.
    """

    frame: int
    shapes: dict[Keys, torch.Size]

    def rest_of(self, output: Any) -> list[tuple[Keys, Tensor]] | None:
        """The other tensors of what is returned; None if this is another call."""
        frame, found = hooked_call(), dict(flatten(output, ()))
        is_same = all(keys in found and found[keys].shape == shape for keys, shape in self.shapes.items())
        if frame is None or id(frame) != self.frame or not is_same:
            return None
        return [(keys, tensor) for keys, tensor in found.items() if keys not in self.shapes]


class TapOfWrappers(UntracedHook):
    """Stands on a module that compiled wrappers call, for their taps, each at its own boundary: they share a graph.

    Attributes:
        handle: by which the graph knows it.
    """

    __slots__ = ("__weakref__", "_entry", "_taps", "handle")

    def __init__(self, module: nn.Module) -> None:
        self.handle = make_handle(self)
        self._taps: tuple[weakref.ref[ForwardTap], ...] = ()
        self._entry = set_after(module, self, number=TAP_OF_WRAPPER)

    @classmethod
    def on(cls, module: nn.Module) -> TapOfWrappers:
        """The one on a module."""
        found = module._forward_hooks.get(TAP_OF_WRAPPER)
        return found if isinstance(found, cls) else cls(module)

    def join(self, tap: ForwardTap) -> None:
        """Stand for this tap, too."""
        self._taps = (*self._taps, weakref.ref(tap))

    def leave(self, tap: ForwardTap) -> None:
        """Stand for it no more, and for the last one not at all."""
        self._taps = tuple(find for find in self._taps if find() not in (None, tap))
        if not self._taps:
            self._entry.remove()

    @property
    def is_compiled(self) -> bool:
        """It is a part of a graph that has run."""
        return all(tap.is_compiled for tap in self._living())

    @is_compiled.setter
    def is_compiled(self, is_compiled: bool) -> None:
        for tap in self._living():  # whoever is called
            tap.is_compiled = is_compiled

    def find_called(self) -> ForwardTap | None:
        """The tap of the wrapper that this thread is in a call of."""
        return next((tap for tap in self._living() if _is_called(tap)), None)

    def _living(self) -> list[ForwardTap]:
        return [tap for tap in (find() for find in self._taps) if tap is not None]

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        pass


def _is_called(tap: ForwardTap) -> bool:
    module = tap.find_module()
    return module is not None and find_call_of(module) is not None


def _returns_as_it_is(module: nn.Module) -> bool:
    """Return whether what the forward of a module returns reaches the tap on it unchanged."""
    wrapped = getattr(module, "_orig_mod", module)
    return all(_keeps_values(hook) for each in (module, wrapped) for hook in each._forward_hooks.values())


def _keeps_values(hook: object) -> bool:
    return isinstance(hook, (*READERS, EndHook)) or getattr(hook, "keeps_values", False) is True
