"""What hooks ask of this room, through ``hooks/in_graphs.py``, which loads it."""

from __future__ import annotations

from torch import nn

from retrograd.compiled.dynamo import watch_calls as watch_dynamo
from retrograd.compiled.dynamo import watch_graphs
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
    "watch_graphs",
]

is_loaded = True


def watch_calls() -> list[Undo]:
    """Have calls of modules with taps traced in short, and guarded; and what fails in them forgotten."""
    return [forget_failed_calls(), *watch_dynamo()]


def join_wrapped(tap: ForwardTap, module: nn.Module) -> TapOfWrappers:
    """Have a tap on a compiled wrapper be shown what the module in it returns; returns what stands there for it."""
    found = TapOfWrappers.on(module)
    found.join(tap)
    return found
