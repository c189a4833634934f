"""Sites that were asked for and not recorded, with reasons."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from retrograd.core.history.sink import NEVER_CALLED, NO_GRADIENT
from retrograd.core.hooks.compiled import has_been_compiled
from retrograd.core.hooks.names import NamedModule, beginning_of, parameter_site
from retrograd.core.hooks.parts import is_compiled
from retrograd.core.recording.keep import find_keep
from retrograd.core.recording.settings import Settings
from retrograd.core.sites.pattern import Candidate, Pattern, describe_pattern
from retrograd.core.sites.site import LOCAL, ROOT, Site, parse_site


@dataclass(frozen=True, slots=True)
class RequestedParameter:
    """The sites of one parameter that were asked for.

    Attributes:
        sites: of its value, its gradient and its update those that were.
        first_name: the name under which it is recorded; another one where parameters are tied.
    """

    sites: tuple[Site, ...]
    first_name: str
    find: WeakIdRef
    was_frozen: bool

    @property
    def is_frozen(self) -> bool:
        """True if it does not train, or if it is gone and did not train when it was found."""
        parameter: torch.Tensor | None = self.find()
        return self.was_frozen if parameter is None else not parameter.requires_grad


class RequestedModule:
    """The sites of one module that were asked for; the module is not held, and may be gone by the end.

    Attributes:
        path: its path.
        calls: sites of its outputs and arguments, as far as they are known before it has run.
        had_code: its forward had been compiled when it was found, by itself or by who calls it.
        parameters: its own parameters.
    """

    __slots__ = ("_find", "_find_tapped", "_was_compiled", "calls", "had_code", "parameters", "path")

    def __init__(
        self, entry: NamedModule, wants: Callable[[Candidate], bool], first_names: WeakTensorKeyDictionary
    ) -> None:
        self.path = entry.path
        self._find = weakref.ref(entry.module)
        self._find_tapped = weakref.ref(entry.tapped)
        self._was_compiled = is_compiled(entry.tapped)
        self.had_code = has_been_compiled(entry.module)
        self.calls = [each.site for each in entry.candidates() if _is_of_call(each.site) and wants(each)]
        self.parameters = []
        for name, parameter in entry.parameters:
            site = parameter_site(entry.path, name)
            self.parameters.append(
                RequestedParameter(
                    sites=tuple(
                        each for each in (site, site.grad, site.update) if wants(Candidate(each, entry.module))
                    ),
                    first_name=first_names.setdefault(parameter, str(site)),
                    find=WeakIdRef(parameter),
                    was_frozen=not parameter.requires_grad,
                )
            )

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it is gone."""
        return self._find()

    @property
    def is_compiled(self) -> bool:
        """True if its calls run as compiled code, or if it is gone and they did when it was found."""
        tapped = self._find_tapped()
        return self._was_compiled if tapped is None else is_compiled(tapped)


