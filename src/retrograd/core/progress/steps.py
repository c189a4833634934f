"""Steps: which updates end one, those by hand among them, and what losses are scaled by.

One answer for what is recorded and for what rules are told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from retrograd.core.hooks.backward import runs_in_another_thread
from retrograd.core.hooks.dispatch import carry_out_unseen, read_unseen
from retrograd.core.hooks.optimizer import held_by, list_optimizers
from retrograd.core.hooks.parts import gradient_of, parameters_of
from retrograd.core.identities import IdentityDict, IdentitySet
from retrograd.core.ranks.placements import own_values


class Leader:
    """Listens to updates by the numbers of their optimizers.

    An optimizer takes over that updates twice while the leader does not at all, or once while what the leader trains
    does not even run: then another model is trained after the leader's, or apart from it. Where several have updated in
    turn for two rounds, as in a GAN, the last of them takes over: a step holds what a turn of the program's loop does.
    """

    def __init__(self) -> None:
        self._followers: list[int] = []
        self._round: list[int] | None = []
        """Those that followed the leader before its last update; None once the last of a round leads."""
        self.number: int | None = None

    @property
    def is_known(self) -> bool:
        """True if an optimizer makes the steps at all."""
        return self.number is not None

    def update_begins(self, number: int) -> None:
        """Record that an optimizer is about to update; forwards may run within its step (closures)."""
        if self.number is None:
            self.number = number

    def ends_step(self, number: int, rests: Callable[[], bool] = lambda: False) -> bool:
        """Record that an optimizer has updated; returns whether that ends a step.

        Args:
            number: that of the optimizer.
            rests: asked whether what the leader trains has not run in this step, while something else has.
        """
        if number == self.number and self._followers and self._followers == self._round:
            self.number, self._followers, self._round = self._followers[-1], [number], None
            return False  # that one is still to come
        if self.number in (None, number) or number in self._followers or rests():
            if self._round is not None:
                self._round = self._followers if number == self.number else []
            self.number, self._followers = number, []
            return True
        self._followers.append(number)
        return False


class Steps:
    """Finds the optimizer that makes the steps of some models, and says of each update whether it ends one.

    With several optimizers it is the one that updates most often, of several that take turns the last. One that
    replaces another, by holding parameters of the models that the other held, goes on in its place. One that holds none
    of them makes steps where no other does: it may hold copies of them, or train what the models are only a part of.
    Models that do not run together share no step: each update of one that is trained after another, or apart from it,
    ends a step of its own.
    """

    def __init__(self) -> None:
        self._leader = Leader()
        self._by_hand = UpdatesByHand()
        self._numbers: IdentityDict[Optimizer, int] = IdentityDict()
        self._numbers_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._next = 0
        self._has_only_strangers = True
        self._ran: IdentitySet[nn.Module] = IdentitySet()
        self._has_passed = False
        self._led: tuple[WeakIdRef, WeakIdRef, int] | None = None
        self._awaited: list[weakref.ref[Optimizer]] | None = None
        self._passed_over = 0

    @property
    def has_leader(self) -> bool:
        """True if an optimizer makes the steps at all."""
        return self._leader.is_known

    @property
    def has_begun(self) -> bool:
        """True if one of the models has run since the last step, or if there are no models."""
        return bool(self._ran) or not len(self._numbers_of)

    def add_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add parameters of the models."""
        parameters = list(parameters)
        self._by_hand.add(parameters)
        for parameter in parameters:
            self._numbers_of.setdefault(parameter, None)
        for optimizer in [each for each, number in self._numbers.items() if _is_stranger(number)]:
            del self._numbers[optimizer]

    def knows(self, parameter: torch.Tensor) -> bool:
        """True for a parameter of the models."""
        return parameter in self._numbers_of

    def model_runs(self, model: nn.Module) -> None:
        """Record that a model runs, or a part that is called by itself."""
        self._ran.add(model)

    def pass_begins(self, leaves: list[torch.Tensor]) -> None:
        """Record a pass that goes to these leaves, where no model has run so far."""
        self._by_hand.look_at(leaves)

    def pass_ends(self) -> None:
        """Remember the parameters as they are after a pass, where no optimizer makes the steps."""
        self._has_passed = True
        if not self.has_leader:
            self._by_hand.remember()

    def were_updated_by_hand(self, *, by_gradients: bool = True) -> bool:
        """Return whether an update was made without an optimizer of torch since the last pass; once for each.

        Where an optimizer of the parameters is yet to make its first update, gradients that are cleared were of a
        trial, and a parameter that is written is one that is moved for a moment (SAM). Only where that has gone on for
        :data:`_MOST_MOVES` times is the optimizer taken for one that never updates.

        Args:
            by_gradients: a gradient that was cleared or replaced tells of one, too.
        """
        if self.has_leader or not self._by_hand.touched(by_gradients=by_gradients):
            return False
        if self._is_optimizer_awaited():
            self._passed_over += self._by_hand.touched(by_gradients=False)
            was_update = self._passed_over > _MOST_MOVES
        else:
            was_update = True
        self._by_hand.forget()
        return was_update

    def _is_optimizer_awaited(self) -> bool:
        """True if there is an optimizer of what is trained; which ones there are is looked up once."""
        if self._awaited is None:
            ours = {id(each) for each in self._by_hand.parameters()}
            holding = (each for each in list_optimizers() if any(id(held) in ours for held in held_by(each)))
            self._awaited = list(map(weakref.ref, holding))
        return any(find() is not None for find in self._awaited)

    def trains(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the models."""
        return any(map(self.knows, held_by(optimizer)))

    def counts(self, optimizer: Optimizer, *, otherwise: bool) -> bool:
        """Return whether an update counts: that of an optimizer which holds parameters of the models does.

        Args:
            optimizer: the optimizer.
            otherwise: the answer for one that holds none of them, while no other does.
        """
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = self._make_number(optimizer)
        return otherwise and self._has_only_strangers if _is_stranger(number) else True

    def update_begins(self, optimizer: Optimizer) -> None:
        """Record that an optimizer is about to update; :meth:`counts` was asked before."""
        self._leader.update_begins(self._numbers[optimizer])

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Record an update, or one that loss scaling has left out; returns whether it ends a step."""
        number = self._numbers[optimizer]
        if not self._leader.ends_step(number, self._does_leader_rest):
            return False
        if number == self._leader.number:
            self._led = _find_gradient(optimizer)
        self._ran.clear()
        self._has_passed = False
        return True

    def _does_leader_rest(self) -> bool:
        """True if models have run since the last step, and none of them is updated by the leading optimizer."""
        leader = self._leader.number
        if leader is None or _is_stranger(leader):
            return not self._has_only_strangers
        led = {
            id(each) for optimizer, number in self._numbers.items() if number == leader for each in held_by(optimizer)
        }
        ran = list(self._ran)
        if not ran:  # or torch tells of no call of theirs
            return self._has_passed and self._led is not None and not _has_changed(*self._led)
        return not any(id(each) in led for model in ran for each in parameters_of(model))

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


def _find_gradient(optimizer: Optimizer) -> tuple[WeakIdRef, WeakIdRef, int] | None:
    """A parameter of an optimizer with its gradient as it is; neither is held."""
    if runs_in_another_thread():
        return None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = gradient_of(parameter)
            if gradient is not None:
                return WeakIdRef(parameter), WeakIdRef(gradient), gradient._version
    return None


def _has_changed(find_parameter: WeakIdRef, find_gradient: WeakIdRef, version: int) -> bool:
    """Return whether a pass has come to a parameter: its gradient is another one, or was added to."""
    parameter, before = find_parameter(), find_gradient()
    if parameter is None or runs_in_another_thread():
        return parameter is not None
    now = gradient_of(parameter)
    return now is not None and (now is not before or now._version != version)


def _is_stranger(number: int) -> bool:
    return number < 0


_MOST = 16
"""Losses that are remembered while nothing is recorded and so nothing is forgotten."""


class _Scaled:
    """A loss that was multiplied; ``used`` once a pass has started from it."""

    __slots__ = ("loss", "scale", "used")

    def __init__(self, loss: torch.Tensor, scale: torch.Tensor) -> None:
        self.loss = weakref.ref(loss)
        self.scale = scale
        self.used = False


class LossScales:
    """Finds the scale of a pass by the losses that it starts from."""

    def __init__(self) -> None:
        self._scaled: list[_Scaled] = []

    def add(self, losses: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
        """Record that losses have been multiplied by ``scale``."""
        self._scaled += [_Scaled(loss, scale) for loss in losses]
        del self._scaled[:-_MOST]

    def find(self, roots: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """The scale of a pass that starts from these tensors; None where nothing was scaled.

        A pass from another tensor, while a scaled loss is still waiting for its pass, is taken to start from
        something computed of that loss (divided by the number of micro-batches, say).
        """
        if not self._scaled:
            return None
        ids = {id(root) for root in roots}
        found = next((item for item in self._scaled if id(item.loss()) in ids), None)
        if found is None:
            found = next((item for item in self._scaled if not item.used), None)
        if found is None:
            return None
        found.used = True
        return found.scale

    def forget(self) -> None:
        """Forget the losses of a step."""
        self._scaled.clear()


_MOST_MOVES = 4
"""Writes to parameters before the first update of an optimizer that are taken for no updates by hand."""

_PROBES = 8
_SAMPLED = 1
_SAMPLE = 64


class UpdatesByHand:
    """Remembers a few parameters as they are when a backward ends, and holds none of them.

    An update by hand shows in a parameter's version (``p -= lr * p.grad``), in its gradient being cleared or replaced,
    or, where it is written past autograd (``p.data``), in the numbers themselves. Gradients that lie there as backward
    left them, or clipped, and parameters as they were, mean accumulation. Where a pass goes to other leaves than the
    one before, they were made anew.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._parameters = list(map(WeakIdRef, parameters))
        self._before: list[_ParameterState] = []
        self._are_others = False

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters, too."""
        self._parameters += map(WeakIdRef, parameters)

    def look_at(self, parameters: list[torch.Tensor]) -> None:
        """Record a pass that goes to these parameters alone."""
        self._are_others = not any(probe.is_of(each) for probe in self._before for each in parameters)
        self._parameters = list(map(WeakIdRef, parameters))

    def remember(self) -> None:
        """Remember parameters as they are after a backward; none while another thread's adds to their gradients."""
        self._are_others = False
        self._before.clear()
        if runs_in_another_thread():
            return
        trained = (p for p in self.parameters() if p.requires_grad and not is_lazy(p))
        reached = list(islice((p for p in self.parameters() if gradient_of(p) is not None), _PROBES))
        probed = reached or islice(trained, _PROBES)
        self._before = [_ParameterState(p, sampled=number < _SAMPLED) for number, p in enumerate(probed)]

    def touched(self, *, by_gradients: bool = True) -> bool:
        """Return whether an update was made since then."""
        if runs_in_another_thread() or not self._before:
            return False
        return self._are_others or any(each.has_changed(by_gradients) for each in self._before)

    def forget(self) -> None:
        """Forget parameters as they were: of each update is told once."""
        self._before.clear()

    def parameters(self) -> Iterator[torch.Tensor]:
        """Those that are watched and still there."""
        return (parameter for find in self._parameters if (parameter := find()) is not None)


class _ParameterState:
    """A parameter as it was; its numbers are compared only where nothing else tells, for that waits for a device."""

    __slots__ = ("_gradient", "_parameter", "_sample", "_version")

    def __init__(self, parameter: torch.Tensor, *, sampled: bool) -> None:
        self._parameter = WeakIdRef(parameter)
        self._version = parameter._version
        self._gradient = _state(gradient_of(parameter))
        self._sample = read_unseen(parameter, _sample) if sampled else None

    def is_of(self, parameter: torch.Tensor) -> bool:
        return self._parameter() is parameter

    def has_changed(self, by_gradients: bool) -> bool:
        parameter: torch.Tensor | None = self._parameter()
        if parameter is None:  # nothing is added to its gradient any more
            return True
        return (
            self._version != parameter._version
            or (by_gradients and self._was_cleared(gradient_of(parameter)))
            or (self._sample is not None and not self._is_as_before(parameter))
        )

    def _is_as_before(self, parameter: torch.Tensor) -> bool:
        before, now = self._sample, read_unseen(parameter, _sample)
        return before is not None and carry_out_unseen(partial(torch.equal, before, now))

    def _was_cleared(self, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient was cleared or replaced; one that was clipped in place still accumulates."""
        now = _state(gradient)
        if now == self._gradient:
            return False
        if gradient is None or now is None or self._gradient is None or now[0] != self._gradient[0]:
            return True
        return gradient.layout is not torch.strided or not read_unseen(gradient, _has_some)


def _state(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    here = own_values(parameter)  # of a DTensor: else processes would talk
    flat: torch.Tensor = here.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()


def _has_some(gradient: torch.Tensor) -> bool:
    return bool(own_values(gradient).any())
