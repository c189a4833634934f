"""Stages of a pipeline, found on the stack of the thread in which torch runs them."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

_STAGES = "torch.distributed.pipelining.stage"

_FORWARD = ("forward_one_chunk",)
"""The method of torch's stages that runs a part of the model on one micro-batch."""

_BACKWARD = ("backward_maybe_with_nosync",)
"""The method that runs a backward pass of a stage."""

_REHEARSAL = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")
"""Functions that run a stage before the first step, on memory that nobody has written to, to learn the shapes."""


def may_have_stages() -> bool:
    """Return whether the program may run stages of a pipeline at all."""
    return _STAGES in sys.modules


def running_stage() -> int | None:
    """The index, in the whole pipeline, of the stage whose forward runs in this thread; None where none does."""
    stage = _find_stage(_FORWARD)
    return None if stage is None else int(stage.stage_index)


def is_reduced_by_stage(wrapper: Any) -> bool:
    """Return whether a stage runs a step's last pass, in which it has this wrapper reduce though no forward did."""
    found = _find_frame(_BACKWARD) if wrapper is not None else None
    return found is not None and found.f_locals["self"].submod is wrapper and bool(found.f_locals.get("last_backward"))


def is_second_half() -> bool:
    """Return whether a stage in this thread runs the half of a backward pass that is for the parameters alone.

    It begins at gradients that the half before it has computed, so that hooks on tensors see these once more.
    """
    found = _find_frame(_BACKWARD)
    return found is not None and found.f_locals.get("backward_type") == "weight"


def is_rehearsal() -> bool:
    """Return whether a stage in this thread runs its part of the model for the shapes alone."""
    return _STAGES in sys.modules and _find_stage(_REHEARSAL) is not None


def _find_stage(methods: Collection[str]) -> Any:
    """The stage of which one of these methods runs in this thread."""
    frame = _find_frame(methods)
    return None if frame is None else frame.f_locals["self"]


def _find_frame(methods: Collection[str]) -> FrameType | None:
    """The call of one of these methods of a stage that runs in this thread."""
    pipelining: Any = sys.modules.get(_STAGES)
    frame = None if pipelining is None else sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in methods else None
        if isinstance(owner, pipelining._PipelineStageBase):
            return frame
        frame = frame.f_back
    return None
