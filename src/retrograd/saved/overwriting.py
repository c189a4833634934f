"""The check that autograd makes of what it saved, and that every pair of saved-tensor hooks switches off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from retrograd.errors import OverwrittenError
from retrograd.hooks.writes import WriteLog


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was saved.

    Attributes:
        path: the module whose forward did it; empty outside of modules.
        kind: that module's type.
        line: ``file:line`` of the program, known only while writes are watched.
        log: the writes that were seen, if they are watched.
    """

    path: str = ""
    kind: str = ""
    line: str = ""
    log: WriteLog | None = None

    def __str__(self) -> str:
        where = f"{self.path} ({self.kind})" if self.path else "code outside of the model"
        return f"{where}, {self.line}," if self.line else where


def refuse_overwritten(
    size: torch.Size, dtype: torch.dtype, versions: tuple[int, int], place: Place, storage: int
) -> NoReturn:
    """Raise what autograd would: a saved tensor is not what it was.

    Args:
        size: of the tensor.
        dtype: of the tensor.
        versions: when it was saved, and now.
        place: where it was saved.
        storage: identity of its storage.
    """
    then, now = versions
    log = place.log
    if log is None:
        writer, hint = "", "; `rg.keep_saved(…, watch_writes=True)` names the line that wrote"
    else:
        seen = log.writers(storage, then, now)
        writer, hint = (f" Written to by {'; then by '.join(seen)}." if seen else " No operation was seen writing."), ""
    raise OverwrittenError(
        f"A tensor of shape {list(size)} and {dtype} that {place} saved for the backward pass was written to in place:"
        f" it was at version {then} and is at version {now}.{writer}",
        repair=f"compute a new tensor instead (`x = x + 1` for `x += 1`), or write into a clone{hint}.",
        reason="the gradient would be that of other values than the forward used; autograd refuses it too.",
    )


@dataclass(frozen=True, slots=True)
class RerunRefusal:
    """What is raised where a forward that runs again would not do the same.

    Attributes:
        place: the module whose forward it is.
    """

    place: Place

    def refuse_saved(self, size: torch.Size, dtype: torch.dtype, versions: tuple[int, int], storage: int) -> NoReturn:
        """A saved tensor has been written to."""
        refuse_overwritten(size, dtype, versions, self.place, storage)

    def refuse_parameter(self, name: str, versions: tuple[int, int]) -> NoReturn:
        """A parameter has."""
        raise OverwrittenError(
            f"The parameter {name!r} was written to in place before {self.place} ran its forward again: it was at"
            f" version {versions[0]} and is at version {versions[1]}.",
            repair="update parameters after the backward pass, or keep this module by another policy than Recompute.",
            reason="the gradient would be that of other values than the loss.",
        )
