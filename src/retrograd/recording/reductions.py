"""Gradients that processes reduce between them, read when a pass is over: as the optimizer will find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

from torch import nn

from retrograd.hooks.distributed import Averaging, Exchange, find_exchanges, is_averaging, running_wrapper
from retrograd.recording.clock import Clock
from retrograd.recording.parameter_watch import ParameterWatch
from retrograd.recording.reduced_gradient import ReducedGradient
from retrograd.recording.updates import COPY_LIMIT
from retrograd.sites.site import Site


class ReductionHost(Protocol):
    """A recorder as reductions see it."""

    clock: Clock

    def enter_backward(self) -> bool:
        """Told at the first gradient of a pass; returns whether it is recorded."""

    def fault(self, site: Site, error: Exception) -> None:
        """Told of an error at a tap; training goes on."""


class Reductions:
    """Reads what reductions add to ``.grad``.

    That is the mean of what the processes have found in one pass; after passes that were not reduced themselves (as in
    ``no_sync()``) it is the mean of all that has gathered. What a pass leaves unreduced is not read here at all.

    Args:
        host: the recorder.

    Attributes:
        left_out: printed sites of gradients that could not be told, at least once, for their size.
    """

    def __init__(self, host: ReductionHost) -> None:
        self._host = host
        self.left_out: set[str] = set()
        self._groups: list[_Group] = []
        self._wrappers: WeakSet[nn.Module] = WeakSet()

    def add_model(self, model: nn.Module) -> None:
        """This model is recorded."""
        self._wrappers.update(each for each in model.modules() if is_averaging(each))
        self._groups += map(_Group, find_exchanges(model))

    def adopt(self, watch: ParameterWatch) -> None:
        """Find out who reduces the gradient of a parameter, if anybody does."""
        parameter = watch.parameter
        if parameter is None or watch.exchange is not None:
            return
        for group in self._groups:
            if group.exchange.reduces(parameter):
                watch.exchange = group.exchange
                group.gradients.append(ReducedGradient(watch, is_hooked=bool(group.exchange.ranks)))

    def meets_wrapper(self) -> bool:
        """A recorded model is called: is there a wrapper around it that was not known?"""
        wrapper = running_wrapper()
        if wrapper is None or wrapper in self._wrappers or not is_averaging(wrapper):
            return False
        self._wrappers.add(wrapper)
        exchange = Averaging(wrapper)
        exchange.before_forward(wrapper, (), {})
        self._groups.append(_Group(exchange))
        return True

    def pass_begins(self) -> None:
        """A pass that may be recorded begins."""
        room = COPY_LIMIT
        for group in self._groups:
            group.gradients = [each for each in group.gradients if each.watch.parameter is not None]
            for gradient in group.gradients:
                room -= gradient.remember(room)
                if gradient.is_beyond:
                    self.left_out.add(str(gradient.watch.site.grad))

    def pass_ends(self) -> None:
        """It has ended: record what was reduced."""
        for group in self._groups:
            for gradient in group.finish():
                self._record(gradient)

    def remove(self) -> None:
        """Take every hook back."""
        for group in self._groups:
            group.exchange.remove()
        self._groups.clear()

    def _record(self, gradient: ReducedGradient) -> None:
        tensor_recorder = gradient.watch.gradient
        try:
            total = gradient.take()
            if tensor_recorder is not None and total is not None and self._is_recorded():
                tensor_recorder.see(total)
        except Exception as error:
            self._host.fault(gradient.watch.site.grad, error)

    def _is_recorded(self) -> bool:
        return self._host.clock.entered or self._host.enter_backward()


class _Group:
    """The gradients of one exchange, those that are being reduced apart."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.gradients: list[ReducedGradient] = []
        self._begun: dict[int, ReducedGradient] = {}

    def finish(self) -> Sequence[ReducedGradient]:
        """Those that have been reduced by now."""
        come = [each for each in self.gradients if each.has_come()]
        if come and self.exchange.has_begun():
            self._begun.update((id(each), each) for each in come)
        for each in come:
            each.wait()
        if not (come and self._begun and self.exchange.has_ended()):
            return ()
        self.exchange.close()
        ended, self._begun = list(self._begun.values()), {}
        return ended
