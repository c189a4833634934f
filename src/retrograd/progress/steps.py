"""Steps, and which updates end one: one answer for what is recorded and for what rules are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary


class Leader:
    """Listens to updates by the numbers of their optimizers.

    An optimizer takes over that updates twice while the leader does not at all, or once while what the leader trains
    does not even run: then another model is trained after the leader's, or apart from it.
    """

    def __init__(self) -> None:
        self._followers: set[int] = set()
        self.number: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether an optimizer makes the steps at all."""
        return self.number is not None

    def update_begins(self, number: int) -> None:
        """An optimizer is about to update; the forwards may come before it has (closures)."""
        if self.number is None:
            self.number = number

    def ends_step(self, number: int, rests: Callable[[], bool] = lambda: False) -> bool:
        """An optimizer has updated; returns whether a step is over thereby.

        Args:
            number: that of the optimizer.
            rests: asked whether what the leader trains has not run in this step, while something else has.
        """
        if self.number in (None, number) or number in self._followers or rests():
            self.number = number
            self._followers.clear()
            return True
        self._followers.add(number)
        return False


class Steps:
    """Finds the optimizer that makes the steps of some models, and says of each update whether it ends one.

    With several optimizers it is the one that updates most often. One that replaces another, by holding parameters of
    the models that the other held, goes on in its place. One that holds none of them makes steps where no other does:
    it may hold copies of them, or train what the models are only a part of. Models that do not run together share no
    step: each update of one that is trained after another, or apart from it, ends a step of its own.
    """

    def __init__(self) -> None:
        self._leader = Leader()
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._numbers_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._next = 0
        self._has_only_strangers = True
        self._ran: WeakSet[nn.Module] = WeakSet()

    @property
    def has_leader(self) -> bool:
        """Whether an optimizer makes the steps at all."""
        return self._leader.is_known

    @property
    def has_begun(self) -> bool:
        """Whether one of the models has run since the last step; where there are no models, anything may have."""
        return bool(self._ran) or not len(self._numbers_of)

    def add_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add parameters of the models."""
        for parameter in parameters:
            self._numbers_of.setdefault(parameter, None)
        for optimizer in [each for each, number in self._numbers.items() if _is_stranger(number)]:
            del self._numbers[optimizer]

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is of the models."""
        return parameter in self._numbers_of

    def model_runs(self, model: nn.Module) -> None:
        """A model, or a part that is called by itself, runs."""
        self._ran.add(model)

    def concerns(self, optimizer: Optimizer) -> bool | None:
        """Whether an optimizer holds parameters of the models; None if it holds none, and neither does any other."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._make_number(optimizer)
        if _is_stranger(number):
            return None if self._has_only_strangers else False
        return True

    def update_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to update; :meth:`concerns` was asked before."""
        self._leader.update_begins(self._numbers[optimizer])

    def ends_step(self, optimizer: Optimizer) -> bool:
        """An optimizer has updated, or loss scaling has made it leave that out; returns whether a step is over."""
        if not self._leader.ends_step(self._numbers[optimizer], self._does_leader_rest):
            return False
        self._ran.clear()
        return True

    def _does_leader_rest(self) -> bool:
        """Whether models have run since the last step, and none of them is what the leading optimizer updates."""
        leader = self._leader.number
        if leader is None or _is_stranger(leader):
            return not self._has_only_strangers
        led = {
            id(each) for optimizer, number in self._numbers.items() if number == leader for each in held_by(optimizer)
        }
        ran = list(self._ran)
        return bool(ran) and not any(id(each) in led for model in ran for each in nn.Module.parameters(model))

    def _make_number(self, optimizer: Optimizer) -> int:
        self._next += 1
        ours = [parameter for parameter in held_by(optimizer) if parameter in self._numbers_of]
        if not ours:
            return -self._next
        self._has_only_strangers = False
        number = next((found for each in ours if (found := self._numbers_of[each]) is not None), self._next)
        for parameter in ours:
            self._numbers_of[parameter] = number
        return number


def held_by(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """The parameters of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_stranger(number: int) -> bool:
    return number < 0
