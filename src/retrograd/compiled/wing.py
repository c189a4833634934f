"""What hooks ask of this room, through ``hooks/in_graphs.py``, which loads it.

Loaded with it are the three files that rest on names of torch's compiler, each of which may be missing.
"""

from __future__ import annotations

import sys
from importlib import import_module

from torch import nn

from retrograd.compiled.handles import forget_run_ids, make_handle
from retrograd.compiled.inputs import forget_failed_calls, trace_entry, trace_exit
from retrograd.compiled.parts import find_part, runs_compiled_code
from retrograd.compiled.rules import trace_forward, trace_rules
from retrograd.compiled.taps import trace_tap
from retrograd.compiled.wrappers import TapOfWrappers
from retrograd.core.hooks.listeners import Undo
from retrograd.core.hooks.module import ForwardTap

__all__ = [
    "find_part",
    "forget_run_ids",
    "make_handle",
    "runs_compiled_code",
    "trace_entry",
    "trace_exit",
    "trace_forward",
    "trace_rules",
    "trace_tap",
]

is_loaded = True

_OPTIONAL = ("retrograd.compiled.dynamo", "retrograd.compiled.aot", "retrograd.compiled.inductor")


def _load_optional() -> None:
    for name in _OPTIONAL:
        try:
            import_module(name)
        except ImportError as error:
            if error.name != name:
                raise


_load_optional()


def watch_calls() -> list[Undo]:
    """Have calls of modules with taps traced in short, and guarded; and what fails in them forgotten."""
    dynamo = sys.modules.get(_OPTIONAL[0])
    return [forget_failed_calls(), *(dynamo.watch_calls() if dynamo is not None else ())]


def watch_graphs() -> list[Undo]:
    """Have each graph that is compiled mark those of its outputs that it uses."""
    dynamo = sys.modules.get(_OPTIONAL[0])
    return [] if dynamo is None else dynamo.watch_graphs()


def join_wrapped(tap: ForwardTap, module: nn.Module) -> TapOfWrappers:
    """Have a tap on a compiled wrapper be shown what the module in it returns; returns what stands there for it."""
    found = TapOfWrappers.on(module)
    found.join(tap)
    return found
