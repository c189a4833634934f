"""A pattern: one way to say which sites are meant.

"blocks.*:output.grad"      glob over whole names; ``*`` matches dots too
"blocks.3"                  no colon: everything that is recorded by default of these modules
"re:^blocks[.][0-3]:"       regular expression, searched; a compiled one does as well
nn.LayerNorm                a module type: everything that is recorded by default of its instances
lambda c: c.site.path ...   any predicate on a :class:`Candidate`
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.errors import PatternError
from retrograd.sites.site import WATCH, Site


@dataclass(frozen=True, slots=True)
class Candidate:
    """A site that could be recorded.

    Attributes:
        site: its name, at the first call.
        module: the module that has it; None for a tensor watched by hand.
    """

    site: Site
    module: Any = None

    @property
    def is_default(self) -> bool:
        """Whether it is recorded when nothing is asked for: outputs and gradients of all kinds, and updates."""
        site = self.site
        if site.slot == "input":
            return False
        return site.is_watched or site.slot == "output" or site.quantity != "value"


Pattern = str | re.Pattern[str] | type | Callable[[Candidate], bool]
Test = Callable[[Candidate], bool]


def compile_pattern(pattern: Pattern) -> Test:
    """The question whether a site is meant.

    Raises:
        PatternError: for a pattern of the wrong kind, or an empty one.
    """
    if isinstance(pattern, str):
        regex = as_regex(pattern)
        if regex is not None:
            return compile_pattern(regex)
        if not pattern:
            raise PatternError("An empty pattern selects no site.", repair="use '*' for every site.")
        return _compile_glob(pattern)
    if isinstance(pattern, re.Pattern):
        return lambda candidate: pattern.search(str(candidate.site)) is not None
    if isinstance(pattern, type):
        return lambda candidate: isinstance(candidate.module, pattern) and candidate.is_default
    if callable(pattern):
        return lambda candidate: bool(pattern(candidate))
    raise PatternError(
        f"{pattern!r} is no pattern.",
        repair="give a glob such as 'blocks.*:output', a compiled regex, a module type, or a predicate.",
    )


def as_regex(pattern: Pattern) -> re.Pattern[str] | None:
    """The regular expression that a pattern is; None if it is of another kind.

    Raises:
        PatternError: if it is no valid one.
    """
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str) or not pattern.startswith("re:"):
        return None
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise PatternError(
            f"{pattern[3:]!r} is no regular expression: {error}.", repair="mend the expression."
        ) from None


def translate_glob(glob: str) -> Callable[[str], re.Match[str] | None]:
    """The question whether a glob matches all of a text."""
    return re.compile(fnmatch.translate(glob)).match


def describe_pattern(pattern: Pattern) -> str:
    """A pattern as it was written, for people."""
    if isinstance(pattern, str):
        return repr(pattern)
    if isinstance(pattern, re.Pattern):
        return f"'re:{pattern.pattern}'"
    return getattr(pattern, "__qualname__", repr(pattern))


def _compile_glob(pattern: str) -> Test:
    matches = translate_glob(pattern)
    if ":" in pattern or pattern.startswith(WATCH) or pattern == "*":
        return lambda candidate: bool(matches(str(candidate.site)) or matches(str(candidate.site.first_call)))
    return lambda candidate: bool(matches(candidate.site.path)) and candidate.is_default
