"""Whether a stretch of memory can be made again: it is, in a pass that is measured, and compared bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.budget.findings import Tried
from retrograd.budget.item import Item
from retrograd.budget.marks import take_time
from retrograd.budget.recipe import Rerun
from retrograd.hooks.dispatch import below_autograd
from retrograd.hooks.saved import view_storage


class Trial:
    """What is done with an item when it is first asked for. It takes memory for what is made, and for what is away.

    Args:
        rerun: how it might be made again.
    """

    def __init__(self, rerun: Rerun) -> None:
        self._rerun = rerun

    @property
    def is_possible(self) -> bool:
        """Whether it can be tried now."""
        return self._rerun.is_possible

    def __call__(self, item: Item, values: Tensor) -> None:
        """Try, and note what it takes."""
        rerun = self._rerun
        sources = [source for source in rerun.sources if isinstance(source, Item) and source.log is item.log]
        if len(sources) < len(rerun.sources) or not rerun.is_possible:
            return
        try:
            with below_autograd():
                # what is away is there before the clock is read, and held until it is read again
                away = [source.lend(is_kept=False) for source in sources]
                began = take_time(values)
                storage, beside = rerun.run(is_trial=True)
                ended = take_time(values)
                is_same = _have_same_bits(storage, values)
        except RuntimeError:  # no memory for it, or an operation that does not run by itself: it is not made again
            return
        del away
        numbers = tuple(source.number for source in sources)
        item.log.tried[item.number] = Tried(str(rerun), numbers, began, ended, beside, rerun.numbers, is_same)


def _have_same_bits(storage: torch.UntypedStorage, values: Tensor) -> bool | Tensor:
    """A device is not waited for: what says it is one element there."""
    if storage.nbytes() != values.nbytes:
        return False
    made = view_storage(storage, values, 0, tuple(values.shape), (1,))
    if not values.is_cuda:
        return torch.equal(made.view(torch.uint8), values.view(torch.uint8))
    is_wide = (values.nbytes | int(values.storage_offset()) * values.itemsize) % 8 == 0  # in less memory, then
    dtype = torch.int64 if is_wide else torch.uint8
    return (made.view(dtype) == values.view(dtype)).all()
