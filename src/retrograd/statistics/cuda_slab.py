"""A slab for CUDA devices: a tensor is read in one pass, by two kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.statistics.cuda_kernel import count_programs, merge_into_row
from retrograd.statistics.pieces import split_flat
from retrograd.statistics.torch_slab import TorchSlab


class CudaSlab(TorchSlab):
    """As :class:`~retrograd.statistics.torch_slab.TorchSlab`, with the same rows to the last bit every time.

    Args:
        device: the device of the tensors that it will read.
        histogram: count binary exponents too.
        programs: kernel programs that run at once; None: as many as keep the device busy.
    """

    def __init__(
        self, device: str | torch.device = "cuda", histogram: bool = True, programs: int | None = None
    ) -> None:
        super().__init__(device, histogram)
        self._programs = programs or count_programs(self.device)

    def _fold(self, new: Tensor, old: Tensor | None, row: int, repeats: int) -> None:
        if new.is_contiguous():
            self._launch(new, old, row, repeats)
        elif old is None:
            for piece in split_flat(new, self._chunk):
                self._launch(piece, None, row, repeats)
        else:
            for after, before in zip(split_flat(new, self._chunk), split_flat(old, self._chunk), strict=True):
                self._launch(after, before, row, repeats)

    def _launch(self, new: Tensor, old: Tensor | None, row: int, repeats: int) -> None:
        bins = self._bins[row] if self.histogram else self._bins[0]
        merge_into_row(new, old, repeats, self._counts[row], self._moments[row], bins, self._programs)
