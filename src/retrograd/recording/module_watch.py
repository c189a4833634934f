"""What a module returns, call by call."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn

from retrograd.hooks.engine import (
    count_function_modes,
    current_graph_task,
    current_node,
    grad_enabled,
    inference_enabled,
    next_sequence_number,
    without_functions,
)
from retrograd.hooks.nested import Keys, flatten
from retrograd.hooks.nodes import number_of
from retrograd.recording.lane import Lane, Mode
from retrograd.recording.place import Host, Place
from retrograd.recording.placements import Placements
from retrograd.recording.stream import Stream
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

    placements: Placements

    def make_place(self, lane: Lane, module: nn.Module | None, site: Site) -> Place | None:
        """The place for a site, or None when nothing of it is wanted."""

    def crowded(self, site: Site) -> None:
        """Told at a site that has more calls than get records of their own."""


Places = dict[Keys, Place | None]
"""The places of one call, by their keys."""


class Calls:
    """The places of one slot in one lane, by call.

    Attributes:
        plain: the place of each call that returned a single tensor, which is nearly every call: found by its number.
        places: all places of each call, by their keys.
        unhooked: calls whose gradient has no hook yet, each with the number that the next node would have had then.
    """

    __slots__ = ("count", "places", "plain", "serial", "unhooked")

    def __init__(self) -> None:
        self.serial = 0
        self.count = 0
        self.plain: list[Place | None] = []
        self.places: list[Places] = []
        self.unhooked: list[tuple[int, Places]] = []

    def gradients(self) -> list[Stream]:
        """Where the gradients of all calls go."""
        places = (place for places in self.places for place in places.values() if place is not None)
        return [place.gradient for place in places if place.gradient is not None]


class SlotWatch:
    """Records one slot of a module (or a tensor watched by hand) at each of its calls.

    Args:
        host: the recorder.
        module: the module, which is not held; None for a tensor watched by hand.
        path: its path.
        keys: the slot.

    Attributes:
        path: the same.
    """

    __slots__ = ("_host", "_keys", "_lanes", "_module", "path", "switch")

    _visit = staticmethod(Place.see_value)
    """Records a tensor; returns whether its gradient is taken care of."""

    def __init__(self, host: PlaceMaker, module: nn.Module | None, path: str, keys: Keys) -> None:
        self._host = host
        self.switch = host.clock
        self._module = weakref.ref(module) if module is not None else None
        self.path = path
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
            hooked = (self._visit_past_modes if count_function_modes() else self._visit)(place, value)
        else:
            hooked = self._see_nested(lane, calls, call, value)
        if not hooked and lane.mode is Mode.GRAD and not grad_enabled():
            calls.unhooked.append((next_sequence_number(), calls.places[call]))

    def _visit_past_modes(self, place: Place, tensor: torch.Tensor) -> bool:
        """The same past function modes, through which each attribute would be read; not where users have statistics."""
        if place.value is not None and place.value.custom is not None:
            return self._visit(place, tensor)
        with without_functions():
            return self._visit(place, tensor)

    def _next_call(self, calls: Calls) -> int:
        """The number of a call that comes for the first time."""
        if len(calls.plain) < MOST_CALLS:
            calls.plain.append(None)
            calls.places.append({})
        elif calls.count == MOST_CALLS + 1:
            self._host.crowded(Site(self.path, self._keys, MOST_CALLS))
        return len(calls.plain) - 1

    def _see_nested(self, lane: Lane, calls: Calls, call: int, value: Any) -> bool:
        hooked = True
        places = calls.places[call]
        for keys, tensor in flatten(value, self._keys):
            if keys not in places:
                site = Site(self.path, keys, call + 1)
                places[keys] = self._make_place(lane, site)
                self._host.placements.see(site, tensor)
                calls.plain[call] = places.get(self._keys)
            place = places[keys]
            if place is None:
                continue
            try:
                hooked &= self._visit(place, tensor)
            except Exception as error:
                self._host.fault(Site(self.path, keys, call + 1), error)
        return hooked

    def find_place(self, lane: Lane, call: int, keys: Keys) -> Place | None:
        """The place of an earlier call with grad, made now if that call did not have these keys."""
        places = self.trained_calls.places[call]
        if keys not in places:
            places[keys] = self._make_place(lane, Site(self.path, keys, call + 1))
            self.trained_calls.plain[call] = places.get(self._keys)
        return places[keys]

    def _make_place(self, lane: Lane, site: Site) -> Place | None:
        return self._host.make_place(lane, self._module() if self._module is not None else None, site)

    def _watch(self, place: Place, tensor: torch.Tensor) -> None:
        """Take care of the gradient alone."""
        place.watch(tensor)

    def _see_again(self, value: Any) -> None:
        """A reentrant checkpoint ran without grad at first, so only what it computes again has a gradient.

        All calls of a checkpointed part have seen the number after that of the part's own node, or, in parts within
        it, a larger one. Parts are computed again from the last to the first, so no call of a later part is left.
        """
        unhooked = self._lanes[Mode.GRAD].unhooked
        node = current_node()
        if not unhooked or node is None:
            return
        part = number_of(node)
        index = next((index for index, (number, _) in enumerate(unhooked) if number > part), None)
        if index is None:
            return
        _, places = unhooked.pop(index)
        if not grad_enabled():  # a part within the part, which is computed once more in its own time
            unhooked.append((next_sequence_number(), places))
            return
        for keys, tensor in flatten(value, self._keys):
            place = places.get(keys)
            if place is not None and tensor.requires_grad:
                self._watch(place, tensor)

    def _restart(self, calls: Calls, lane: Lane) -> None:
        calls.serial = lane.serial
        calls.count = 0
        calls.unhooked.clear()
        lane.touched = True

    @property
    def was_called(self) -> bool:
        """Whether anything was ever seen here."""
        return any(calls.serial for calls in self._lanes)

    @property
    def trained_calls(self) -> Calls:
        """Its calls with grad."""
        return self._lanes[Mode.GRAD]


class OutputWatch(SlotWatch):
    """Records a module's outputs."""

    __slots__ = ()

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook."""
        try:
            self.see(output)
        except Exception as error:
            self._host.fault(Site(self.path, self._keys), error)
