"""Files of a run that cannot be read: they are passed over and told of, and the rest of the run is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from retrograd.core.errors import DamagedRunError
from retrograd.core.notices import warn

T = TypeVar("T")

Listed = tuple[Hashable, Path, tuple[int, int] | None]
"""A part file: its key, where it lies, and its first and last step where they are known."""


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """A part file, or one of tensors, of which nothing is read.

    Attributes:
        path: of the file.
        error: what is wrong with it.
        after: the last step of the part before it; None where it is the first.
        before: the first step of the part behind it; None where it is the last.
        steps: its first and its last step, where what tells of them can be read; None otherwise.
    """

    path: Path
    error: DamagedRunError
    after: int | None = None
    before: int | None = None
    steps: tuple[int, int] | None = None

    @property
    def place(self) -> str:
        """Where it lies, as far as it is known, or its neighbours tell; empty where it has none."""
        if self.steps is not None:
            first, last = self.steps
            return f"steps {first:,} to {last:,}" if first < last else f"step {first:,}"
        told = [f"the part before it ends with step {self.after:,}"] if self.after is not None else []
        told += [f"the one behind it begins with step {self.before:,}"] if self.before is not None else []
        return ", and ".join(told)

    def __str__(self) -> str:
        place = f": {self.place}" if self.place else ""
        return (
            f"{self.error.problem.removesuffix('.')}; what it alone held is left out{place}. [{self.error.slug}]\n"
            "  Try: copy that file again from where the run was recorded."
        )


def is_lasting(error: DamagedRunError) -> bool:
    """Return whether it is about what is in a file, not about one that is gone, or that the system cannot read now."""
    cause = error.__cause__
    return not isinstance(cause, OSError) or (cause.errno is None and not isinstance(cause, FileNotFoundError))


class Damages:
    """The files of one kind that could not be read, each by a key that it has as long as it is the same file.

    Attributes:
        unreadable: what was found to be damaged in files that could be opened, and is left out.
        may_leave_out: whether anything may be.
    """

    def __init__(self) -> None:
        self.unreadable: list[DamagedPart] = []
        self.may_leave_out = True
        self._errors: dict[Hashable, DamagedRunError] = {}
        self._reported: set[Hashable] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._errors

    def try_to(self, key: Hashable, read: Callable[[], T]) -> T | None:
        """What a call returns that reads a file, or None where the file is damaged.

        Raises:
            DamagedRunError: the system cannot read it now, which says nothing of what is in it.
        """
        try:
            return read()
        except DamagedRunError as error:
            if not is_lasting(error):
                raise
            self._errors[key] = error
            return None

    def leave_out(self, part: DamagedPart) -> None:
        """Record what is damaged in a file that could be opened, and warn of it."""
        self.unreadable.append(part)
        warn(str(part))

    def list_parts(self, listed: Sequence[Listed], *, may_be_all: bool = False) -> list[DamagedPart]:
        """Those among the files of a table, and warn once of each.

        Args:
            listed: all files of the table, those of a rank in their order.
            may_be_all: there is something to read of the run without any of them.

        Raises:
            DamagedRunError: none of them can be read.
        """
        keys = {key for key, _, _ in listed}
        self._errors = {key: error for key, error in self._errors.items() if key in keys}
        if self._errors and len(self._errors) == len(listed) and not may_be_all:
            raise next(iter(self._errors.values()))
        found = []
        for at, (key, path, _) in enumerate(listed):
            if key in self._errors:
                before, behind = _find_limits(listed[:at][::-1], path), _find_limits(listed[at:], path)
                found.append(DamagedPart(path, self._errors[key], before and before[1], behind and behind[0]))
                if key not in self._reported:
                    warn(str(found[-1]))
                self._reported.add(key)
        return found


def _find_limits(listed: Sequence[Listed], path: Path) -> tuple[int, int] | None:
    """The first and the last step of the first file that could be read, of those in the folder of another one."""
    return next((limits for _, each, limits in listed if limits is not None and each.parent == path.parent), None)
