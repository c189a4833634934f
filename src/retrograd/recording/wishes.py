"""What was asked for of each recorded module, remembered without holding it: by the end it may be gone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from retrograd.hooks.candidates import NamedModule, beginning_of
from retrograd.hooks.module import is_compiled
from retrograd.hooks.module_paths import parameter_site
from retrograd.recording.keep import find_keep
from retrograd.recording.settings import Settings
from retrograd.sites.pattern import Candidate, Pattern
from retrograd.sites.site import Site


@dataclass(frozen=True, slots=True)
class ParameterWish:
    """What was asked for of one parameter.

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
        """Whether it does not train; of one that is gone, whether it did not when it was found."""
        parameter: torch.Tensor | None = self.find()
        return self.was_frozen if parameter is None else not parameter.requires_grad


class Wish:
    """What was asked for of one module.

    Attributes:
        path: its path.
        calls: sites of its outputs and arguments, as far as they are known before it has run.
        parameters: its own parameters.
    """

    __slots__ = ("_find", "_find_tapped", "_was_compiled", "calls", "parameters", "path")

    def __init__(
        self, entry: NamedModule, wants: Callable[[Candidate], bool], first_names: WeakTensorKeyDictionary
    ) -> None:
        self.path = entry.path
        self._find = weakref.ref(entry.module)
        self._find_tapped = weakref.ref(entry.tapped)
        self._was_compiled = is_compiled(entry.tapped)
        self.calls = [each.site for each in entry.candidates() if _is_of_call(each.site) and wants(each)]
        self.parameters = []
        for name, parameter in entry.parameters:
            site = parameter_site(entry.path, name)
            self.parameters.append(
                ParameterWish(
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
        """Whether its calls run as compiled code; of one that is gone, whether they did when it was found."""
        tapped = self._find_tapped()
        return self._was_compiled if tapped is None else is_compiled(tapped)


class Wishes:
    """What was asked for of the recorded models.

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
        self.modules: list[Wish] = []

    def add(self, entries: Iterable[NamedModule]) -> None:
        """These modules are recorded from now on."""
        candidates: list[Candidate] = []
        for entry in entries:
            self.modules.append(Wish(entry, self._wants, self._first_names))
            candidates += entry.candidates()
        self._match(candidates)

    def list_unmatched(self, sites: Iterable[Site]) -> Iterator[Pattern]:
        """Patterns that have matched no site of a module, nor any of these, which have come up since."""
        modules = {wish.path: wish.module for wish in self.modules}
        self._match([Candidate(site, modules.get(site.path)) for site in sites])
        for _, patterns in self._unmatched:
            yield from patterns

    @property
    def compiled(self) -> tuple[str, ...]:
        """What the paths begin with of modules that lie inside compiled ones."""
        return tuple(beginning_of(wish.path) for wish in self.modules if wish.is_compiled)

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
    """Whether it is of an output or a known argument; ``input`` alone stands for arguments that are not known."""
    return site.slot in ("output", "input") and site.keys != ("input",)
