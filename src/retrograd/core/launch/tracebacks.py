"""The traceback of a program that ends with an exception: the one that Python prints without us."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch.overrides

from retrograd.core.errors import RetrogradError
from retrograd.core.hooks.torch_calls import is_ours, is_stand_in

_OVERRIDES = torch.overrides.__file__
"""File of the function by which torch asks a function mode, before the mode calls the same function again."""

_BELOW = (_OVERRIDES, str(Path(torch.__file__).with_name("_ops.py")))
"""Files of what a mode calls, to call what was asked for."""


def hide_our_frames() -> None:
    """Print exceptions that end the process without our frames; whatever printed them so far still does."""
    print_exception = sys.excepthook

    def print_clean(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # else it is printed as it is
            clean_traceback(error)
        print_exception(kind, error, error.__traceback__)

    sys.excepthook = print_clean


def clean_traceback(error: BaseException) -> None:
    """Take our frames, and what torch put there because of them, out of the traceback of an exception.

    The exceptions that led to it are treated alike. An exception of our own keeps its frames: they are what is wrong.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        if not isinstance(each, RetrogradError):
            each.__traceback__ = _rebuild(_drop_ours(each.__traceback__))


def _drop_ours(trace: TracebackType | None) -> list[TracebackType]:
    kept: list[TracebackType] = []
    is_below = False
    while trace is not None:
        frame = trace.tb_frame
        if is_ours[frame.f_code.co_filename] or is_stand_in(frame):
            is_below = True
        elif not (is_below and frame.f_code.co_filename in _BELOW):
            if is_below:
                _drop_way_to_mode(kept, frame)
            kept.append(trace)
            is_below = False
        trace = trace.tb_next
    return kept


def _drop_way_to_mode(kept: list[TracebackType], frame: FrameType) -> None:
    """Drop the first call of a function that a mode has called again, and torch's way from there to the mode."""
    while kept and kept[-1].tb_frame.f_code.co_filename == _OVERRIDES:
        kept.pop()
    if kept and kept[-1].tb_frame.f_code is frame.f_code:
        kept.pop()


def _rebuild(kept: list[TracebackType]) -> TracebackType | None:
    trace: TracebackType | None = None
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace
