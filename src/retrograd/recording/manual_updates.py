"""Training loops without an optimizer of torch: has somebody updated the parameters since the last backward?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdRef

from retrograd.hooks.distributed import local_part

_PROBES = 8
_SAMPLED = 1
_SAMPLE = 64


class ManualUpdates:
    """Remembers a few parameters as they are when a backward ends. It does not hold them.

    An update by hand shows in a parameter's version (``p -= lr * p.grad``), in its gradient being cleared or replaced,
    or, where it is written past autograd (``p.data``), in the numbers themselves. Gradients that lie there as backward
    left them, and parameters as they were, mean accumulation. Where a pass goes to other leaves than the one before,
    they were made anew.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(map(WeakIdRef, parameters))
        self._before: list[_ParameterState] = []
        self._are_others = False

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look at these too."""
        self._parameters += map(WeakIdRef, parameters)

    def look_at(self, parameters: list[torch.Tensor]) -> None:
        """A pass begins that goes to these, and to none that is known of otherwise."""
        self._are_others = not any(probe.is_of(each) for probe in self._before for each in parameters)
        self._parameters = list(map(WeakIdRef, parameters))

    def remember(self) -> None:
        """A backward has ended."""
        self._are_others = False
        trained = (p for p in self._alive() if p.requires_grad and not is_lazy(p))
        reached = list(islice((p for p in self._alive() if p.grad is not None), _PROBES))
        probed = reached or islice(trained, _PROBES)
        self._before = [_ParameterState(p, sampled=number < _SAMPLED) for number, p in enumerate(probed)]

    def touched(self) -> bool:
        """Whether an update was made since then, and has not been told yet."""
        if not self._before or not (self._are_others or any(probe.has_changed() for probe in self._before)):
            return False
        self._before.clear()
        return True

    def _alive(self) -> Iterator[torch.Tensor]:
        return (parameter for find in self._parameters if (parameter := find()) is not None)


class _ParameterState:
    """A parameter as it was. Its numbers are compared only where nothing else tells, for that waits for a device."""

    __slots__ = ("_gradient", "_parameter", "_sample", "_version")

    def __init__(self, parameter: torch.Tensor, *, sampled: bool) -> None:
        self._parameter = WeakIdRef(parameter)
        self._version = parameter._version
        self._gradient = _state(parameter.grad)
        self._sample = _sample(parameter) if sampled else None

    def is_of(self, parameter: torch.Tensor) -> bool:
        return self._parameter() is parameter

    def has_changed(self) -> bool:
        parameter: torch.Tensor | None = self._parameter()
        if parameter is None:  # nothing is added to its gradient any more
            return True
        return (
            self._version != parameter._version
            or self._gradient != _state(parameter.grad)
            or (self._sample is not None and not torch.equal(self._sample, _sample(parameter)))
        )


def _state(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    flat: torch.Tensor = local_part(parameter.detach()).reshape(
        -1
    )  # of a DTensor the part that is here: else processes would talk
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()
