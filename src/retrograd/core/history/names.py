"""The sites of a record, by number and by name."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from retrograd.core.errors import NoSuchSiteError
from retrograd.core.sites.pattern import Candidate, Pattern, describe_pattern
from retrograd.core.sites.selection import Selection, suggest
from retrograd.core.sites.site import BEFORE, Site, parse_leniently, parse_site, says_call


class SiteNames:
    """Names in the order first seen, which is call order.

    A recorder counts its rows from 0 on in the order in which it names them; a record may hold other sites
    before them, from an earlier session or another rank. So a row has a number, and its name a code.

    A module's first call is written without its number, because nobody knows yet whether another one will follow. It is
    listed as ``fc#1:output`` once one does, since ``fc:output`` then means all calls.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.code_of: dict[str, int] = {}
        self._codes: list[int] = []
        self._is_gradient: list[bool] = []
        self._sites: list[Site] = []
        self._codes_of: dict[Site, tuple[int, ...]] = {}
        self._calls_of: dict[Site, set[int]] = {}  # of a value, its gradient and its update together
        self._reading = threading.Lock()
        for name in names:
            self.code_of.setdefault(name, len(self.code_of))

    def __len__(self) -> int:
        return len(self.code_of)

    @property
    def written(self) -> list[str]:
        """All names as written, by code."""
        return list(self.code_of)

    @property
    def listed(self) -> list[str]:
        """All names as listed, by code."""
        return [self._list(code, name) for code, name in enumerate(self._read())]

    @property
    def codes(self) -> npt.NDArray[np.int32]:
        """The code of each row."""
        return np.array(self._codes, np.int32)

    @property
    def gradients(self) -> npt.NDArray[np.bool_]:
        """For each row, whether it belongs to a gradient."""
        return np.array(self._is_gradient, np.bool_)

    def add_rows(self, names: Sequence[str]) -> None:
        """Name the next rows."""
        for name in names:
            # The number goes last: a row that has one can be read, also from another thread.
            self._is_gradient.append(parse_site(name).quantity == "grad")
            self._codes.append(self.code_of.setdefault(name, len(self.code_of)))

    def find(self, name: str) -> dict[int, int]:
        """Codes of a name, each with the number of its call: one code, or those of all calls of a site.

        Raises:
            NoSuchSiteError: for an unknown name; the nearest are named.
        """
        codes = self._find(str(name))
        if not codes:
            raise NoSuchSiteError(f"No site {str(name)!r} was recorded.", repair=self._suggest(str(name)))
        return {code: self._sites[code].call for code in codes}

    def read_dotted(self, name: str) -> str:
        """The name that is meant by that of a parameter in torch: ``fc:weight.grad`` by ``fc.weight.grad``.

        Anything that is recorded under this very name, and any other text, stays as it is.
        """
        if ":" in name or name in self:
            return name
        dots = [at for at, letter in enumerate(name) if letter == "."]
        meant = [found for at in dots if (found := f"{name[:at]}:{name[at + 1 :]}") in self]
        return meant[0] if len(meant) == 1 else name

    def __contains__(self, name: object) -> bool:
        return bool(self._find(str(name)))

    def write(self, code: int) -> str:
        """The written name of this code."""
        return str(self._sites[code])

    def list_arguments(self, path: str) -> list[Site]:
        """Recorded argument values of a module's first call."""
        self._read()
        return [
            site
            for site in self._codes_of
            if site.path == path and site.kind == "input" and site.quantity == "value" and site.keys[-1] != BEFORE
        ]

    def match(self, patterns: Pattern | Iterable[Pattern], among: Sequence[int]) -> list[str]:
        """The selected names among those with these codes, in order.

        Raises:
            PatternError: for an invalid pattern.
            NoSuchSiteError: when a pattern matches none of the names, or every name is excluded.
        """
        selection = Selection(patterns)
        names = self._read()
        candidates = {code: Candidate(self._sites[code]) for code in among}
        listed = list(candidates.values())
        selection.settle(listed)
        for pattern in selection.unmatched(listed):
            repair = suggest(pattern, listed) if listed else "nothing is recorded yet: run a step first."
            raise NoSuchSiteError(f"The pattern {describe_pattern(pattern)} matches no recorded site.", repair=repair)
        found = [code for code, candidate in candidates.items() if selection.wants(candidate)]
        if not found:
            raise NoSuchSiteError(
                f"The patterns {', '.join(selection.describe())} exclude every site that they select.",
                repair="exclude less.",
            )
        return [self._list(code, names[code]) for code in found]

    def _find(self, name: str) -> tuple[int, ...]:
        self._read()
        site = parse_leniently(name)
        codes = self._codes_of.get(site.first_call, ())
        return tuple(code for code in codes if self._sites[code].call == site.call) if says_call(name) else codes

    def _list(self, code: int, name: str) -> str:
        site = self._sites[code]
        return site.numbered if len(self._calls_of[site.first_call.value]) > 1 else name

    def _read(self) -> list[str]:
        """All names by code, after reading those that were added since the last call."""
        with self._reading:
            names = list(self.code_of)
            for code in range(len(self._sites), len(names)):
                site = parse_leniently(names[code])
                self._codes_of[site.first_call] = (*self._codes_of.get(site.first_call, ()), code)
                self._calls_of.setdefault(site.first_call.value, set()).add(site.call)
                self._sites.append(site)
            return names

    def _suggest(self, name: str) -> str:
        listed = self.listed
        nearest = difflib.get_close_matches(name, listed, n=3, cutoff=0.5) or listed[:3]
        if not nearest:
            return "nothing is recorded yet: run a step first."
        return "the nearest are " + ", ".join(repr(near) for near in nearest) + "."
