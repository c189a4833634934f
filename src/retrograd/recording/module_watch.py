"""What a module returns, call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from retrograd.hooks.engine import current_graph_task, grad_enabled, inference_enabled
from retrograd.recording.lane import Lane, Mode
from retrograd.recording.nested import Keys, flatten
from retrograd.recording.place import Host, Place
from retrograd.sites.site import Site

MOST_CALLS = 100
"""Calls of one module within a micro-batch that get records of their own; later ones merge into the last."""


def mode_now() -> Mode:
    """Grad mode of the code that runs now."""
    if grad_enabled():
        return Mode.GRAD
    return Mode.INFERENCE if inference_enabled() else Mode.NO_GRAD


class PlaceMaker(Host, Protocol):
    """A recorder as its watches see it."""

    def make_place(self, lane: Lane, module: nn.Module | None, site: Site) -> Place | None:
        """The place for a site, or None when nothing of it is wanted."""


class Calls:
    """The places of one slot in one lane, by call.

    Attributes:
        plain: the place of each call that returned a single tensor, which is nearly every call: found by its number.
        places: all places of each call, by their keys.
        unhooked: calls whose gradient has no hook yet.
    """

    __slots__ = ("count", "places", "plain", "serial", "unhooked")

    def __init__(self) -> None:
        self.serial = 0
        self.count = 0
        self.plain: list[Place | None] = []
        self.places: list[dict[Keys, Place | None]] = []
        self.unhooked: list[dict[Keys, Place | None]] = []


class SlotWatch:
    """Records one slot of a module (or a tensor watched by hand) at each of its calls.

    Args:
        host: the recorder.
        module: the module; None for a tensor watched by hand.
        path: its path.
        keys: the slot.
    """

    __slots__ = ("_host", "_keys", "_lanes", "_module", "_path", "switch")

    _visit = staticmethod(Place.see_value)
    """Records a tensor; returns whether its gradient is taken care of."""

    def __init__(self, host: PlaceMaker, module: nn.Module | None, path: str, keys: Keys) -> None:
        self._host = host
        self.switch = host.clock
        self._module = module
        self._path = path
        self._keys = keys
        self._lanes = (Calls(), Calls(), Calls())

    def see(self, value: Any) -> None:
        """Record the tensors in ``value`` as those of the next call."""
        clock = self.switch
        if current_graph_task() != -1:  # a checkpointed part is computed again
            if clock.on:
                self._see_again(value)
            return
        lane = clock.lane
        if lane is None:
            lane = clock.find_lane(mode_now())
        if not clock.on:
            return
        calls = self._lanes[lane.mode]
        if calls.serial != lane.serial:
            self._restart(calls, lane)
        call = calls.count
        calls.count = call + 1
        if call >= len(calls.plain):
            call = self._next_call(calls)
        place = calls.plain[call]
        if place is not None and type(value) is torch.Tensor:
            hooked = self._visit(place, value)
        else:
            hooked = self._see_nested(lane, calls, call, value)
        if not hooked and lane.mode is Mode.GRAD:
            calls.unhooked.append(calls.places[call])

    def _next_call(self, calls: Calls) -> int:
        """The number of a call that comes for the first time."""
        if len(calls.plain) < MOST_CALLS:
            calls.plain.append(None)
            calls.places.append({})
        return len(calls.plain) - 1

    def _see_nested(self, lane: Lane, calls: Calls, call: int, value: Any) -> bool:
        hooked = True
        places = calls.places[call]
        for keys, tensor in flatten(value, self._keys):
            if keys not in places:
                site = Site(self._path, keys, call + 1)
                places[keys] = self._host.make_place(lane, self._module, site)
                calls.plain[call] = places.get(self._keys)
            place = places[keys]
            if place is not None:
                hooked &= self._visit(place, tensor)
        return hooked

    def _watch(self, place: Place, tensor: torch.Tensor) -> None:
        """Take care of the gradient alone."""
        place.watch(tensor)

    def _see_again(self, value: Any) -> None:
        """A reentrant checkpoint ran without grad at first, so only what it computes again has a gradient.

        Parts are computed again from the last to the first, so the last call without a hook is taken.
        """
        calls = self._lanes[Mode.GRAD]
        if not calls.unhooked or not grad_enabled():
            return
        tensors = [(keys, tensor) for keys, tensor in flatten(value, self._keys) if tensor.requires_grad]
        if tensors:
            places = calls.unhooked.pop()
            for keys, tensor in tensors:
                place = places.get(keys)
                if place is not None:
                    self._watch(place, tensor)

    def _restart(self, calls: Calls, lane: Lane) -> None:
        calls.serial = lane.serial
        calls.count = 0
        calls.unhooked.clear()
        lane.touched = True

    def each_place(self, do: Callable[[Place], None]) -> None:
        """Do something with every place made so far."""
        for calls in self._lanes:
            for places in calls.places:
                for place in places.values():
                    if place is not None:
                        do(place)


class OutputWatch(SlotWatch):
    """Records a module's outputs."""

    __slots__ = ()

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook."""
        try:
            self.see(output)
        except Exception as error:
            self._host.fault(Site(self._path, self._keys), error)
