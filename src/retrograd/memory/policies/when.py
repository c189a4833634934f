"""Thresholds: which storage ranges a policy is asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from retrograd.core.errors import SavedPolicyError
from retrograd.memory.policies.policy import Packed, Policy, Saved, check_policy
from retrograd.memory.policies.recompute import Recompute


class When(Policy):
    """A policy for some of what is saved, and another, or none, for the rest.

    ::

        When(Disk(), min_bytes=1 << 20, otherwise=Bfloat16())
        When(EightBit(), dtypes=[torch.float32], test=lambda saved: "attn" in saved.path)

    Args:
        policy: for what fulfils all conditions.
        min_bytes: of storage ranges. Those that are smaller than the policy's own ``min_bytes`` are included only
            if this says so.
        dtypes: of the values; all where it is left out.
        test: any question about a :class:`~retrograd.memory.policies.policy.Saved`.
        otherwise: for the rest; it stays in memory where it is left out.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        min_bytes: int | None = None,
        dtypes: Iterable[torch.dtype] | None = None,
        test: Callable[[Saved], bool] | None = None,
        otherwise: Policy | None = None,
    ) -> None:
        self.policy = check_policy(policy)
        self.otherwise = None if otherwise is None else check_policy(otherwise)
        if any(isinstance(part, Recompute) for part in (policy, otherwise)):
            raise SavedPolicyError(
                "Recompute() cannot be given for some tensors only.",
                repair='name the modules instead: {"blocks.*": Recompute()}.',
                reason="it runs a module again, and drops all that the module saves.",
            )
        self._least = policy.min_bytes if min_bytes is None else min_bytes
        self.min_bytes = self._least if otherwise is None else min(self._least, otherwise.min_bytes)
        self.dtypes = None if dtypes is None else frozenset(dtypes)
        self.test = test
        self.is_exact = policy.is_exact and (otherwise is None or otherwise.is_exact)

    def pack(self, saved: Saved) -> Packed | None:
        """Have the one policy pack it, or the other."""
        if self._is_meant(saved):
            return self.policy.pack(saved)
        other = self.otherwise
        return None if other is None or saved.nbytes < other.min_bytes else other.pack(saved)

    def open(self) -> None:
        """Open both policies."""
        for policy in self._parts():
            policy.open()

    def close(self) -> None:
        """Close both policies."""
        for policy in self._parts():
            policy.close()

    def _is_meant(self, saved: Saved) -> bool:
        return (
            saved.nbytes >= self._least
            and (self.dtypes is None or saved.values.dtype in self.dtypes)
            and (self.test is None or self.test(saved))
        )

    def _parts(self) -> list[Policy]:
        return [part for part in (self.policy, self.otherwise) if part is not None]
