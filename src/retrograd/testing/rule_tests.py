"""Tests of what every rule must do, to inherit from."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from retrograd.rewriting.rules.rule import Rule


class RuleTests:
    """The contract of :class:`retrograd.rewriting.rules.rule.Rule`: inherit it in a test file, write ``make_rule``.

        class TestMyRule(RuleTests):
            def make_rule(self) -> Rule:
                return MyRule(0.5)

    Any test runner that finds methods named ``test_…`` will do.

    Attributes:
        recovers_after: good tensors after a NaN within which the rule's results are finite again. A rule that holds
            the last k tensors needs k.
        reads_numbers: set it for a rule that cannot run on tensors without data, such as one that draws random
            numbers: then it is not tested that the rule never waits for a device.
    """

    recovers_after: int = 1
    reads_numbers: bool = False

    def make_rule(self) -> Rule:
        """A new rule, without memory, whose next decisions would differ after a few tensors."""
        raise NotImplementedError

    def make_value(self, number: int) -> Tensor:
        """The tensor that comes as number ``number``, from 0 on; all of one shape, dtype and device."""
        generator = torch.Generator().manual_seed(number)
        return torch.randn(4, 3, generator=generator) * (10.0 if number % 7 == 5 else 1.0)

    def make_activation(self) -> Tensor:
        """Make the output that the tensors are gradients of, for a rule that needs it."""
        return self.make_value(1_000)

    def make_inputs(self) -> dict[str, Tensor]:
        """Make the inputs of the module call whose output the tensors are gradients of, for a rule that needs them."""
        return {"input": self.make_value(2_000)}

    def test_it_returns_none_or_a_tensor_of_the_same_form(self) -> None:
        for value, result in zip(self._values(), self._results(self.make_rule()), strict=False):
            form = (result.shape, result.dtype, result.device, result.layout)
            assert form == (value.shape, value.dtype, value.device, value.layout)

    def test_it_does_not_write_into_its_argument(self) -> None:
        rule = self.make_rule()
        for value in self._values():
            before, version = value.clone(), value._version
            self._act(rule, value)
            assert value._version == version, "the rule wrote into its argument"
            assert _equal(value, before), "the rule wrote into its argument, past the version counter"

    def test_it_holds_no_graph(self) -> None:
        rule = self.make_rule()
        for value in self._values():
            saved = torch.ones_like(value)
            graph = weakref.ref(saved)
            leaf = value.detach().requires_grad_(value.is_floating_point() or value.is_complex())
            is_collecting = gc.isenabled()
            gc.disable()  # a cycle would hold the graph too
            try:
                given = leaf * saved
                self._act(rule, given)
                del given, saved
                assert graph() is None, "the rule holds the graph of its argument, or of its result"
            finally:
                if is_collecting:
                    gc.enable()
        assert not any(tensor.requires_grad for tensor in _tensors(rule.state_dict()))

    def test_it_goes_on_alike_after_a_checkpoint(self) -> None:
        rule, other = self.make_rule(), self.make_rule()
        for number in range(12):
            self._act(rule, self.make_value(number))
        file = io.BytesIO()
        torch.save(rule.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        self._go_on_alike(rule, other)

    def test_a_copy_goes_on_alike(self) -> None:
        rule = self.make_rule()
        for number in range(12):
            self._act(rule, self.make_value(number))
        self._go_on_alike(copy.deepcopy(rule), copy.deepcopy(rule))
        states = pickle.loads(pickle.dumps(rule._states))  # noqa: S301 - our own bytes
        other = self.make_rule()
        other.load_state_dict({site: state.state_dict() for site, state in states.items()})
        self._go_on_alike(rule, other)

    def test_a_state_that_was_saved_does_not_change(self) -> None:
        rule = self.make_rule()
        for number in range(12):
            self._act(rule, self.make_value(number))
        saved = rule.state_dict()
        before = copy.deepcopy(saved)
        for number in range(12, 24):
            self._act(rule, self.make_value(number))
        assert _equal_states(saved, before), "what state_dict() returned is still being written into"

    def test_what_is_not_finite_poisons_nothing(self) -> None:
        for first in (0, 6):
            for poison in (float("nan"), float("inf"), float("-inf")):
                self._poison(first, poison)

    def test_it_never_waits_for_the_device(self) -> None:
        if self.reads_numbers:
            return
        rule = self.make_rule()
        for number in range(40):  # to read a number of a tensor without data raises
            rule_value = self.make_value(number).to("meta")
            self._act(rule, rule_value, self.make_activation().to("meta"))

    def _poison(self, first: int, poison: float) -> None:
        rule = self.make_rule()
        for number in range(first):
            self._act(rule, self.make_value(number))
        bad = self.make_value(first)
        if not bad.is_floating_point():
            return
        self._act(rule, bad.index_fill(0, torch.zeros(1, dtype=torch.long, device=bad.device), poison))
        for number in range(first + 1, first + 1 + self.recovers_after):
            result = self._act(rule, self.make_value(number))
        assert bool(torch.isfinite(result).all()), f"after a gradient with {poison} the rule returns {result}"
        kept = [tensor for tensor in _tensors(rule.state_dict()) if tensor.is_floating_point()]
        assert all(bool(torch.isfinite(tensor).all()) for tensor in kept), f"{poison} is in what the rule remembers"

    def _act(self, rule: Rule, value: Tensor, activation: Tensor | None = None) -> Tensor:
        """Let the rule act on a tensor, as it would in training."""
        state = rule.state_at("site:output.grad")
        state.step += 1
        if rule.needs_value:
            state.value = self.make_activation() if activation is None else activation
        if rule.needs_input:
            state.inputs = {name: tensor.to(value.device) for name, tensor in self.make_inputs().items()}
        try:
            result = rule(value, state)
        finally:
            state.value, state.inputs = None, {}
        return value if result is None else result

    def _values(self) -> Iterator[Tensor]:
        return (self.make_value(number) for number in range(40))

    def _results(self, rule: Rule) -> Iterator[Tensor]:
        return (self._act(rule, value) for value in self._values())

    def _go_on_alike(self, one: Rule, other: Rule) -> None:
        for state in (one.state_at("site:output.grad"), other.state_at("site:output.grad")):
            state.step = 12  # the step is told by whoever trains
        for number in range(12, 40):
            assert _equal(*(self._act(rule, self.make_value(number)) for rule in (one, other)))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors bit for bit, NaN being NaN."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal_states(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal_states, one, other))
    return _equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _tensors(kept: Any) -> Iterator[Tensor]:
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, dict):
        for each in kept.values():
            yield from _tensors(each)
    elif isinstance(kept, (tuple, list)):
        for each in kept:
            yield from _tensors(each)
