"""``rg.check_adjoint``: check every call of every module of a model."""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograd.core.errors import AdjointError
from retrograd.core.hooks.engine import is_transformed
from retrograd.core.hooks.isolation import clone, copy_nest, copy_or_refuse, isolated_autograd, unseen_by_discovery
from retrograd.core.hooks.module import CallTap
from retrograd.core.hooks.names import NamedModule, compiled_regions, name_models, spread_batch, walk_modules
from retrograd.core.hooks.nested import flatten
from retrograd.core.limits import LIMITS
from retrograd.core.notices import print_text
from retrograd.core.randomness import Randomness
from retrograd.core.sites.pattern import Candidate, Pattern
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import Site
from retrograd.tools.adjoint.adjoint_check import FAILURES, AdjointCheck, AdjointRow, Verdict
from retrograd.tools.adjoint.examination import CheckOptions, Examination, Visit
from retrograd.tools.adjoint.module_call import Adjoint
from retrograd.tools.adjoint.numerics import count_not_finite
from retrograd.tools.adjoint.variable import is_differentiable


def check_adjoint(
    model: nn.Module | Callable[..., Any],
    batch: Any,
    sites: Pattern | Iterable[Pattern] = "*",
    *,
    adjoint: Adjoint | None = None,
    probes: int = 1,
    in_double: bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> AdjointCheck:
    """Check at each call of each module that its backward is the adjoint of its forward.

    For random u and v the two numbers ⟨J v, u⟩ and ⟨v, Jᵀ u⟩ must be the same. The right one comes from a backward
    pass through the module. The left one comes from finite differences of its forward, and from forward mode where
    torch has it. J is the derivative with respect to one argument or parameter at a time, so a mismatch has a name.
    (The dot-product test: J. F. Claerbout, Earth Soundings Analysis, 1992, chapter 5.)

    All of it is done on a copy, in float64: no parameter, gradient, buffer, hook or random state is changed, and
    nothing is recorded. Memory: the model once more, the graph of one forward, and two copies in float64 of
    the module that is being checked.

    Args:
        model: the model, in the mode in which it is to be checked; or a function, or a Function's ``apply``.
        batch: what it is called with: a tuple or list of arguments, a mapping of named ones, or the only argument.
        sites: which modules, or which of their arguments and parameters: ``"blocks.3*"``, ``"fc:weight"``,
            ``"fc:input.x"``, a type, or several patterns. With a module's output, or its path, all of it is selected.
        adjoint: instead of the backward, one of your own: a function from a gradient for each output to a gradient for
            each argument that is a floating-point tensor (several as a tuple; None for none), at this batch. The model
            need have no graph, then, and only its outermost call is checked, with respect to its arguments.
        probes: pairs of u and v for each comparison; the worst counts.
        in_double: whether to compute in float64. Modules that raise then are checked in their own dtype, as all are
            if this is False, with larger tolerances.
        seed: of u and v.
        progress: whether to show how far it has got, once it takes long; None: on a terminal.

    Raises:
        AdjointError: if nothing can be compared, or the model cannot be copied.
        NoSuchSiteError: for a pattern that matches nothing.
        AttachError: for what is not a model.
    """
    named, path = _as_module(model)
    _check_request(named, probes)
    randomness = Randomness()
    entries = walk_modules(path, named)
    selection = Selection(sites)
    candidates = [candidate for entry in entries for candidate in entry.candidates()]
    selection.check(candidates, parameters_have_calls=True)
    options = CheckOptions(_Wants(selection), probes, seed, in_double, adjoint)
    walk = _Walk(options, Progress(sum(entry.is_called for entry in entries), progress))
    try:
        with unseen_by_discovery():
            repair = "take off it what cannot be copied (open files, locks, process groups), or check a part of it."
            _run(copy_or_refuse(named, AdjointError, repair), path, entries, walk, batch)
    finally:
        walk.progress.end()
        randomness.restore()
    if not walk.rows:
        raise AdjointError(
            "Nothing was compared: no selected module was called with, or holds, a tensor that has a derivative, and"
            " returned one.",
            repair="select other sites, or give the model a batch of floating-point tensors.",
        )
    return AdjointCheck(walk.rows)


def _as_module(model: Any) -> tuple[nn.Module, str]:
    while type(model).__name__ == "DistributedDataParallel":
        model = model.module
    if isinstance(model, nn.Module) or not callable(model):
        return next(iter(name_models(model).values())), ""
    function = PlainFunction(model)
    return function, function.name


def _check_request(model: nn.Module, probes: int) -> None:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise AdjointError("The model has parameters without a shape.", repair="run it once, then check it.")
    if probes < 1:
        raise AdjointError(f"{probes} probes compare nothing.", repair="give a number of at least 1.")


def _run(copied: nn.Module, path: str, entries: list[NamedModule], walk: _Walk, batch: Any) -> None:
    """Run the copy once, with a look at each module before it is called."""
    args, kwargs = copy_nest(spread_batch(batch), _clone_input)
    twins = walk_modules(path, copied)
    taps = [
        CallTap(twin.tapped, _CallExaminer(walk, twin, entry.module), outermost=True)
        for twin, entry in zip(twins, entries, strict=True)
        if twin.is_called
    ]
    eager: AbstractContextManager[Any] = (
        torch.compiler.set_stance("force_eager") if compiled_regions(twins) else nullcontext()
    )
    try:
        with eager, torch.enable_grad():
            copied(*args, **kwargs)
    finally:
        for tap in taps:
            tap.remove()


def _clone_input(tensor: Tensor) -> Tensor:
    return clone(tensor).requires_grad_(tensor.requires_grad)


class _Wants:
    """The selection of sites: one is checked if it is selected itself, or all of its module is."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        excluded = [pattern for pattern in selection.describe() if pattern.startswith("'!")]
        self._others = Selection(["*", *(pattern.strip("'") for pattern in excluded)])

    def __call__(self, site: Site, module: nn.Module) -> bool:
        output = Site(site.path, ("output",), site.call)
        if self._selects(output, module):
            return self._leaves(site, module)
        return self._leaves(output, module) and self._selects(site, module)

    def _selects(self, site: Site, module: nn.Module) -> bool:
        return any(self._selection.wants(Candidate(each, module)) for each in (site, site.grad))

    def _leaves(self, site: Site, module: nn.Module) -> bool:
        return all(self._others.wants(Candidate(each, module)) for each in (site, site.grad))


class _Walk:
    """The rows found so far, and the calls that the model is in."""

    def __init__(self, options: CheckOptions, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.rows: list[AdjointRow] = []
        self.running: list[tuple[str, int]] = []
        self.counts: Counter[str] = Counter()


class _CallExaminer:
    """Examines each call of one module of the copy, just before it happens."""

    def __init__(self, walk: _Walk, twin: NamedModule, original: nn.Module) -> None:
        self._walk = walk
        self._path = twin.path
        self._original = original

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        walk = self._walk
        walk.counts[self._path] += 1
        caller = (self._path, walk.counts[self._path])
        walk.progress.step(self._path)
        visit = Visit(module, self._original, args, kwargs, caller, tuple(walk.running))
        if walk.options.adjoint is None or not walk.running:
            walk.rows += Examination(visit, walk.options).make_rows()
        walk.running.append(caller)

    def after_call(self, module: nn.Module, output: Any) -> None:
        walk = self._walk
        caller = walk.running.pop()
        found = [
            tensor for _, tensor in flatten(output, ()) if not is_transformed(tensor) and is_differentiable(tensor)
        ]
        with isolated_autograd():
            bad, total = count_not_finite(found)
        if bad:  # as it runs in the model: in float64 more is finite
            walk.rows = [_spoil(row, bad, total, found[0].dtype) if row.caller == caller else row for row in walk.rows]


def _spoil(row: AdjointRow, bad: int, total: int, dtype: torch.dtype) -> AdjointRow:
    if row.verdict in FAILURES:
        return row
    reason = f"in {dtype}, {bad:,} of {total:,} numbers that it returns are not finite"
    return replace(row, verdict=Verdict.NOT_FINITE, reason=reason)


# ---- progress ----

_WIDTH = 79


class Progress:
    """A line on standard error, written anew for each module, once a check has taken two seconds.

    Args:
        total: how many modules may be called.
        is_shown: whether to write it; None: if standard error is a terminal.
    """

    def __init__(self, total: int, is_shown: bool | None) -> None:
        self._total = total
        self._is_shown = sys.stderr.isatty() if is_shown is None else is_shown
        self._began = time.monotonic()
        self._seen: set[str] = set()
        self._has_written = False

    def step(self, path: str) -> None:
        """A module is about to be checked."""
        self._seen.add(path)
        if self._is_shown and time.monotonic() - self._began > LIMITS.quiet_check_seconds:
            line = f"checking adjoints: module {len(self._seen):,} of {self._total:,}, {path}"
            self._write(line[:_WIDTH].ljust(_WIDTH))
            self._has_written = True

    def end(self) -> None:
        """Take the line away."""
        if self._has_written:
            self._write(" " * _WIDTH + "\r")

    def _write(self, line: str) -> None:
        print_text("\r" + line, file=sys.stderr, end="", flush=True)


# ---- plain function ----


class PlainFunction(nn.Module):
    """Calls a function.

    Args:
        function: the function.

    Attributes:
        name: what it is called, in letters that a path may have.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        owner = getattr(function, "__self__", None)
        is_apply = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
        plain = getattr(owner if is_apply else function, "__name__", type(function).__name__)
        self.name = "".join(letter for letter in plain if letter.isalnum() or letter == "_")
        self.forward = _with_names_of(owner, function) if is_apply else function


def _with_names_of(kind: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """``apply``, with the names of the arguments of the Function's forward; torch gives it none."""

    def call(*args: Any) -> Any:
        return apply(*args)

    parameters = list(inspect.signature(kind.forward).parameters.values())
    has_context = kind.setup_context is torch.autograd.Function.setup_context
    call.__signature__ = inspect.Signature(parameters[has_context:])  # type: ignore[attr-defined]
    return call
