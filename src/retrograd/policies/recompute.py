"""Drop what a module saves, and run its forward again when the backward pass needs it; raise where the two differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from retrograd.errors import OverwrittenError, RecomputeError
from retrograd.hooks.saved import is_plain
from retrograd.policies.generators import DrawnNumbers
from retrograd.policies.overwriting import FILLED_LATE, SaveSite, refuse_overwritten
from retrograd.policies.policy import Packed, Policy, Saved, Stays
from retrograd.policies.samples import LateComparison, Sample, numbers_are_apart, take_sample, tolerance_of


def make_error(site: SaveSite, what: str) -> RecomputeError:
    """The error that says that a second run was not like the first."""
    return RecomputeError(
        f"{site} was run again for its gradient and did not compute the same: {what}.",
        repair="make its forward a function of its arguments, parameters, buffers that it does not write to, and the"
        " generators of torch, Python and NumPy; or keep this module by another policy than Recompute.",
        reason="the gradient would be that of another forward. A counter, the time, a file, or a generator of the"
        " module's own is not put back.",
    )


@dataclass(slots=True)
class RecomputeGuard:
    """One forward of one module.

    Attributes:
        site: the module.
        find_site: says where this thread is in the model.
        stays: whether a tensor is a parameter or a buffer: running statistics go on, and the second run sees others.
        late: compares what is on a device.
        drawing: what it draws.
    """

    site: SaveSite
    find_site: Callable[[], SaveSite]
    stays: Stays
    late: LateComparison
    drawing: DrawnNumbers = field(default_factory=DrawnNumbers)

    def end_first(self) -> None:
        """Note the end of the first run."""
        self.drawing.end()

    def second_run(self) -> AbstractContextManager[None]:
        """Draw the same numbers inside of it."""
        return self.drawing.again()

    def take_sample(self, tensor: Tensor) -> Sample | None:
        """Sample a tensor that is saved; None where other values do no harm."""
        if self.stays(tensor, tensor.untyped_storage()) or self.find_site().kind in FILLED_LATE:
            return None
        return take_sample(tensor)

    def compare(self, sample: Sample, tensor: Tensor) -> None:
        """Compare a sample with a tensor of the second run; on a device later, so that nobody waits for it."""
        again = take_sample(tensor) if is_plain(tensor) else None
        other: SaveSite | None = None
        if isinstance(sample, Tensor) and isinstance(again, Tensor):
            other = self.late.note(sample, again, tensor.dtype, self.site)
        elif isinstance(sample, list) and isinstance(again, list):
            other = self.site if numbers_are_apart(sample, again, tolerance_of(tensor.dtype)) else None
        if other is not None:
            raise make_error(other, "a saved tensor has other values than in the forward")

    def refuse_run(self, error: Exception) -> NoReturn:
        """Raise: the second run saved other tensors, or fewer, or more."""
        first = str(error).strip().split("\n", 1)[0].removeprefix("torch.utils.checkpoint: ").rstrip(".:")
        raise make_error(self.site, f"{first[:1].lower()}{first[1:]}") from error

    def refuse_saved(self, size: torch.Size, dtype: torch.dtype, versions: tuple[int, int], storage: int) -> NoReturn:
        """Raise: a saved tensor was written to."""
        refuse_overwritten(size, dtype, versions, self.site, storage)

    def refuse_parameter(self, name: str, versions: tuple[int, int]) -> NoReturn:
        """Raise: a parameter was written to."""
        raise OverwrittenError(
            f"The parameter {name!r} was written to in place before {self.site} ran its forward again: it was at"
            f" version {versions[0]} and is at version {versions[1]}.",
            repair="update parameters after the backward pass, or keep this module by another policy than Recompute.",
            reason="the gradient would be that of other values than the loss.",
        )


class Recompute(Policy):
    """Drop what a module saves; the backward pass runs its forward again, with the same random numbers.

    Give it to the modules to run again: ``{"blocks.*": Recompute()}`` recomputes each block by itself. It holds the
    module's inputs, costs one more forward, and is exact as long as the forward is the same again; buffers are put
    back afterwards, so that running statistics count each batch once. It is done by torch's own non-reentrant
    checkpoint, which knows about autocast, random states, retained graphs and double backward, and stops as soon as it
    has what is needed; hooks around the module's call take the place of the changed line.

    The random numbers are those of torch, of ``random`` and of ``numpy.random``. Of each tensor that is saved sixteen
    elements are kept and compared: a forward that is not the same again raises
    :class:`~retrograd.errors.RecomputeError` where the gradient would use it; on a CUDA device some time later, or when
    :func:`~retrograd.saved.keeping.keep_saved` ends, since nothing waits for the device.
    """

    def __init__(self) -> None:
        self._late = LateComparison()

    @property
    def late(self) -> LateComparison:
        """Samples that have still to be compared."""
        return self._late

    def pack(self, saved: Saved) -> Packed | None:
        """Never asked: a module is run again, not a tensor."""
        return None

    def close(self) -> None:
        """Wait for what has still to be compared.

        Raises:
            RecomputeError: a module was not the same again.
        """
        site = self._late.end()
        if site is not None:
            raise make_error(site, "a saved tensor had other values than in the forward")
