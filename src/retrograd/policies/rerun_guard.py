"""What a forward has to fulfil that runs again in the backward pass, and what is raised where it does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from retrograd.errors import OverwrittenError, RecomputeError
from retrograd.hooks.saved import is_plain
from retrograd.policies.generators import Drawing
from retrograd.policies.late_comparison import LateComparison
from retrograd.policies.overwriting import FILLED_LATE, Place, refuse_overwritten
from retrograd.policies.policy import Stays
from retrograd.policies.samples import Sample, numbers_are_apart, take_sample, tolerance_of


def other_run(place: Place, what: str) -> RecomputeError:
    """That a second run was not like the first."""
    return RecomputeError(
        f"{place} was run again for its gradient and did not compute the same: {what}.",
        repair="make its forward a function of its arguments, parameters, buffers that it does not write to, and the"
        " generators of torch, Python and NumPy; or keep this module by another policy than Recompute.",
        reason="the gradient would be that of another forward. A counter, the time, a file, or a generator of the"
        " module's own is not put back.",
    )


@dataclass(slots=True)
class RerunGuard:
    """One forward of one module.

    Attributes:
        place: the module.
        find_place: says where this thread is in the model.
        stays: whether a tensor is a parameter or a buffer: running statistics go on, and the second run sees others.
        late: compares what is on a device.
        drawing: what it draws.
    """

    place: Place
    find_place: Callable[[], Place]
    stays: Stays
    late: LateComparison
    drawing: Drawing = field(default_factory=Drawing)

    def end_first(self) -> None:
        """The first run is over."""
        self.drawing.end()

    def second_run(self) -> AbstractContextManager[None]:
        """Draws the same numbers."""
        return self.drawing.again()

    def take_sample(self, tensor: Tensor) -> Sample | None:
        """What is kept of a tensor that is saved; None where other values do no harm."""
        if self.stays(tensor, tensor.untyped_storage()) or self.find_place().kind in FILLED_LATE:
            return None
        return take_sample(tensor)

    def compare(self, sample: Sample, tensor: Tensor) -> None:
        """What is on a device is compared later, so that nobody waits for it."""
        again = take_sample(tensor) if is_plain(tensor) else None
        other: Place | None = None
        if isinstance(sample, Tensor) and isinstance(again, Tensor):
            other = self.late.note(sample, again, tensor.dtype, self.place)
        elif isinstance(sample, list) and isinstance(again, list):
            other = self.place if numbers_are_apart(sample, again, tolerance_of(tensor.dtype)) else None
        if other is not None:
            raise other_run(other, "a saved tensor has other values than in the forward")

    def refuse_run(self, error: Exception) -> NoReturn:
        """Other tensors were saved, or fewer, or more."""
        first = str(error).strip().split("\n", 1)[0].removeprefix("torch.utils.checkpoint: ").rstrip(".:")
        raise other_run(self.place, f"{first[:1].lower()}{first[1:]}") from error

    def refuse_saved(self, size: torch.Size, dtype: torch.dtype, versions: tuple[int, int], storage: int) -> NoReturn:
        """A saved tensor has been written to."""
        refuse_overwritten(size, dtype, versions, self.place, storage)

    def refuse_parameter(self, name: str, versions: tuple[int, int]) -> NoReturn:
        """A parameter has."""
        raise OverwrittenError(
            f"The parameter {name!r} was written to in place before {self.place} ran its forward again: it was at"
            f" version {versions[0]} and is at version {versions[1]}.",
            repair="update parameters after the backward pass, or keep this module by another policy than Recompute.",
            reason="the gradient would be that of other values than the loss.",
        )
