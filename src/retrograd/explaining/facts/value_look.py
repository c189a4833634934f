"""Base class of what reads values of operations while they are noted, on steps that are looked at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from retrograd.core.history.facts import Operation
from retrograd.core.hooks.engine import grad_enabled, is_transformed
from retrograd.core.hooks.torch_calls import TorchCall
from retrograd.core.recording.fact_source import FactHost


class ValueLook:
    """Is shown each operation that is noted, and reduces what it needs on the tensor's own device.

    It never waits for a device before :meth:`drain`, holds no tensor of the program's beyond a pass, and makes no node:
    it reads by ``carry_out_unseen`` from ``without_graph(tensor)``.

    Attributes:
        is_wanted: operations are noted for it at every look, not at the first two recorded steps alone.
    """

    is_wanted = False

    def __init__(self, host: FactHost) -> None:
        self.host = host

    def see(self, number: int, noted: Operation, call: TorchCall) -> None:
        """An operation was called.

        Args:
            number: among those noted.
            noted: the operation, as text.
            call: ``call.operands`` are the tensors that it took, ``call.made`` those that it made.
        """

    def pass_begins(self, noted: Sequence[Operation], loss: int) -> None:
        """A backward pass begins from the result of the operation ``loss``, −1 where that was not noted."""

    def forget(self) -> None:
        """No pass comes of what was shown: let go of the program's tensors."""

    def drain(self) -> None:
        """A device may be waited for: record facts."""


def is_readable(tensor: Tensor) -> bool:
    """Return whether values of a tensor may be read: it is plain, strided, not empty, and grad mode is on."""
    is_plain = type(tensor) is Tensor and not is_transformed(tensor) and tensor.layout is torch.strided
    return is_plain and grad_enabled() and tensor.numel() > 0 and not tensor.is_meta
