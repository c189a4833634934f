"""A slab for CUDA devices: a tensor is read in one pass, by two kernels."""

from __future__ import annotations

from array import array
from itertools import repeat

import torch
from torch import Tensor

from retrograd.core.statistics.cuda_kernel import count_programs, read_on_device
from retrograd.core.statistics.torch_slab import TorchSlab, split_flat


class CudaSlab(TorchSlab):
    """As :class:`~retrograd.core.statistics.torch_slab.TorchSlab`, but the same elements give the same bits every time.

    Args:
        device: the device of the tensors that it will read.
        histogram: count binary exponents too.
        programs: kernel programs that run at once; None: as many as keep the device busy.
        turns: what counts the rows that are reached.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        histogram: bool = True,
        programs: int | None = None,
        turns: array[int] | None = None,
    ) -> None:
        super().__init__(device, histogram, turns)
        self._programs = programs or count_programs(self.device)

    def _fold(self, new: Tensor, old: Tensor | None, row: int, repeats: int) -> None:
        size = new.numel() if new.is_contiguous() else self._chunk
        before_pieces = repeat(None) if old is None else split_flat(old, size)
        for after, before in zip(split_flat(new, size), before_pieces, strict=False):
            part, bins = read_on_device(after, before, histogram=self.histogram, programs=self._programs)
            self._add(row, part, bins if self.histogram else None, repeats)
