"""Tests of what every Function must do, to inherit from."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from retrograd.tools.functions.function import Function
from retrograd.tools.functions.remembering import remembering_nothing


class FunctionTests:
    """The contract of :class:`retrograd.tools.functions.function.Function`. Inherit from it and write two methods.

        class TestMyLinear(FunctionTests):
            def make_function(self) -> Function:
                return MyLinear()

            def make_arguments(self) -> list[Any]:
                return [torch.randn(4, 3, dtype=torch.float64, requires_grad=True), ...]

    Any test runner that finds methods named ``test_…`` will do. The Function is pickled, so its class stands at the top
    of a module.

    While gradients are compared with finite differences, ``remember`` keeps nothing, so a backward that depends on its
    past is that of a new instance.

    Attributes:
        is_differentiable_twice: set it to False for a backward that is once differentiable.
    """

    is_differentiable_twice: bool = True

    def make_function(self) -> Function:
        """A new instance."""
        raise NotImplementedError

    def make_arguments(self) -> Sequence[Any]:
        """Arguments of a call, the same each time. Tensors that require grad are of float64 or complex128."""
        raise NotImplementedError

    def test_its_gradients_are_those_of_finite_differences(self) -> None:
        with remembering_nothing():
            assert gradcheck(self.make_function(), tuple(self.make_arguments()))

    def test_its_second_derivatives_are_those_of_finite_differences(self) -> None:
        if not self.is_differentiable_twice:
            return
        with remembering_nothing():
            assert gradgradcheck(self.make_function(), tuple(self.make_arguments()))

    def test_a_copy_goes_on_alike(self) -> None:
        function = self.make_function()
        self._pass_through(function)
        pickled = pickle.loads(pickle.dumps(function))  # noqa: S301 - our own bytes
        self._go_on_alike(function, copy.deepcopy(function), pickled)

    def test_it_goes_on_alike_after_a_checkpoint(self) -> None:
        function, other = self.make_function(), self.make_function()
        self._pass_through(function)
        file = io.BytesIO()
        torch.save(function.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        self._go_on_alike(function, other)

    def test_it_keeps_no_graph(self) -> None:
        function = self.make_function()
        is_collecting = gc.isenabled()
        gc.disable()  # a cycle would hold the graph too
        try:
            nodes = self._pass_through(function)
            assert all(node() is None for node in nodes), "the node of a call is held after its backward pass"
        finally:
            if is_collecting:
                gc.enable()

    def _pass_through(self, function: Function) -> list[weakref.ref[Any]]:
        """Run a forward and a backward; returns weak references to the nodes of the call."""
        _, nodes = self._gradients(function)
        return nodes

    def _gradients(self, function: Function) -> tuple[list[Tensor | None], list[weakref.ref[Any]]]:
        arguments = self.make_arguments()
        output = function(*arguments)
        outputs = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        outputs = [each for each in outputs if each.requires_grad]
        leaves = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs], allow_unused=True)
        return list(gradients), [weakref.ref(each.grad_fn) for each in outputs]

    def _go_on_alike(self, function: Function, *others: Function) -> None:
        for _ in range(3):
            expected, _nodes = self._gradients(function)
            for other in others:
                for mine, theirs in zip(self._gradients(other)[0], expected, strict=True):
                    same = mine is theirs is None or (mine is not None and theirs is not None and mine.equal(theirs))
                    assert same, "a copy, or an instance that was loaded, has other gradients"
