"""Drop what a module saves, and run its forward again when the backward pass needs it."""

from __future__ import annotations

from retrograd.policies.late_comparison import LateComparison
from retrograd.policies.policy import Packed, Policy, Saved
from retrograd.policies.rerun_guard import other_run


class Recompute(Policy):
    """What a module saves is dropped; the backward pass runs its forward again, with the same random numbers.

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
        """What has still to be compared."""
        return self._late

    def pack(self, saved: Saved) -> Packed | None:
        """Never asked: a module is run again, not a tensor."""
        return None

    def close(self) -> None:
        """Wait for what has still to be compared.

        Raises:
            RecomputeError: a module was not the same again.
        """
        place = self._late.end()
        if place is not None:
            raise other_run(place, "a saved tensor had other values than in the forward")
