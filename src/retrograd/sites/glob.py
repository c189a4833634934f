"""Globs, and the number of a call in one."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable

from retrograd.errors import PatternError

_CALL = re.compile(r"[1-9][0-9]*|[0-9*?\[\]!-]*[*?\[][0-9*?\[\]!-]*")


@functools.lru_cache(1024)
def translate_glob(glob: str) -> Callable[[str], re.Match[str] | None]:
    """The question whether a glob matches all of a text."""
    return re.compile(fnmatch.translate(glob)).match


def check_call(pattern: str, call: str) -> None:
    """Make sure that what stands behind a ``#`` can be the number of a call.

    Raises:
        PatternError: if no call has such a number.
    """
    if not _CALL.fullmatch(call):
        raise PatternError(
            f"{pattern!r} asks for a call number {call!r}.",
            repair="write 'fc#1:output' for the first call, 'fc#*:output' or 'fc:output' for every call.",
            reason="the calls of a module are counted from 1.",
        )
