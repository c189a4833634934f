"""Which checkpointed part a forward belongs to, when it first runs and when it is computed again.

Torch has no name for such a part. What stands for it is the object that torch itself keeps for it from the forward
to the backward pass: a frame whose saved-tensor hooks are set, or the context of the reentrant kind's node.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from retrograd.hooks.engine import grad_enabled

_SAVES = "_checkpoint_hook.__init__.<locals>.pack_hook"
_LOADS = "_checkpoint_hook.__init__.<locals>.unpack_hook"
_FORWARD: CodeType = CheckpointFunction.forward.__code__
_BACKWARD: CodeType = CheckpointFunction.backward.__code__


def part_running() -> Any:
    """What stands for the innermost checkpointed part whose forward runs now for the first time; None outside of one.

    Without grad only the reentrant kind can be running, which is found on the stack.
    """
    if not grad_enabled():
        frame = _find(_FORWARD)
        return None if frame is None else frame.f_locals["ctx"]
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    save: Any = None if hooks is None else hooks[0]
    if getattr(save, "__qualname__", "") != _SAVES:
        return None
    return dict(zip(save.__code__.co_freevars, save.__closure__, strict=True))["frame"].cell_contents


def part_computed_again() -> Any:
    """What stands for the part that a backward pass computes again now; None outside of one."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _BACKWARD:
            return frame.f_locals["ctx"]
        if frame.f_code.co_qualname == _LOADS:
            return frame.f_locals["frame"]
        frame = frame.f_back
    return None


def _find(code: CodeType) -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame
