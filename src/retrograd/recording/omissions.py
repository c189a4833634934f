"""What was not recorded of what was asked for, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from retrograd.recording.wishes import ParameterWish, Wish, Wishes
from retrograd.sites.pattern import describe_pattern
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
        wishes: what was asked for.
        recorded: sites that have statistics.
        kept: printed sites of which a tensor was kept.
        called: paths of modules that were called while a step was recorded.
        unreadable: sites whose tensors could not be read, and why.
        uncopied: printed sites of updates and reduced gradients that were left out for their size.
        alone: printed sites of parameters of which this process has found gradients that were to be reduced, and
            whether there is somebody who does so.
    """

    wishes: Wishes
    recorded: Sequence[Site]
    kept: Collection[str]
    called: Collection[str]
    unreadable: Mapping[str, str]
    uncopied: Collection[str]
    alone: Mapping[str, bool]

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
        """Beginnings of the paths that lie inside compiled modules."""
        return self.wishes.compiled

    def lacks(self, site: Site) -> bool:
        """Whether there is nothing of a site that was asked for."""
        return _place(site) not in self.recorders and str(site) not in self.unreadable


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
    for wish in evidence.wishes.modules:
        for site in wish.calls:
            if evidence.lacks(site):
                yield str(site), _explain_call(wish, site, evidence)


def _explain_call(wish: Wish, site: Site, evidence: Evidence) -> str:
    if wish.path not in evidence.called:
        return _COMPILED if evidence.compiled and wish.path.startswith(evidence.compiled) else _NEVER_CALLED
    if site.quantity == "grad":
        return _NO_GRADIENT
    return "no tensor was returned" if site.slot == "output" else "no tensor was passed"


def _list_parameters(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for module in evidence.wishes.modules:
        for parameter in module.parameters:
            for site in parameter.sites:
                if evidence.lacks(site):
                    yield str(site), _explain_parameter(parameter, site, evidence)


def _explain_parameter(parameter: ParameterWish, site: Site, evidence: Evidence) -> str:
    if parameter.first_name != str(site.value):
        return f"the parameter is recorded as {parameter.first_name}"
    if parameter.is_frozen:
        return "the parameter is frozen"
    if str(site) in evidence.uncopied:
        when = "during a pass" if site.quantity == "grad" else "while an optimizer steps"
        return f"more bytes of weights than are copied {when}"
    if site.quantity != "grad":
        return "no optimizer of torch.optim has updated the parameter"
    is_reduced = evidence.alone.get(str(site.value))
    return _NO_GRADIENT if is_reduced is None else _UNREDUCED if is_reduced else _SUMMANDS


def list_unmatched(evidence: Evidence) -> list[str]:
    """Patterns that nothing matched though the model ran, as text."""
    return [pattern for pattern, _ in _list_patterns(evidence)] if evidence.called else []


def _list_patterns(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for pattern in evidence.wishes.list_unmatched(evidence.sites):
        yield describe_pattern(pattern), "nothing matched this pattern while the model ran"


def _place(site: Site) -> tuple[str, tuple[str, ...], str]:
    is_local = site.slot != "output" and site.keys[-1:] == (LOCAL,)
    return site.path, site.keys[: 2 if site.slot == "input" or is_local else 1], site.quantity
