"""The sites of a record, by number and by name."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from retrograd.errors import NoSuchSiteError
from retrograd.sites.site import parse_site


class SiteNames:
    """Names in the order first seen, which is the order of calls.

    A recorder counts its rows from 0 on in the order in which it names them; a record may hold other sites
    before them, from an earlier session or another rank. So a row has a number, and its name a code.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.code_of: dict[str, int] = {}
        self._codes: list[int] = []
        self._is_gradient: list[bool] = []
        for name in names:
            self.code_of.setdefault(name, len(self.code_of))

    def __len__(self) -> int:
        return len(self.code_of)

    @property
    def listed(self) -> list[str]:
        """All names, by code."""
        return list(self.code_of)

    @property
    def codes(self) -> npt.NDArray[np.int32]:
        """The code of each row."""
        return np.array(self._codes, np.int32)

    @property
    def gradients(self) -> npt.NDArray[np.bool_]:
        """For each row, whether it is of a gradient."""
        return np.array(self._is_gradient, np.bool_)

    def add_rows(self, names: Sequence[str]) -> None:
        """Name the next rows."""
        for name in names:
            # The number goes last: a row that has one can be read, also from another thread.
            self._is_gradient.append(parse_site(name).quantity == "grad")
            self._codes.append(self.code_of.setdefault(name, len(self.code_of)))

    def find(self, name: str) -> int:
        """The code of a name.

        Raises:
            NoSuchSiteError: naming those that are nearest.
        """
        code = self.code_of.get(str(name))
        if code is None:
            raise NoSuchSiteError(f"No site {str(name)!r} was recorded.", repair=self._suggest(str(name)))
        return code

    def match(self, pattern: str, among: Sequence[str]) -> list[str]:
        """Those of some names that a glob matches, or a regular expression written as ``re:…``.

        Raises:
            NoSuchSiteError: when there is none.
        """
        if pattern.startswith("re:"):
            found = [name for name in among if re.search(pattern[3:], name)]
        else:
            found = [name for name in among if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise NoSuchSiteError(f"The pattern {pattern!r} matches no recorded site.", repair=self._suggest(pattern))
        return found

    def _suggest(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self.listed, n=3, cutoff=0.5) or self.listed[:3]
        if not nearest:
            return "nothing is recorded yet: run a step first."
        return "the nearest are " + ", ".join(repr(near) for near in nearest) + "."
