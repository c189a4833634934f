"""Drop what a module saves, and run its forward again when the backward pass needs it."""

from __future__ import annotations

from retrograd.saved.policy import Packed, Policy, Saved


class Recompute(Policy):
    """What a module saves is dropped; the backward pass runs its forward again, with the same random numbers.

    Give it to the modules to run again: ``{"blocks.*": Recompute()}`` recomputes each block by itself. It holds the
    module's inputs, costs one more forward, and is exact as long as the forward is the same again; buffers are put
    back afterwards, so that running statistics count each batch once. It is done by torch's own non-reentrant
    checkpoint, which knows about autocast, random states, retained graphs and double backward, and stops as soon as it
    has what is needed; hooks around the module's call take the place of the changed line.
    """

    def pack(self, saved: Saved) -> Packed | None:
        """Never asked: a module is run again, not a tensor."""
        return None
