"""What each backward pass of a step brings to the parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdRef

from retrograd.hooks.distributed import has_other_processes
from retrograd.hooks.engine import uncompiled
from retrograd.hooks.tensor import after_accumulation, change_gradient, leave_gradient
from retrograd.rewriting.clock import RuleClock


class Passes:
    """Keeps the gradients of passes apart that torch adds up.

    Args:
        clock: says which pass runs, and what its gradients are multiplied by.
    """

    def __init__(self, clock: RuleClock) -> None:
        self._clock = clock
        self._found: dict[int, dict[int, Tensor]] = {}
        self._collectors: dict[int, _Collector] = {}

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on what comes to these is kept, too."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._collectors:
                self._collectors[id(parameter)] = _Collector(parameter, self._found, self._clock)

    def settle(self) -> None:
        """The pass has ended, and whoever averages gradients over processes has done so."""
        if has_other_processes():
            for collector in self._collectors.values():
                collector.settle()

    def take(self, parameters: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """For each pass the gradients of these parameters, without loss scale. Nothing is kept then."""
        passes = [[found.get(id(each)) for each in parameters] for found in self._found.values() if found]
        self._found.clear()
        return passes

    def remove(self) -> None:
        """Take the hooks back, and forget everything."""
        while self._collectors:
            self._collectors.popitem()[1].remove()
        self._found.clear()


class _Collector:
    """Two hooks of one parameter: what arrives counts once it has been added to ``.grad``.

    What ``torch.autograd.grad`` asks for is not, and where there is no ``.grad`` before it, all that came until then
    has been thrown away with it.

    In one of several processes something else is added: DDP averages over all of them what is in ``.grad``, right after
    the hooks. What a pass has brought is then what ``.grad`` has grown by in it.
    """

    __slots__ = ("_arrived", "_before", "_clock", "_find", "_found", "_is_added", "_number", "_undo")

    __torch_unserializable__ = True

    def __init__(self, parameter: Tensor, found: dict[int, dict[int, Tensor]], clock: RuleClock) -> None:
        self._find = WeakIdRef(parameter)  # which holds this
        self._found = found
        self._clock = clock
        self._arrived: Tensor | None = None
        self._before: Tensor | None = None
        self._is_added = False
        self._number = -1
        change_gradient(parameter, self)
        self._undo = after_accumulation(parameter, self.add)

    @uncompiled
    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if self._number != self._clock.pass_number:
            self._begin()
        scale = self._clock.scale
        self._arrived = gradient.detach().clone() if scale is None else gradient.detach() / scale.to(gradient.device)
        parameter = self._find()
        if parameter is not None and parameter.grad is None:
            for found in self._found.values():
                found.pop(id(parameter), None)

    @uncompiled
    def add(self, parameter: Tensor) -> None:
        """The gradient has been added to ``.grad``."""
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            found = self._found.setdefault(self._number, {})
            earlier = found.get(id(parameter))
            found[id(parameter)] = arrived if earlier is None else earlier + arrived
            self._is_added = True

    add.__torch_unserializable__ = True  # type: ignore[attr-defined]

    def _begin(self) -> None:
        parameter = self._find()
        held = parameter.grad if parameter is not None else None
        self._number = self._clock.pass_number
        self._before = held.detach().clone() if held is not None and has_other_processes() else None
        self._is_added = False

    def settle(self) -> None:
        """The pass has ended: take what ``.grad`` has grown by for what has arrived."""
        before, self._before = self._before, None
        parameter = self._find()
        held = parameter.grad if parameter is not None else None
        if self._is_added and held is not None:
            brought = held.detach().clone() if before is None else held.detach() - before
            scale = self._clock.scale
            self._found[self._number][id(parameter)] = brought if scale is None else brought / scale.to(brought.device)
        self._is_added = False

    def remove(self) -> None:
        """Take the hooks back."""
        parameter = self._find()
        if parameter is not None:
            leave_gradient(parameter, self)
        self._undo()
