"""The check that autograd makes of what it saved, and that every pair of saved-tensor hooks switches off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from retrograd.core.errors import OverwrittenError
from retrograd.core.hooks.writes import WriteNotes

FILLED_LATE = frozenset({"RReLU"})
"""Modules of which torch saves a tensor before the kernel fills it, without counting that write."""


@dataclass(frozen=True, slots=True)
class SaveSite:
    """The place in the model where something was saved.

    Attributes:
        path: the module whose forward did it; empty outside of modules.
        kind: that module's type.
        line: ``file:line`` of the program, known only while writes are watched.
        log: the writes that were seen, if they are watched.
    """

    path: str = ""
    kind: str = ""
    line: str = ""
    log: WriteNotes | None = None

    def __str__(self) -> str:
        where = f"{self.path} ({self.kind})" if self.path else "code outside of the model"
        return f"{where}, {self.line}," if self.line else where


def refuse_overwritten(
    size: torch.Size, dtype: torch.dtype, versions: tuple[int, int], site: SaveSite, storage: int
) -> NoReturn:
    """Raise what autograd would: a saved tensor is not what it was.

    Args:
        size: of the tensor.
        dtype: of the tensor.
        versions: when it was saved, and now.
        site: where it was saved.
        storage: identity of its storage.
    """
    then, now = versions
    log = site.log
    writer, hint = "", "; `rg.keep_saved(…, watch_writes=True)` names the line that wrote"
    if log is not None:
        seen = log.between(storage, then, now)
        writer = f" Written to by {'; then by '.join(map(str, seen))}." if seen else " No operation was seen writing."
        hint = ""
    raise OverwrittenError(
        f"A tensor of shape {list(size)} and {dtype} that {site} saved for the backward pass was written to in place:"
        f" it was at version {then} and is at version {now}.{writer}",
        repair=f"compute a new tensor instead (`x = x + 1` for `x += 1`), or write into a clone{hint}.",
        reason="the gradient would be that of other values than the forward used; autograd refuses it too.",
    )
