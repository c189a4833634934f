"""A stretch of memory as the threads see it that write it to a file and read it again."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.policies.disk.free_space import Extent
from retrograd.policies.disk.reading import Reading
from retrograd.policies.policy import Packed


class Stretch(Packed):
    """A stretch of memory on its way to the disk, there, or on its way back.

    Attributes:
        nbytes: its size.
        values: the memory, until it has been written; for good if it was not.
        ready: when it is computed, on a device.
        extent: where it is in the file.
        coming: what reads it with others before it is asked for, and at which byte of that it is.
        is_wanted: it is needed so soon that it need not be written any more.
    """

    __slots__ = ("coming", "extent", "is_wanted", "nbytes", "ready", "values")

    nbytes: int
    values: Tensor | None
    ready: torch.cuda.Event | None
    extent: Extent | None
    coming: tuple[Reading, int] | None
    is_wanted: bool
