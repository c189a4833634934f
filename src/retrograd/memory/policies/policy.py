"""The contract of a policy: where the memory that autograd holds waits for the backward pass.

Autograd saves tensors; memory is held by storages. A policy is therefore given a :class:`Saved`: a storage range, once,
however many tensors in it are saved. It returns a :class:`Packed`, which can bring the range back, and whose last
reference goes when autograd lets go. Views, strides, the check that nothing was overwritten, and what stays anyway
(parameters, small tensors) are no concern of a policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Size, Tensor

from retrograd.core.errors import SavedPolicyError

DEFAULT_MIN_BYTES = 64 * 1024
"""Below this a storage range is left alone. In a ResNet-50 at 96 px a third of the saved tensors is smaller, and
together they are a hundredth of its bytes."""

NEVER = 2**63 - 1
"""A ``min_bytes`` that no memory reaches."""


@dataclass(slots=True, eq=False)
class Saved:
    """A storage range that autograd is about to hold. It is not to be changed.

    Attributes:
        values: the memory itself, detached and one-dimensional. It may be shared with tensors of the program: it must
            not be written to, and holding it holds the memory.
        shape: shape of the tensor that was saved first of those that lie in it.
        path: the module whose forward saves it; an empty text outside of modules.
        number: how many ranges were packed before it in this forward pass. A model that does the same in each step
            gives the same number to the same activation.
        version: how often the memory has been written to, as the tensors of the program count.
        nbytes: of memory, which would be held if no policy took them away.
    """

    values: Tensor
    shape: Size
    path: str
    number: int
    version: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.values.nbytes


class Packed:
    """A :class:`Saved` that a policy has taken over. Subclasses write ``restore``.

    Whatever it holds it must release when it is deleted, which may happen in any thread, before it was ever restored.

    Attributes:
        resident_bytes: what it holds in memory while it waits, in bytes: on the device of the values, or in the RAM
            of the host where that device is the CPU.
    """

    __slots__ = ("__weakref__", "resident_bytes")

    def __init__(self, resident_bytes: int = 0) -> None:
        self.resident_bytes = resident_bytes

    def restore(self) -> Tensor:
        """The values again: one-dimensional, with the dtype, device and number of elements that they had.

        Called when a backward pass needs them and nobody holds the memory any more. It may be called several times
        (``retain_graph``), or never (a branch that is not used), and from any thread.
        """
        raise NotImplementedError

    def notice(self) -> None:
        """A backward pass needs the values, and the memory happens to be alive still, so that nothing is restored.

        For policies that look ahead.
        """


class Policy:
    """Decides what becomes of the memory that autograd holds. Subclasses write ``pack``.

    Attributes:
        is_exact: every bit comes back.
        min_bytes: smaller ranges are not offered to the policy; they stay in memory.
        has_failed: it has warned that it cannot do its work, and leaves all that it is offered.
    """

    is_exact: bool = True
    has_failed: bool = False
    min_bytes: int = DEFAULT_MIN_BYTES

    def pack(self, saved: Saved) -> Packed | None:
        """Take over a storage range; None leaves it where it is.

        Runs in the middle of the forward pass, and should wait for nothing. The memory is freed when neither the
        program nor what is returned refers to ``saved.values``.
        """
        raise NotImplementedError

    def open(self) -> None:
        """Something begins to use this policy. Called once for every :func:`keep_saved`."""

    def close(self) -> None:
        """Something has ended using it; with the last one, threads end too. What is packed must still come back."""

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({given})"


class UsedPolicy(Policy):
    """A policy that holds threads or memory as long as somebody uses it. Subclasses write ``release``."""

    def __init__(self) -> None:
        self._users = 0

    def open(self) -> None:
        """Count one more user."""
        self._users += 1

    def close(self) -> None:
        """Count one user less; with the last one all is released that is not needed to bring back what is packed."""
        self._users -= 1
        if not self._users:
            self.release()

    def release(self) -> None:
        """End threads and let go of memory. What is packed must still come back."""
        raise NotImplementedError


def check_policy(policy: object) -> Policy:
    """A policy as it is.

    Raises:
        SavedPolicyError: for anything else.
    """
    if isinstance(policy, Policy):
        return policy
    raise SavedPolicyError(
        f"{policy!r} is not a policy for saved tensors.",
        repair="give an instance such as rg.saved.Disk(), or a dict from module patterns to policies.",
    )


class AsIs(Policy):
    """Saved tensors stay in memory, as without any policy. For parts of a model that another policy would take in."""

    min_bytes = NEVER

    def pack(self, saved: Saved) -> Packed | None:
        """Leave it in memory."""
        return None
