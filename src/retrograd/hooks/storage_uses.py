"""Who else holds a piece of memory."""

from __future__ import annotations

import torch
from torch import Tensor

_OWN = 2
"""The tensor that is asked about, and the Python object of its storage."""


def is_held_elsewhere(values: Tensor) -> bool:
    """Whether anything but this tensor object keeps its memory alive."""
    storage = values.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > _OWN)