class RequestedSites:
    """The sites of the recorded models that were asked for.

    Args:
        settings: what was asked for.

    Attributes:
        modules: of each of their modules.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._first_names = WeakTensorKeyDictionary()
        selections = [settings.selection] if settings.statistics else []
        selections += [keep.selection for keep in settings.keeps]
        self._unmatched = [(selection, selection.unmatched(())) for selection in selections]
        self.modules: list[RequestedModule] = []

    def add(self, entries: Iterable[NamedModule]) -> None:
        """Add modules that are recorded from now on."""
        candidates: list[Candidate] = []
        for entry in entries:
            self.modules.append(RequestedModule(entry, self._wants, self._first_names))
            candidates += entry.candidates()
        self._match(candidates)

    def list_unmatched(self, sites: Iterable[Site], nodes: Mapping[str, Iterable[str]]) -> Iterator[Pattern]:
        """Patterns that have matched no site of a module, nor any of these, which have come up since.

        Args:
            sites: what was recorded.
            nodes: for each path of a function the kinds of nodes that it has made.
        """
        modules = {module.path: module.module for module in self.modules}
        functions = [Site(path, ("output",)) for path in nodes]
        found = [*sites, *functions, *(site.grad for site in functions)]
        self._match(
            [Candidate(site, modules.get(site.path), node) for site in found for node in nodes.get(site.path, (None,))]
        )
        for _, patterns in self._unmatched:
            yield from patterns

    @property
    def compiled(self) -> tuple[str, ...]:
        """Beginnings of the paths of modules that lie inside compiled ones."""
        return tuple(beginning_of(module.path) for module in self.modules if module.is_compiled)

    def _wants(self, candidate: Candidate) -> bool:
        settings = self._settings
        return settings.wants_statistics(candidate) or find_keep(settings.keeps, candidate) is not None

    def _match(self, candidates: list[Candidate]) -> None:
        self._unmatched = [
            (selection, [pattern for pattern in selection.unmatched(candidates) if pattern in patterns])
            for selection, patterns in self._unmatched
            if patterns
        ]


def _is_of_call(site: Site) -> bool:
    """True for an output or a known argument; ``input`` alone stands for arguments that are not known."""
    return site.slot in ("output", "input") and site.keys != ("input",)


_SUMMANDS = "each rank found a summand of it, and the sum was never formed; a rank's own is recorded as '….local.grad'"
_ADDENDS = "each rank has an addend of it, and the sum was not formed there; in the history it is '….local'"
_UNREDUCED = "no pass that was recorded has reduced it between ranks; a rank's own is recorded as '….local.grad'"
_SWAPPED = "the recorded module was swapped for another, of which no call is recorded"
_USED = (
    "the module was not called while a step was recorded, though its weights got gradients: its forward is called by "
    "name, or its weights are used without a call, so that no hook runs"
)
_HELD = "used by its parent, an nn.MultiheadAttention, which computes with its weights without a call"
_COMPILED = "the module lies inside a region that was compiled before the recording: call torch.compiler.reset() then"


@dataclass(frozen=True)
class Coverage:
    """All that tells, at the end of a recording, what was asked for and what was recorded.

    Attributes:
        requested: what was asked for.
        swapped: paths where another module has come into the place of the recorded one.
        recorded: sites that have statistics.
        kept: printed sites of which a tensor was kept.
        called: paths of modules that were called while a step was recorded.
        unreadable: sites whose tensors could not be read, and why.
        uncopied: printed sites of updates and reduced gradients that were left out for their size.
        summands: sites of activations of which each process has an addend.
        nodes: for each path of a function the kinds of nodes that it has made.
        alone: printed sites of parameters of which this process has found gradients that were to be reduced, and
            whether there is somebody who does so.
    """

    requested: RequestedSites
    swapped: Sequence[str]
    recorded: Sequence[Site]
    kept: Collection[str]
    called: Collection[str]
    unreadable: Mapping[str, str]
    uncopied: Collection[str]
    summands: Sequence[Site]
    alone: Mapping[str, bool]
    nodes: Mapping[str, Iterable[str]]

    @cached_property
    def sites(self) -> list[Site]:
        """All that was recorded or kept."""
        return [*self.recorded, *(parse_site(name) for name in self.kept)]

    @cached_property
    def recorders(self) -> set[tuple[str, tuple[str, ...], str]]:
        """Path, slot and quantity of all that was; further keys and calls are left out."""
        return {_place(site) for site in self.sites}

    @cached_property
    def compiled(self) -> tuple[str, ...]:
        """Beginnings of the paths that lie inside compiled modules, or inside called ones that were compiled before."""
        early = (each.path for each in self.requested.modules if each.had_code and each.path in self.called)
        return (*self.requested.compiled, *map(beginning_of, early))

    def find_parent(self, path: str) -> nn.Module | None:
        """The module that holds the one at this path; None if it was not asked for, or is gone."""
        parent = self._by_path.get(path.rpartition(".")[0] or ROOT)
        return None if parent is None else parent.module

    @cached_property
    def _by_path(self) -> dict[str, RequestedModule]:
        return {each.path: each for each in self.requested.modules}

    def lacks(self, site: Site) -> bool:
        """True if there is nothing of a site that was asked for."""
        return _place(site) not in self.recorders and str(site) not in self.unreadable

    def has_gradient(self, parameter: RequestedParameter) -> bool:
        """True if a gradient of this parameter was recorded."""
        return any(site.quantity == "grad" and not self.lacks(site) for site in parameter.sites)


def list_omissions(coverage: Coverage) -> list[dict[str, str]]:
    """Sites that were asked for and have nothing, and patterns that matched nothing, as ``site`` and ``reason``."""
    found = {
        **coverage.unreadable,
        **dict(_list_calls(coverage)),
        **dict(_list_parameters(coverage)),
        **{str(site): _ADDENDS for site in coverage.summands},
        **dict(_list_patterns(coverage)),
    }
    return [{"site": site, "reason": reason} for site, reason in found.items()]


def _list_calls(coverage: Coverage) -> Iterator[tuple[str, str]]:
    beginnings = tuple(beginning_of(path) for path in coverage.swapped)
    for module in coverage.requested.modules:
        is_swapped = module.path in coverage.swapped or module.path.startswith(beginnings)
        for site in module.calls:
            if is_swapped:
                yield str(site), _SWAPPED
            elif coverage.lacks(site):
                yield str(site), _explain_call(module, site, coverage)


def _explain_call(module: RequestedModule, site: Site, coverage: Coverage) -> str:
    is_compiled = bool(coverage.compiled) and module.path.startswith(coverage.compiled)
    if module.path not in coverage.called:
        if is_compiled:
            return _COMPILED
        if isinstance(coverage.find_parent(module.path), nn.MultiheadAttention):
            return _HELD
        return _USED if any(map(coverage.has_gradient, module.parameters)) else NEVER_CALLED
    if site.quantity == "grad":
        return NO_GRADIENT
    return "no tensor was returned" if site.slot == "output" else "no tensor was passed"


def _list_parameters(coverage: Coverage) -> Iterator[tuple[str, str]]:
    for module in coverage.requested.modules:
        for parameter in module.parameters:
            for site in parameter.sites:
                if coverage.lacks(site):
                    yield str(site), _explain_parameter(parameter, site, coverage)


def _explain_parameter(parameter: RequestedParameter, site: Site, coverage: Coverage) -> str:
    if parameter.first_name != str(site.value):
        return f"the parameter is recorded as {parameter.first_name}"
    if parameter.is_frozen:
        return "the parameter is frozen"
    if str(site) in coverage.uncopied:
        when = "during a pass" if site.quantity == "grad" else "while an optimizer steps"
        return f"more bytes of weights than are copied {when}"
    if site.quantity != "grad":
        return "no optimizer of torch.optim has updated the parameter"
    is_reduced = coverage.alone.get(str(site.value))
    return NO_GRADIENT if is_reduced is None else _UNREDUCED if is_reduced else _SUMMANDS


def list_unmatched(coverage: Coverage, *, was_run: bool) -> list[Pattern]:
    """Patterns that nothing matched though the model ran, as is known from functions or from calls of modules."""
    if not (was_run or coverage.called):
        return []
    return list(coverage.requested.list_unmatched(coverage.sites, coverage.nodes))


def _list_patterns(coverage: Coverage) -> Iterator[tuple[str, str]]:
    for pattern in coverage.requested.list_unmatched(coverage.sites, coverage.nodes):
        yield describe_pattern(pattern), "nothing matched this pattern while the model ran"


def _place(site: Site) -> tuple[str, tuple[str, ...], str]:
    is_local = site.slot != "output" and site.keys[-1:] == (LOCAL,)
    return site.path, site.keys[: 2 if site.slot == "input" or is_local else 1], site.quantity
