"""Leave saved tensors where they are."""

from __future__ import annotations

from retrograd.policies.policy import NEVER, Packed, Policy, Saved


class Keep(Policy):
    """Saved tensors stay in memory, as without any policy. For parts of a model that another policy would take in."""

    min_bytes = NEVER

    def pack(self, saved: Saved) -> Packed | None:
        """Leave it."""
        return None
