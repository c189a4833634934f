"""What was not recorded of what was asked for, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from retrograd.hooks.candidates import NamedModule, compiled_regions, parameter_site
from retrograd.recording.keep import find_keep
from retrograd.recording.settings import Settings
from retrograd.sites.pattern import Candidate, describe_pattern
from retrograd.sites.site import LOCAL, Site, parse_site

_NO_GRADIENT = "no gradient came: it did not require grad, or no backward pass reached it"
_SUMMANDS = "each rank found a summand of it, and the sum was never formed; a rank's own is recorded as '….local.grad'"
_UNREDUCED = "no pass that was recorded has reduced it between ranks; a rank's own is recorded as '….local.grad'"
_NEVER_CALLED = "the module was never called while a step was recorded"
_COMPILED = "the module lies inside a compiled region, which is recorded at its boundary"


@dataclass(frozen=True)
class Evidence:
    """What is known at the end of a recording.

    Attributes:
        modules: the modules of the recorded models.
        settings: what was asked for.
        recorded: sites that have statistics.
        kept: printed sites of which a tensor was kept.
        called: modules that were called while a step was recorded.
        unreadable: sites whose tensors could not be read, and why.
        uncopied: printed sites of updates that were left out for their size.
        alone: printed sites of parameters of which this process has found gradients that were to be reduced, and
            whether there is somebody who does so.
    """

    modules: Sequence[NamedModule]
    settings: Settings
    recorded: Sequence[Site]
    kept: Collection[str]
    called: Collection[nn.Module | None]
    unreadable: Mapping[str, str]
    uncopied: Collection[str]
    alone: Mapping[str, bool]

    @cached_property
    def places(self) -> set[tuple[str, tuple[str, ...], str]]:
        """Path, slot and quantity of all that was recorded; further keys and calls are left out."""
        seen = [*self.recorded, *(parse_site(name) for name in self.kept)]
        return {_place(site) for site in seen}

    @cached_property
    def compiled(self) -> tuple[str, ...]:
        """Beginnings of the paths that lie inside compiled modules."""
        return compiled_regions(self.modules)


def list_omissions(evidence: Evidence) -> list[dict[str, str]]:
    """Sites that were asked for and have nothing, and patterns that matched nothing, as ``site`` and ``reason``."""
    found = {
        **evidence.unreadable,
        **dict(_list_calls(evidence)),
        **dict(_list_parameters(evidence)),
        **dict(_list_patterns(evidence)),
    }
    return [{"site": site, "reason": reason} for site, reason in found.items()]


def _list_calls(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for entry in evidence.modules:
        for candidate in entry.candidates():
            site = candidate.site
            stands_for_others = site.keys == ("input",)
            if site.slot in ("output", "input") and not stands_for_others and _is_missing(candidate, evidence):
                yield str(site), _explain_call(entry, site, evidence)


def _explain_call(entry: NamedModule, site: Site, evidence: Evidence) -> str:
    if entry.module not in evidence.called:
        return _COMPILED if evidence.compiled and entry.path.startswith(evidence.compiled) else _NEVER_CALLED
    if site.quantity == "grad":
        return _NO_GRADIENT
    return "no tensor was returned" if site.slot == "output" else "no tensor was passed"


def _list_parameters(evidence: Evidence) -> Iterator[tuple[str, str]]:
    first_names: dict[int, str] = {}
    for entry in evidence.modules:
        for name, parameter in entry.parameters:
            site = parameter_site(entry.path, name)
            first = first_names.setdefault(id(parameter), str(site))
            for wanted in (site, site.grad, site.update):
                if _is_missing(Candidate(wanted, entry.module), evidence):
                    is_tied = first != str(site)
                    reason = (
                        f"the parameter is recorded as {first}" if is_tied else _explain(parameter, wanted, evidence)
                    )
                    yield str(wanted), reason


def _explain(parameter: nn.Parameter, site: Site, evidence: Evidence) -> str:
    if not parameter.requires_grad:
        return "the parameter is frozen"
    if str(site) in evidence.uncopied:
        return "more bytes of weights than are copied while an optimizer steps"
    if site.quantity != "grad":
        return "no optimizer of torch.optim has updated the parameter"
    is_reduced = evidence.alone.get(str(site.value))
    return _NO_GRADIENT if is_reduced is None else _UNREDUCED if is_reduced else _SUMMANDS


def _is_missing(candidate: Candidate, evidence: Evidence) -> bool:
    settings = evidence.settings
    is_wanted = settings.wants_statistics(candidate) or find_keep(settings.keeps, candidate) is not None
    return (
        is_wanted and _place(candidate.site) not in evidence.places and str(candidate.site) not in evidence.unreadable
    )


def list_unmatched(evidence: Evidence) -> list[str]:
    """Patterns that nothing matched though the model ran, as text."""
    return [pattern for pattern, _ in _list_patterns(evidence)] if evidence.called else []


def _list_patterns(evidence: Evidence) -> Iterator[tuple[str, str]]:
    modules = {entry.path: entry.module for entry in evidence.modules}
    candidates = [candidate for entry in evidence.modules for candidate in entry.candidates()]
    candidates += [Candidate(site, modules.get(site.path)) for site in evidence.recorded]
    candidates += [Candidate(site, modules.get(site.path)) for site in map(parse_site, evidence.kept)]
    settings = evidence.settings
    for selection in (
        *([settings.selection] if settings.statistics else []),
        *(keep.selection for keep in settings.keeps),
    ):
        for pattern in selection.unmatched(candidates):
            yield describe_pattern(pattern), "nothing matched this pattern while the model ran"


def _place(site: Site) -> tuple[str, tuple[str, ...], str]:
    is_local = site.slot != "output" and site.keys[-1:] == (LOCAL,)
    return site.path, site.keys[: 2 if site.slot == "input" or is_local else 1], site.quantity
