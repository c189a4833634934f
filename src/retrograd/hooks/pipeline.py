"""Which stage of a pipeline runs now, and whether it only tries out its shapes."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

_FORWARD = ("forward_one_chunk",)
"""The method of torch's stages that runs a part of the model on one micro-batch."""

_REHEARSAL = ("_forward_metadata_inference", "_shape_inference")
"""Those that run it before the first step, on memory that nobody has written to, to learn the shapes."""


def running_stage() -> int | None:
    """The index, in the whole pipeline, of the stage whose forward runs in this thread; None where none does."""
    stage = _find_stage(_FORWARD)
    return None if stage is None else int(stage.stage_index)


def is_rehearsal() -> bool:
    """Whether a stage in this thread runs its part of the model for the shapes alone."""
    return _find_stage(_REHEARSAL) is not None


def _find_stage(methods: Collection[str]) -> Any:
    """The stage of which one of these methods runs in this thread."""
    pipelining: Any = sys.modules.get("torch.distributed.pipelining.stage")
    frame = None if pipelining is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in methods:
            owner = frame.f_locals.get("self")
            if isinstance(owner, pipelining._PipelineStageBase):
                return owner
        frame = frame.f_back
    return None
