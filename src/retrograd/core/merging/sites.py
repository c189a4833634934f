"""Sites of several ranks by one numbering, and which ranks hold the same at each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.foreign.text import check_kinds
from retrograd.core.history.copies import join_groups

IntArray = npt.NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]

OWN = -1
"""Owner of what only adds up: of copies the owner is the lowest rank that holds the same."""

_TOLD = {"names": list[str], "groups": list[list[int]], "holds": dict[str, list[Any]]}


class SharedSites:
    """Names by code, and groups of ranks that hold copies.

    Args:
        processes: how many ranks there are.

    Attributes:
        names: by code.
        version: changes whenever anything new is told.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._codes: dict[str, int] = {}
        self._partitions: dict[Groups, int] = {}
        self._groups: list[Groups] = []
        self._owners = np.zeros((0, processes), np.int64)
        self._ends = np.zeros((0, processes), np.int64)
        self._partition_of: list[int] = []
        self._facts: dict[str, list[Any]] = {}
        self.names: list[str] = []
        self.version = 0
        self._intern(())

    def number(self, name: str) -> int:
        """The code of a name, a new one if it has none."""
        code = self._codes.get(name)
        if code is None:
            code = self._codes[name] = len(self.names)
            self._partition_of.append(0)
            self.names.append(name)
            self.version += 1
        return code

    def place(self, name: str, holds: str, spec: str, groups: Iterable[Iterable[int]]) -> None:
        """Note what ranks hold at a site: ``groups`` are those that hold the same."""
        code = self.number(name)
        if name not in self._facts:
            self._facts[name] = [holds, spec]
            self.version += 1
        known = self._groups[self._partition_of[code]]
        new = [tuple(sorted(group)) for group in groups]
        if all(group in known for group in new):
            return
        self._partition_of[code] = self._intern(tuple(sorted(join_groups([*known, *new]))))
        self.version += 1

    def _intern(self, groups: Groups) -> int:
        number = self._partitions.get(groups)
        if number is None:
            number = self._partitions[groups] = len(self._groups)
            self._groups.append(groups)
            owners = np.full(self.processes, OWN, np.int64)
            ends = np.full(self.processes, self.processes, np.int64)
            for group in groups:
                owners[list(group)] = group[0]
                ends[list(group)] = group[-1]
            self._owners = np.vstack([self._owners, owners])
            self._ends = np.vstack([self._ends, ends])
        return number

    def find_owners(self, codes: npt.NDArray[Any], ranks: npt.NDArray[Any]) -> IntArray:
        """For each row the lowest rank that holds the same as this one; ``OWN`` where no other does."""
        return self._look_up(self._owners, codes, ranks)

    def find_group(self, code: int, owner: int) -> tuple[int, ...]:
        """The ranks that hold the same as this one, rising."""
        groups = self._groups[self._partition_of[code]]
        return next((group for group in groups if owner in group), (owner,))

    def find_ends(self, codes: npt.NDArray[Any], ranks: npt.NDArray[Any]) -> IntArray:
        """For each row of a copy the highest rank that holds the same."""
        return self._look_up(self._ends, codes, ranks)

    def _look_up(self, table: IntArray, codes: npt.NDArray[Any], ranks: npt.NDArray[Any]) -> IntArray:
        if len(self._groups) == 1:
            return np.full(len(codes), table[0, 0])
        found: IntArray = table[np.array(self._partition_of, np.intp)[codes], ranks]
        return found

    def tell(self) -> dict[str, Any]:
        """All of it as plain data."""
        groups = sorted({group for partition in self._groups for group in partition})
        numbers = {group: number for number, group in enumerate(groups)}
        holds = {
            name: [*self._facts[name], *(numbers[group] for group in self._groups[self._partition_of[code]])]
            for name, code in self._codes.items()
            if name in self._facts
        }
        return {"names": self.names, "groups": [list(group) for group in groups], "holds": holds}

    def hear(self, told: Mapping[str, Any]) -> IntArray:
        """Take in what another rank tells; returns the codes of its names.

        Raises:
            ValueError: it is not what :meth:`tell` makes.
        """
        check_kinds({"names": None, "groups": None, "holds": None, **told}, _TOLD)
        groups = told["groups"]
        if any(not 0 <= rank < self.processes for group in groups for rank in group):
            raise ValueError("there are no such ranks")
        for name, (holds, spec, *numbers) in told["holds"].items():
            if not isinstance(holds, str) or not isinstance(spec, str):
                raise ValueError(f"{name[:60]!r} cannot hold that")  # noqa: TRY004  # what bad text raises
            self.place(name, holds, spec, [groups[int(number)] for number in numbers])
        return np.array([self.number(name) for name in told["names"]], np.int64)

    def describe(self, rank: int) -> dict[str, Any]:
        """What merged rows hold, as ``placements.json`` tells it: ``ranks`` are all whose copies are in them."""
        sites: dict[str, Any] = {}
        for name, (holds, spec) in self._facts.items():
            groups = self._groups[self._partition_of[self._codes[name]]]
            ranks = sorted({rank, *(each for group in groups for each in group)})
            sites[name] = {"holds": holds, "ranks": ranks, **({"placements": spec} if spec else {})}
        return {"stages": {}, "sites": sites}


def read_groups(fact: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    """The groups of copies that one rank tells of at a site: one, or none where it holds a summand or its own."""
    is_shared = len(fact["ranks"]) > 1 and fact["holds"] != "summand"
    return [fact["ranks"]] if is_shared else []
