"""Numbers on their way from devices to the host, and what is done with them once they are there.

The host runs ahead of a device, and whoever asks a tensor for a number waits until the device has caught up. So numbers
are sent for, and looked for again when the next ones are: a step later, as a rule, they have come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from retrograd.core.hooks.dispatch import carry_out_unseen
from retrograd.core.hooks.engine import without_functions
from retrograd.core.limits import LIMITS

Arrays = list[npt.NDArray[Any]]

Then = Callable[[Arrays], None]
"""Takes the numbers of tensors, in their order."""


def is_far(tensor: Tensor) -> bool:
    """Return whether a device would have to be waited for, to read the numbers of a tensor."""
    return _is_device(tensor.device)


def _is_device(device: torch.device) -> bool:
    return device.type != "cpu"


class Deliveries:
    """What has been sent for, in order: nothing is handed on before what was asked for earlier.

    Args:
        fault: takes what goes wrong with what is done with them.
    """

    def __init__(self, fault: Callable[[str, Exception], None]) -> None:
        self._fault = fault
        self._waiting: deque[_Delivery] = deque()
        self._turn = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tensors: Sequence[Tensor], then: Then) -> None:
        """Send for numbers, as they are now; ``then`` takes them at once if there is nothing to wait for."""
        if self._waiting or any(map(is_far, tensors)):
            with without_functions():
                sent = [carry_out_unseen(partial(_send, each)) for each in tensors]
            self._waiting.append(_Delivery(self._turn, sent, then))
            self._waiting[-1].mark(tensors)
        else:
            with without_functions():
                arrays = carry_out_unseen(lambda: [_read(each.detach()) for each in tensors])
            then(arrays)

    def add_numbers(self, numbers: Sequence[float | Tensor], then: Callable[[list[float]], None]) -> None:
        """Send for single numbers, of which some are known."""
        sent = [each for each in numbers if isinstance(each, Tensor)]

        def hand_on(arrays: Arrays) -> None:
            came = iter(arrays)
            then([float(next(came).reshape(-1)[0]) if isinstance(each, Tensor) else float(each) for each in numbers])

        if sent or self._waiting:
            self.add(sent, hand_on)
        else:
            then(list(map(float, numbers)))

    def deliver(self, *, wait: bool = False) -> None:
        """Hand on what has come since the last time; ``wait``: all of it, however long that takes."""
        self._turn += 1
        while self._waiting:
            first = self._waiting[0]
            if not (wait or first.has_come(self._turn) or self._turn - first.turn > LIMITS.deliveries_behind):
                return
            self._waiting.popleft()
            try:
                first.hand_on()
            except Exception as error:
                self._fault("deliveries", error)


class _Delivery:
    """Numbers of some tensors on their way.

    Attributes:
        turn: when they were sent for.
    """

    __slots__ = ("_events", "_sent", "_then", "turn")

    def __init__(self, turn: int, sent: list[Tensor], then: Then) -> None:
        self.turn = turn
        self._sent = sent
        self._then = then
        self._events: list[Any] = []

    def mark(self, tensors: Sequence[Tensor]) -> None:
        """Record on each device that what was sent for has been sent."""
        for device in {each.device for each in tensors if each.device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def has_come(self, turn: int) -> bool:
        """Return whether nothing is left to wait for; of a device that cannot tell, a turn later is taken for it."""
        return turn > self.turn and all(event.query() for event in self._events)

    def hand_on(self) -> None:
        """Hand the numbers on, waiting for them if need be."""
        for event in self._events:
            event.synchronize()
        self._then([_read(each) for each in self._sent])


def _send(tensor: Tensor) -> Tensor:
    """A copy of a tensor as it is now: on the host where the device copies by itself, else where it is."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _read(tensor: Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.asarray((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy())
    return found
