"""A call of a module as a function that can be asked for its derivatives."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from retrograd.core.errors import AdjointError
from retrograd.core.hooks.isolation import (
    NoTensorHooks,
    clone,
    clone_wide,
    copy_module,
    copy_nest,
    run_backward,
    strip_hooks,
)
from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.names import ArgumentNames
from retrograd.core.hooks.nested import Keys, flatten
from retrograd.core.hooks.nodes import inputs_of, name_of, number_of, root_edges
from retrograd.core.hooks.reach import find_nodes, guard_nodes
from retrograd.core.randomness import Randomness, seed_generators
from retrograd.explaining.kinks.look import Look, Sighting
from retrograd.explaining.kinks.point import Point, describe_elements, key_of
from retrograd.tools.adjoint.numerics import draw_like, find_precision, inner_product, measure_size
from retrograd.tools.adjoint.variable import Variable, is_differentiable, name_arguments

_SHIFT = 1e-2
"""How far from the batch a kink is left behind, relative to the root mean square of a tensor."""


Adjoint = Callable[..., Any]
"""From one gradient for each output to one for each argument: Jᵀ u for u."""


class DifferentiableCall:
    """A copy of a module, with copies of what it was called with. Nothing of it reaches the module itself.

    Each evaluation draws the same random numbers and finds the buffers as they were. J is the derivative of the
    outputs, flattened, with respect to one variable at a time; inner products are real, Re⟨a, b⟩, so that the adjoint
    of a complex derivative is its conjugate transpose.

    Args:
        module: the module, in the state in which it is called.
        args: its arguments.
        kwargs: those given by name.
        randomness: the random state at the call.
        names: of its arguments.
        wide: in float64.
        bare: as if nobody had set hooks on it.
        adjoint: to be taken for its backward, with respect to its arguments.

    Attributes:
        variables: its tensor arguments, then its parameters and those of modules in it that do not run in this call.
        outputs: the tensors it returns that gradients can arrive at; all of them, if there is none.
        output_keys: where they are in what it returns.
        precision: in which it computes.
        has_graph: gradients can arrive at one of them.
        noise: by how much rounding changes the inner product of its outputs with random numbers of variance one.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        randomness: Randomness,
        names: ArgumentNames,
        *,
        wide: bool = True,
        bare: bool = False,
        adjoint: Adjoint | None = None,
    ) -> None:
        self._adjoint = adjoint
        self._module = copy_module(module, wide=wide)
        self._no_hooks = NoTensorHooks() if bare else None
        self._is_stripped = bare and strip_hooks(self._module)
        self._seed: int | None = None
        self._randomness = randomness
        named = [
            (places, tensor) for places, tensor in name_arguments(names, args, kwargs) if is_differentiable(tensor)
        ]
        self._args, self._kwargs, copies = copy_nest(
            (args, kwargs, [tensor for _, tensor in named]), clone_wide if wide else clone
        )
        self._buffers = [
            (owner, name, buffer.clone())
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        self.variables = [
            Variable(places, tensor, is_parameter=False, wants_gradient=given.requires_grad)
            for (places, given), tensor in zip(named, copies, strict=True)
        ]
        self.has_graph = False
        self._is_attached: list[bool] = []
        try:
            self.outputs, self.output_keys, ran = self._look_inside()
        except Exception:
            self._drop_refused()
            self.outputs, self.output_keys, ran = self._look_inside()
        if adjoint is None:
            self.variables += self._own_parameters(ran)
        self.noise = self.precision.epsilon * math.sqrt(sum(inner_product(each, each) for each in self.outputs))

    def _look_inside(self) -> tuple[list[Tensor], list[Keys], set[nn.Module]]:
        """Run the module once; returns its outputs, their keys, and the modules in it that run."""
        visitor = _Visitor()
        taps = [CallTap(inner, visitor) for inner in self._module.modules() if inner is not self._module]
        try:
            leaves = {variable.tensor: _leaf(variable.tensor) for variable in self.variables}
            found = self._evaluate_nest(leaves)
        finally:
            for tap in taps:
                tap.remove()
        self.precision = find_precision([each.dtype for _, each in found], _dtypes_inside([each for _, each in found]))
        self.has_graph = any(output.requires_grad for _, output in found)
        takes_all = not self.has_graph or self._adjoint is not None
        self._is_attached = [output.requires_grad or takes_all for _, output in found]
        keys = [keys for (keys, _), counts in zip(found, self._is_attached, strict=True) if counts]
        return [output.detach() for output in self._counting([output for _, output in found])], keys, visitor.seen

    def _drop_refused(self) -> None:
        """Leave out arguments that the module refuses when they require grad: the target of some losses."""
        self._evaluate({})  # if it is not that, it raises here too

        def is_refused(variable: Variable) -> bool:
            try:
                self._evaluate({variable.tensor: _leaf(variable.tensor)})
            except Exception:
                return True
            return False

        self.variables = [variable for variable in self.variables if not is_refused(variable)]

    def _own_parameters(self, ran: set[nn.Module]) -> list[Variable]:
        found: dict[Tensor, Variable] = {}
        for path, inner in self._module.named_modules():
            if inner in ran:
                continue
            for name, parameter in inner.named_parameters(recurse=False):
                if parameter not in found and parameter.requires_grad and is_differentiable(parameter):
                    padding = inner.padding_idx if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) else None
                    keys = ((path, name),)
                    found[parameter] = Variable(
                        keys, parameter, is_parameter=True, wants_gradient=True, padding=padding
                    )
        return list(found.values())

    # ---- derivatives ----

    def pull_back(self, cotangents: Sequence[Tensor], seed: int | None = None) -> list[Tensor]:
        """Jᵀ u for each variable, by a backward pass; zeros where none arrives.

        Args:
            cotangents: one for each output, of its shape.
            seed: of random numbers that the backward may draw; else they go on where those of the forward ended.
        """
        if self._adjoint is not None:
            if seed is not None:
                seed_generators(seed)
            return apply_adjoint(self._adjoint, cotangents, [variable.tensor for variable in self.variables])
        leaves = {each.tensor: each.tensor if each.is_parameter else _leaf(each.tensor) for each in self.variables}
        for parameter in self._module.parameters():
            parameter.grad = None
        outputs = self._counting(self._evaluate({each.tensor: leaves[each.tensor] for each in self._arguments()}))
        attached = [(out, u) for out, u in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if seed is not None:
            seed_generators(seed)
        if attached:
            run_backward([out for out, _ in attached], [u for _, u in attached])
        gradients = [leaves[variable.tensor].grad for variable in self.variables]
        return [
            torch.zeros_like(variable.tensor) if gradient is None else gradient.detach().to_dense()
            for variable, gradient in zip(self.variables, gradients, strict=True)
        ]

    def push_forward(self, variable: Variable, tangent: Tensor, cotangents: Sequence[Tensor]) -> float | None:
        """⟨J v, u⟩ by forward mode; None where some operation of the module has none."""
        replaced = {each.tensor: _leaf(each.tensor) for each in self._arguments()}
        parameters: dict[str, Tensor] = {}
        try:
            with warnings.catch_warnings(), forward_ad.dual_level():
                warnings.simplefilter("ignore")  # torch compiles some of its formulas by what it calls deprecated
                dual = forward_ad.make_dual(_leaf(variable.tensor), tangent)
                if variable.is_parameter:
                    parameters[".".join(part for part in variable.keys[0] if part)] = dual
                else:
                    replaced[variable.tensor] = dual
                outputs = self._counting(self._evaluate(replaced, parameters))
                tangents = [forward_ad.unpack_dual(output).tangent for output in outputs]
        except Exception:  # each operation says it in its own way
            return None
        pairs = zip(tangents, cotangents, strict=True)
        return math.fsum(inner_product(pushed.detach(), u) for pushed, u in pairs if pushed is not None)

    def function_along(
        self, variable: Variable, tangent: Tensor, cotangents: Sequence[Tensor]
    ) -> Callable[[float], float]:
        """The function t ↦ ⟨f(x + t v), u⟩, whose slope at zero is ⟨J v, u⟩; NaN where the module raises."""

        def value(distance: float) -> float:
            moved = variable.tensor.detach() + distance * tangent
            replaced = {each.tensor: _leaf(each.tensor) for each in self._arguments()}
            place = _moved(variable.tensor, moved) if variable.is_parameter else nullcontext()
            if not variable.is_parameter:
                replaced[variable.tensor] = _leaf(moved)
            with place:
                try:
                    outputs = self._counting(self._evaluate(replaced))
                except (RuntimeError, ValueError, AssertionError):  # outside of its domain
                    return math.nan
            return math.fsum(inner_product(output.detach(), u) for output, u in zip(outputs, cotangents, strict=True))

        return value

    # ---- values ----

    @property
    def has_left_out_hooks(self) -> bool:
        """True if it is bare, and would have hooks otherwise."""
        return self._is_stripped or (self._no_hooks is not None and self._no_hooks.left_out)

    def is_function(self) -> bool:
        """Return whether another run returns the same."""
        again = [output.detach() for output in self._counting(self._evaluate({}))]
        return len(again) == len(self.outputs) and all(map(self._is_same, again, self.outputs))

    def _is_same(self, again: Tensor, first: Tensor) -> bool:
        allowed = math.sqrt(self.precision.epsilon) * measure_size(first)
        return again.shape == first.shape and torch.allclose(again, first, rtol=0, atol=allowed, equal_nan=True)

    def name_kinks(self) -> str:
        """The operations in it that are called where they have no derivative, and what torch takes there."""
        seen: list[Sighting] = []
        with Look(seen.append):
            outputs = self._evaluate({variable.tensor: _leaf(variable.tensor) for variable in self._arguments()})
        kinds = {number_of(node): key_of(name_of(node)) for node in _find_graph(outputs)}
        counts = Counter[Point]()
        totals = Counter[Point]()
        for each in seen:
            if kinds.get(each.number) in each.point.keys:
                counts[each.point] += int(each.lie_there.sum())
                totals[each.point] += each.lie_there.numel()
        return ", ".join(describe_elements(point, count, totals[point]) for point, count in counts.items() if count)

    @contextmanager
    def drawing_otherwise(self, seed: int) -> Iterator[None]:
        """Within it, it draws other random numbers than those of the call."""
        before, self._seed = self._seed, seed
        try:
            yield
        finally:
            self._seed = before

    # ---- where ----

    def shift(self, generator: torch.Generator, *, upwards: bool) -> None:
        """Move all variables a little, off the kinks.

        Args:
            generator: what is drawn from.
            upwards: only to larger values, as functions have it that begin at zero.
        """
        for variable in self.variables:
            tensor = variable.tensor.detach()
            way = draw_like(tensor, generator)
            tensor += _SHIFT * measure_size(tensor) * (way.abs() if upwards else way)

    def move_to(self, other: DifferentiableCall) -> None:
        """Go where another call of the same module is."""
        places = {variable.keys: variable.tensor for variable in other.variables}
        for variable in self.variables:
            if variable.keys in places:
                variable.tensor.detach().copy_(places[variable.keys].detach())

    def _arguments(self) -> list[Variable]:
        return [variable for variable in self.variables if not variable.is_parameter]

    def _counting(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Choose the outputs that gradients can arrive at; all of them if there is no such output."""
        return [output for output, counts in zip(outputs, self._is_attached, strict=True) if counts]

    def _evaluate(
        self, replaced: Mapping[Tensor, Tensor], parameters: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Run the module; returns its tensors that have derivatives."""
        return [tensor for _, tensor in self._evaluate_nest(replaced, parameters)]

    def _evaluate_nest(
        self, replaced: Mapping[Tensor, Tensor], parameters: Mapping[str, Tensor] | None = None
    ) -> list[tuple[Keys, Tensor]]:
        for owner, name, buffer in self._buffers:
            setattr(owner, name, buffer.clone())
        by_identity = {id(tensor): instead for tensor, instead in replaced.items()}
        args, kwargs = copy_nest(
            (self._args, self._kwargs),
            # a copy, for modules that write into their arguments: torch forbids that for leaves
            lambda tensor: by_identity[id(tensor)].clone() if id(tensor) in by_identity else clone(tensor),
        )
        self._randomness.restore()
        if self._seed is not None:
            seed_generators(self._seed)
        with torch.enable_grad(), self._without_hooks():
            if parameters:
                output = torch.func.functional_call(self._module, dict(parameters), args, kwargs)
            else:
                output = self._module(*args, **kwargs)
        return [(keys, tensor) for keys, tensor in flatten(output, ("output",)) if is_differentiable(tensor)]

    def _without_hooks(self) -> AbstractContextManager[Any]:
        return self._no_hooks or nullcontext()


class _Visitor:
    """Records which modules run."""

    def __init__(self) -> None:
        self.seen: set[nn.Module] = set()

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.add(module)

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Do nothing: that the module ran is known."""


@contextmanager
def _moved(parameter: Tensor, values: Tensor) -> Iterator[None]:
    """A parameter with other values, for a while."""
    before = parameter.detach().clone()
    parameter.detach().copy_(values)
    try:
        yield
    finally:
        parameter.detach().copy_(before)


def _dtypes_inside(outputs: Sequence[Tensor]) -> set[torch.dtype]:
    """Dtypes of all that autograd has seen being computed."""
    return {each.dtype for node in _find_graph(outputs) for each in inputs_of(node)}


def _find_graph(outputs: Sequence[Tensor]) -> list[Any]:
    """All nodes that these outputs lead to."""
    attached = [output for output in outputs if output.requires_grad]
    if not attached:
        return []
    reach = find_nodes(root_edges(attached))
    guard_nodes(reach.nodes, reach.links)
    return reach.nodes


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def apply_adjoint(adjoint: Adjoint, cotangents: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Jᵀ u for each argument; zeros where the adjoint gives None.

    Args:
        adjoint: what its author wrote.
        cotangents: u, which it is given as copies.
        arguments: what the results have the shapes of.

    Raises:
        AdjointError: what it returns does not fit.
    """
    with torch.no_grad():
        given = adjoint(*(cotangent.clone() for cotangent in cotangents))
    gradients = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(gradients) != len(arguments):
        raise AdjointError(
            f"The adjoint returned {len(gradients)} gradients for {len(arguments)} arguments.",
            repair="return one for each argument that is a floating-point tensor, in order, and None for none.",
        )
    return [_fit(gradient, argument) for gradient, argument in zip(gradients, arguments, strict=True)]


def _fit(gradient: Any, argument: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(argument)
    if not isinstance(gradient, Tensor) or gradient.shape != argument.shape:
        what = f"a tensor of shape {list(gradient.shape)}" if isinstance(gradient, Tensor) else repr(gradient)
        raise AdjointError(
            f"The adjoint returned {what} for an argument of shape {list(argument.shape)}.",
            repair="return a gradient of the shape of the argument.",
        )
    return gradient.detach().to_dense().to(argument.dtype)
