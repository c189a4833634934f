"""Code that was compiled before a recording began, and so has no taps for what runs in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from retrograd.core.hooks.compiled import has_been_compiled
from retrograd.core.hooks.names import NamedModule, beginning_of
from retrograd.core.hooks.parts import is_compiled
from retrograd.core.identities import IdentitySet
from retrograd.core.notices import warn

_MOST_NAMED = 3

_passed_by: IdentitySet[nn.Module] = IdentitySet()
"""Modules that had taps when the code around them was compiled, and were not called in it."""


class CompiledRegions:
    """The modules of recorded models that are compiled by themselves.

    Args:
        is_in_code: tells whether all taps that are wanted on a module are in compiled code; None if none is wanted.
    """

    def __init__(self, is_in_code: Callable[[nn.Module], bool | None]) -> None:
        self._is_in_code = is_in_code
        self._parts: list[IdentitySet[nn.Module]] = []

    def find_late(self, entries: Sequence[NamedModule]) -> list[str]:
        """The paths of what runs without taps in code that was compiled by now: of a region, where all in it does."""
        late: dict[str, None] = {}
        for region in entries:
            if is_compiled(region.module) or is_compiled(region.tapped):
                late |= dict.fromkeys(self._find_late_parts(region, entries))
        return list(late)

    def _find_late_parts(self, region: NamedModule, entries: Sequence[NamedModule]) -> list[str]:
        inside = [each for each in entries if each is not region and each.path.startswith(beginning_of(region.path))]
        wanted = {each.path: each.tapped for each in inside if self._is_in_code(each.tapped) is not None}
        self._parts.append(IdentitySet(wanted.values()))
        lacking = [path for path, module in wanted.items() if not self._is_in_code(module)]
        if not lacking or not has_been_compiled(region.module):
            return []
        if len(lacking) == len(wanted):
            return [region.path]
        return [path for path in lacking if wanted[path] not in _passed_by]

    def end(self) -> None:
        """Remember, before taps are taken away, which of them compiled code has passed by."""
        for parts in self._parts:
            lacking = [module for module in parts if not self._is_in_code(module)]
            if len(lacking) < len(parts):
                _passed_by.update(lacking)


def warn_of_compiled_code(paths: Sequence[str]) -> None:
    """Warn of modules that run in code which was compiled without taps, where nothing can be recorded."""
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    warn(
        "Nothing is recorded inside of code that was compiled before the recording began, which runs "
        f"{', '.join(paths[:_MOST_NAMED])}{more}. Call torch.compiler.reset() before rg.record, or now: torch then "
        "compiles it again, and it is recorded."
    )
