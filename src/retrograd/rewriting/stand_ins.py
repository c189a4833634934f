"""What stands for the parameters of a module while it is called.

It is an attribute of the module, found before the parameter of that name, which stays where it is. All threads see it,
so a module of which something is to stand for a parameter is called by one thread at a time. Several rewritings may
each put something there; whoever comes later has what those before it have made, and they leave in any order.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_lock = threading.Lock()


class StandIns:
    """Those of one module; the same object for all that rewrite it."""

    def __init__(self) -> None:
        self._alone = threading.RLock()
        self._layers: dict[str, list[tuple[object, Any]]] = {}

    def enter(self) -> None:
        """A call begins; wait until no other thread is in one."""
        self._alone.acquire()

    def find(self, module: nn.Module, name: str) -> Any:
        """What stands for a parameter now; None where it stands for itself."""
        return vars(module).get(name)

    def put(self, module: nn.Module, name: str, call: object, value: Any) -> None:
        """Let ``value`` stand for a parameter until this call ends."""
        attributes = vars(module)
        if name not in self._layers:
            self._layers[name] = [(None, attributes[name])] if name in attributes else []
        self._layers[name].append((call, value))
        attributes[name] = value

    def leave(self, module: nn.Module, call: object) -> None:
        """This call has ended: what it had put there stands for nothing any more."""
        attributes = vars(module)
        for name, layers in list(self._layers.items()):
            layers[:] = [layer for layer in layers if layer[0] is not call]
            if layers:
                attributes[name] = layers[-1][1]
            else:
                attributes.pop(name, None)
            if all(owner is None for owner, _ in layers):
                del self._layers[name]
        self._alone.release()


_stand_ins: WeakKeyDictionary[nn.Module, StandIns] = WeakKeyDictionary()


def stand_ins_of(module: nn.Module) -> StandIns:
    """Those of this module."""
    with _lock:
        return _stand_ins.setdefault(module, StandIns())
