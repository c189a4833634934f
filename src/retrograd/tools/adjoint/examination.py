"""The examination of one call of a module: all comparisons, and their verdicts."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from retrograd.core.hooks.engine import is_transformed
from retrograd.core.hooks.isolation import isolated_autograd
from retrograd.core.hooks.names import ArgumentNames, parameter_site
from retrograd.core.hooks.nested import flatten
from retrograd.core.hooks.rewriters import try_rules
from retrograd.core.randomness import Randomness
from retrograd.core.sites.site import ROOT, Site
from retrograd.tools.adjoint.adjoint_check import FAILURES, AdjointRow, Verdict, rank
from retrograd.tools.adjoint.comparison import AdjointComparison, Agreement, RandomProbe, compare
from retrograd.tools.adjoint.explanations import Silence, Suspect
from retrograd.tools.adjoint.module_call import Adjoint, DifferentiableCall
from retrograd.tools.adjoint.numerics import count_not_finite, inner_product
from retrograd.tools.adjoint.variable import Variable

_OTHER_SEED = 0x5EED
"""Of the random numbers of a backward that is run again."""

_ROUNDINGS = 64
"""By how many of these two runs may differ that add up in another order; our own choice."""

_UNSTEADY = "its backward gives another gradient when it is run again"

_MOST_LETTERS = 160
"""Of a message of torch that is quoted in a row."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of a check.

    Attributes:
        wants: whether a site, for which the derivative could be checked, is selected.
        probes: pairs of random vectors for each call.
        seed: of their generator.
        in_double: whether to compute in float64 where the module can.
        adjoint: what is to be compared instead of the backward; only of the outermost call.
    """

    wants: Callable[[Site, nn.Module], bool]
    probes: int
    seed: int
    in_double: bool
    adjoint: Adjoint | None = None


@dataclass(frozen=True, slots=True)
class Visit:
    """A module that is about to be called.

    Attributes:
        module: a copy of it, as it is now, with the hooks of its user.
        original: the module that it was copied from.
        args: what it is called with.
        kwargs: what it is called with by name.
        caller: its path, and which of its calls this is.
        within: the calls that this one is made in.
    """

    module: nn.Module
    original: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caller: tuple[str, int]
    within: tuple[tuple[str, int], ...]


class Examination:
    """Compares both sides for each variable of one call.

    Args:
        visit: the call.
        request: what is asked for.
    """

    def __init__(self, visit: Visit, options: CheckOptions) -> None:
        self._visit = visit
        self._options = options
        self._randomness = Randomness()
        self._generator = torch.Generator().manual_seed(options.seed ^ zlib.crc32(repr(visit.caller).encode()))
        self._wide = options.in_double

    def make_rows(self) -> list[AdjointRow]:
        """Make a row for each variable that is selected. The random state is the same after it as before."""
        if self._is_transformed():
            return [self._row(self._output_site(), Verdict.NOT_CHECKED, "it runs inside a torch.func transform")]
        try:
            with isolated_autograd():
                return self._make_rows()
        except Exception as error:
            return [self._row(self._output_site(), Verdict.NOT_CHECKED, f"it cannot be run again: {_name(error)}")]
        finally:
            self._randomness.restore()

    def _is_transformed(self) -> bool:
        return any(is_transformed(tensor) for _, tensor in flatten((self._visit.args, self._visit.kwargs), ()))

    def _make_rows(self) -> list[AdjointRow]:
        call = self._open()
        wanted = [
            index
            for index, variable in enumerate(call.variables)
            if self._options.wants(self._site(variable), self._visit.original)
        ]
        if not wanted or not call.outputs:
            return []
        unfit = find_unfitness(call)
        if unfit is not None:
            return [self._row(self._site(call.variables[index]), *unfit) for index in wanted]
        probes = [RandomProbe(call, self._generator) for _ in range(self._options.probes)]
        rows: dict[int, AdjointRow] = {}
        for probe in probes:
            try:
                gradients = call.pull_back(probe.cotangents)
            except Exception as error:
                if self._wide:  # it may be that the backward alone takes no float64
                    self._wide = False
                    return self._make_rows()
                return [self._failed(call.variables[index], error) for index in wanted]
            unsteady = self._find_unsteady(call, probe, gradients)
            for index in wanted:
                row = unsteady.get(index) or self._examine_or_say(call, index, probe, gradients[index])
                rows[index] = min(rows.get(index, row), row, key=rank)
        return [row for index, row in rows.items() if not self._is_unused(call.variables[index], row)]

    def _find_unsteady(
        self, call: DifferentiableCall, probe: RandomProbe, gradients: Sequence[Tensor]
    ) -> dict[int, AdjointRow]:
        """Rows of gradients that another run of the backward gives otherwise, unless a hook of the user does so.

        The bits are compared. Sums in another order, as of atomic additions on a device, differ by rounding alone.
        """
        apart = _compare_runs(call, probe, gradients)
        if apart and self._options.adjoint is None:
            bare = self._open(bare=True)
            bare.move_to(call)
            if bare.has_left_out_hooks and not _compare_runs(bare, probe, bare.pull_back(probe.cotangents)):
                again = _compare_runs(call, probe, call.pull_back(probe.cotangents))
                apart = {} if again else apart  # steady by now with its hooks too: it was no hook
        return {
            index: self._row(
                self._site(call.variables[index]), Verdict.RANDOM, f"{_UNSTEADY}: apart by {size:.1e} of its size"
            )
            for index, size in apart.items()
        }

    def _open(self, *, bare: bool = False) -> DifferentiableCall:
        """The call, in float64 if it can be run so."""
        visit = self._visit
        arguments = (visit.module, visit.args, visit.kwargs, self._randomness, ArgumentNames(visit.original))
        if self._wide:
            try:
                return DifferentiableCall(*arguments, bare=bare, adjoint=self._options.adjoint)
            except Exception:  # the module takes no float64: what it raises otherwise too, it raises below
                self._wide = False
        return DifferentiableCall(*arguments, wide=False, bare=bare, adjoint=self._options.adjoint)

    def _examine_or_say(self, call: DifferentiableCall, index: int, probe: RandomProbe, gradient: Tensor) -> AdjointRow:
        try:
            return self._examine(call, index, probe, gradient)
        except Exception as error:
            reason = f"close by, where it has a derivative, it raises {_name(error)}"
            return self._row(self._site(call.variables[index]), Verdict.NOT_CHECKED, reason)

    def _examine(self, call: DifferentiableCall, index: int, probe: RandomProbe, gradient: Tensor) -> AdjointRow:
        variable = call.variables[index]
        comparison = self._compare(call, index, probe, gradient)
        verdict, reason, shown = self._judge(call, index, probe, comparison, gradient)
        if verdict in (Verdict.OK, Verdict.KINK) and self._options.adjoint is None:
            ruled = self._try_rules(call, index, probe, gradient)
            if ruled is not gradient:
                verdict, reason = Verdict.REWRITTEN, "a rule changes the gradient; without it, they agree"
                shown = replace(shown, backward=inner_product(probe.tangents[index], ruled))
        if verdict in FAILURES and self._asks_for_nothing(variable, gradient):
            verdict, reason = Verdict.NOT_CHECKED, "it asks for no gradient in this model, and is given none"
        return self._row(self._site(variable), verdict, reason, shown)

    def _judge(
        self, call: DifferentiableCall, index: int, probe: RandomProbe, comparison: AdjointComparison, gradient: Tensor
    ) -> tuple[Verdict, str, AdjointComparison]:
        bad, total = count_not_finite([gradient])
        if bad:
            verdict, reason = _explain_not_finite(gradient, bad, total)
            return verdict, _and_where(reason, call), comparison
        if comparison.outcome is not Agreement.DIFFERS and not bool(gradient.any()):
            found = self._explain_silence(call, index, probe, comparison)
            if found is not None:
                return found
        if comparison.outcome is Agreement.AGREES:
            return Verdict.OK, self._remark(call.variables[index]), comparison
        near = comparison
        if comparison.outcome is Agreement.OPEN or comparison.slope.is_kinked:
            if self._options.adjoint is not None:
                return Verdict.NOT_CHECKED, "it has no derivative here, and the adjoint is known here alone", comparison
            call, near = self._compare_close_by(index, probe)
            if near.outcome is Agreement.AGREES:
                kinks = self._open().name_kinks()
                return Verdict.KINK, f"{kinks or 'it has no derivative here'}; close by, both agree", comparison
            if near.outcome is Agreement.OPEN:
                return Verdict.NOT_CHECKED, _explain_open(near), comparison
        return *self._explain_difference(call, index, probe, near), near

    def _compare_close_by(self, index: int, probe: RandomProbe) -> tuple[DifferentiableCall, AdjointComparison]:
        for upwards in (False, True):
            call = self._open()
            call.shift(self._generator, upwards=upwards)
            near = self._compare(call, index, probe, call.pull_back(probe.cotangents)[index])
            if near.outcome is not Agreement.OPEN:
                break
        return call, near

    def _explain_silence(
        self, call: DifferentiableCall, index: int, probe: RandomProbe, comparison: AdjointComparison
    ) -> tuple[Verdict, str, AdjointComparison] | None:
        """Explain why the gradient is zero and nothing moves; None if nothing is wrong with it."""
        if self._options.adjoint is not None or self._is_of_inner(call.variables[index]):
            return None
        silence = Silence(call, index, probe.cotangents, self._generator)
        is_drawn = silence.is_drawn()
        if is_drawn and silence.depends_by_chance():
            return Verdict.RANDOM, "it is drawn at random what it returns, and only the odds depend on this", comparison
        if not call.has_graph:
            return *self._explain_no_graph(silence, is_drawn=is_drawn), comparison
        if comparison.outcome is Agreement.AGREES:  # both are zero: any factor would be right
            call, near = self._compare_close_by(index, probe)
            if near.outcome is Agreement.DIFFERS and not near.slope.is_kinked:
                verdict, reason = self._explain_difference(call, index, probe, near)
                return verdict, f"{reason} (close by: here it is zero)", near
        return None

    def _explain_no_graph(self, silence: Silence, *, is_drawn: bool) -> tuple[Verdict, str]:
        """A part of a model may compute something without a graph, of the shape of what it is given: positions."""
        if silence.depends():
            return Verdict.NO_GRAPH, "what it returns has no graph, and depends on this in jumps"
        if self._visit.within:
            return Verdict.NOT_CHECKED, "what it returns has no graph, and does not depend on this"
        if is_drawn:
            return Verdict.RANDOM, "what it returns is drawn at random, and has no graph"
        return Verdict.NO_GRAPH, "what it returns has no graph"

    def _explain_difference(
        self, call: DifferentiableCall, index: int, probe: RandomProbe, comparison: AdjointComparison
    ) -> tuple[Verdict, str]:
        hooked = self._options.adjoint is None and self._is_right_without_hooks(call, index, probe, comparison)
        again = self._compare(call, index, probe, call.pull_back(probe.cotangents)[index])
        if again.outcome is Agreement.AGREES:
            return Verdict.RANDOM, f"{_UNSTEADY}: that one agrees"
        if hooked:
            return Verdict.REWRITTEN, "a hook changes the gradient; without it, they agree"
        return Verdict.WRONG, Suspect(call, index, probe, comparison, self._generator).describe()

    def _is_right_without_hooks(
        self, call: DifferentiableCall, index: int, probe: RandomProbe, hooked: AdjointComparison
    ) -> bool:
        """Return whether the backward alone is the adjoint of the same forward: then a hook changed the gradient."""
        site = self._site(call.variables[index])
        try:
            bare = self._open(bare=True)
            if not bare.has_left_out_hooks:
                return False
            bare.move_to(call)
            match = next(place for place, variable in enumerate(bare.variables) if self._site(variable) == site)
            gradient = bare.pull_back(probe.cotangents)[match]
            alone = compare(bare, match, probe.tangents[index], probe.cotangents, gradient)
        except Exception:  # it needs its hooks: they are a part of it
            return False
        apart = abs(alone.slope.value - hooked.slope.value)
        same = apart <= alone.scale * alone.precision.differences + 2 * (alone.slope.error + hooked.slope.error)
        return same and alone.outcome is Agreement.AGREES

    def _try_rules(self, call: DifferentiableCall, index: int, probe: RandomProbe, gradient: Tensor) -> Tensor:
        """The gradient after the rules for the outputs and for the variable; the same tensor if they do nothing."""
        original, (path, number) = self._visit.original, self._visit.caller
        cotangents = [
            try_rules(original, Site(path, keys, number).grad, cotangent)
            for keys, cotangent in zip(call.output_keys, probe.cotangents, strict=True)
        ]
        if any(ruled is not given for ruled, given in zip(cotangents, probe.cotangents, strict=True)):
            gradient = call.pull_back(cotangents)[index]
        return try_rules(original, self._site(call.variables[index]).grad, gradient)

    # ---- words ----

    def _compare(self, call: DifferentiableCall, index: int, probe: RandomProbe, gradient: Tensor) -> AdjointComparison:
        return compare(call, index, probe.tangents[index], probe.cotangents, gradient)

    def _asks_for_nothing(self, variable: Variable, gradient: Tensor) -> bool:
        """A mask or a target in the middle of the model: nobody wants its gradient, so none need be computed."""
        return bool(self._visit.within) and not variable.wants_gradient and not bool(gradient.any())

    def _is_unused(self, variable: Variable, row: AdjointRow) -> bool:
        """A parameter of a module in this one that did not run in this call, and was not used without it."""
        return self._is_of_inner(variable) and row.forward == row.backward == 0

    def _is_of_inner(self, variable: Variable) -> bool:
        inner, _ = variable.keys[0] if variable.is_parameter else ("", "")
        return bool(inner)

    def _site(self, variable: Variable) -> Site:
        path, number = self._visit.caller
        keys = variable.keys[0]
        if not variable.is_parameter:
            return Site(path, keys, number)
        inner, name = keys
        owner = ".".join(part for part in ("" if path == ROOT and inner else path, inner) if part)
        return replace(parameter_site(owner, name), call=number)

    def _output_site(self) -> Site:
        path, number = self._visit.caller
        return Site(path, ("output",), number)

    def _remark(self, variable: Variable) -> str:
        if len(variable.keys) == 1:
            return ""
        return "given as " + " and ".join(".".join(keys) for keys in variable.keys)

    def _failed(self, variable: Variable, error: Exception) -> AdjointRow:
        is_missing = isinstance(error, NotImplementedError) or "is not implemented" in str(error)
        verdict = Verdict.NOT_CHECKED if is_missing else Verdict.WRONG
        what = "backward" if self._options.adjoint is None else "adjoint"
        return self._row(self._site(variable), verdict, f"its {what} raises {_name(error)}")

    def _row(self, site: Site, verdict: Verdict, reason: str, shown: AdjointComparison | None = None) -> AdjointRow:
        visit = self._visit
        row = AdjointRow(site, visit.caller, type(visit.original).__name__, verdict, visit.within, reason)
        if shown is None:
            return row
        return replace(
            row,
            forward=shown.forward,
            backward=shown.backward,
            difference=shown.difference,
            tolerance=shown.tolerance,
            method="forward mode" if shown.by_forward_mode else "finite differences",
            precision=shown.precision.name,
        )


def _compare_runs(call: DifferentiableCall, probe: RandomProbe, gradients: Sequence[Tensor]) -> dict[int, float]:
    """How far the gradients of another run are from these, relative to their norm, where that is beyond rounding."""
    again = call.pull_back(probe.cotangents, seed=_OTHER_SEED)
    apart: dict[int, float] = {}
    for index, (first, second) in enumerate(zip(gradients, again, strict=True)):
        if not torch.equal(first, second) and bool(first.isfinite().all() and second.isfinite().all()):
            size = float(torch.linalg.vector_norm(first)) or 1.0
            apart[index] = float(torch.linalg.vector_norm(second - first)) / size
    return {index: size for index, size in apart.items() if size > _ROUNDINGS * call.precision.epsilon}


def find_unfitness(call: DifferentiableCall) -> tuple[Verdict, str] | None:
    """Find out whether a call can be differentiated at all: it is finite, and the same each time."""
    bad, total = count_not_finite(call.outputs)
    if bad:
        given, _ = count_not_finite([variable.tensor for variable in call.variables])
        source = "so is what it is given" if given else "all that it is given is finite"
        return Verdict.NOT_FINITE, f"{bad:,} of {total:,} numbers that it returns are not finite; {source}"
    if not call.is_function():
        return Verdict.RANDOM, "it returns something else each time, for the same input and random state"
    return None


def _explain_not_finite(gradient: Tensor, bad: int, total: int) -> tuple[Verdict, str]:
    nans = int(gradient.isnan().sum())
    words = f"the gradient is not finite, though the output is: {bad:,} of {total:,} numbers are "
    if nans:
        return Verdict.WRONG, words + ("NaN" if nans == bad else "NaN or infinite")
    return Verdict.NOT_FINITE, words + "infinite"


def _and_where(reason: str, call: DifferentiableCall) -> str:
    kinks = call.name_kinks()
    return f"{reason}: {kinks}" if kinks else reason


def _explain_open(near: AdjointComparison) -> str:
    if not math.isfinite(near.backward):
        return "close by, the gradient is not finite"
    return "finite differences do not settle, and it has no forward mode"


def _name(error: Exception) -> str:
    first = str(error).strip().split("\n", 1)[0]
    return shorten(f"{type(error).__name__}: {first}", _MOST_LETTERS, placeholder=" ...").rstrip(":")
