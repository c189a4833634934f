"""Training loops without an optimizer of torch: has somebody updated the parameters since the last backward?"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_PROBES = 8


class ManualUpdates:
    """Remembers the state of a few parameters when a backward ends.

    An update by hand shows in a parameter's version (``p -= lr * p.grad``), or, where it is written past autograd
    (``p.data``), in its gradient being cleared or replaced before the next forward. Gradients that lie there as
    backward left them mean accumulation.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._before: list[tuple[torch.Tensor, int, int | None]] = []

    def remember(self) -> None:
        """A backward has ended."""
        reached = [parameter for parameter in self._parameters if parameter.grad is not None][:_PROBES]
        self._before = [(p, p._version, _version(p.grad)) for p in reached or self._parameters[:_PROBES]]

    def touched(self) -> bool:
        """Whether an update was made since then. Where no gradient was kept (``torch.autograd.grad``), it is assumed."""
        return any(
            version != parameter._version or grad is None or grad != _version(parameter.grad)
            for parameter, version, grad in self._before
        )


def _version(gradient: torch.Tensor | None) -> int | None:
    return None if gradient is None else gradient._version
