"""A pattern: one way to say which sites are meant.

"blocks.*:output.grad"      glob over whole names; ``*`` matches dots too
"blocks.3"                  no colon: everything that is recorded by default of these modules
"*:parameters.grad"         all sites of a kind: ``outputs``, ``inputs`` or ``parameters``; see ``kinds.py``
"re:^blocks[.][0-3]:"       regular expression, searched; a compiled one does as well
nn.LayerNorm                a module type: everything that is recorded by default of its instances
lambda c: c.site.path ...   any predicate on a :class:`Candidate`

A pattern without a ``#`` means every call: names are held against it without their call. One with a ``#`` is held
against names with the number of the call, of the first one too: ``fc#1:output``, ``fc#*:output.grad``, ``fc#2``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.errors import PatternError
from retrograd.sites.glob import check_call, translate_glob
from retrograd.sites.kinds import parse_kinds
from retrograd.sites.site import WATCH, Site, says_call


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

_CALLED = re.compile(r'(?P<path>(?:"(?:[^"\\]|\\.)*"|[^#"])*)#(?P<call>[^:]*)(?::.*)?', re.DOTALL)


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
        name = name_for(asks_for_call(pattern))
        return lambda candidate: pattern.search(name(candidate.site)) is not None
    if isinstance(pattern, type):
        return lambda candidate: isinstance(candidate.module, pattern) and candidate.is_default
    if callable(pattern):
        return lambda candidate: bool(pattern(candidate))
    raise PatternError(
        f"{pattern!r} is not a pattern.",
        repair="give a glob such as 'blocks.*:output', a compiled regex, a module type, or a predicate.",
    )


def as_regex(pattern: Pattern) -> re.Pattern[str] | None:
    """The regular expression that a pattern is; None if it is of another kind.

    Raises:
        PatternError: if it is not a valid one.
    """
    if isinstance(pattern, re.Pattern):
        return pattern
    if not isinstance(pattern, str) or not pattern.startswith("re:"):
        return None
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise PatternError(
            f"{pattern[3:]!r} is not a regular expression: {error}.", repair="correct the expression."
        ) from None


def asks_for_call(pattern: Pattern) -> bool:
    """Whether a pattern says which calls of modules it means."""
    regex = as_regex(pattern)
    if regex is not None:
        return "#" in regex.pattern
    return isinstance(pattern, str) and says_call(pattern)


def name_for(by_call: bool) -> Callable[[Site], str]:
    """The names that a pattern is held against: with the number of the call, or without."""
    return _print_numbered if by_call else _print_plain


def describe_pattern(pattern: Pattern) -> str:
    """A pattern as it was written, for people."""
    if isinstance(pattern, str):
        return repr(pattern)
    if isinstance(pattern, re.Pattern):
        return f"'re:{pattern.pattern}'"
    return getattr(pattern, "__qualname__", repr(pattern))


def _compile_glob(pattern: str) -> Test:
    kinds = parse_kinds(pattern)
    if kinds is not None:
        return lambda candidate: kinds.matches(candidate.site)
    called = _CALLED.fullmatch(pattern) if says_call(pattern) else None
    if called is not None:
        check_call(pattern, called["call"].removesuffix(".grad") if pattern.startswith(WATCH) else called["call"])
    if ":" in pattern or pattern.startswith(WATCH) or pattern == "*":
        matches, name = translate_glob(pattern), name_for(called is not None)
        return lambda candidate: bool(matches(name(candidate.site)))
    if called is not None:
        return _compile_calls(called["path"], called["call"])
    in_path = translate_glob(pattern)
    return lambda candidate: bool(in_path(candidate.site.path)) and candidate.is_default


def _compile_calls(path: str, call: str) -> Test:
    """The sites of some calls of modules that are recorded by default."""
    in_path, in_call = translate_glob(path), translate_glob(call)
    return lambda candidate: (
        candidate.site.kind == "output" and bool(in_path(candidate.site.path) and in_call(str(candidate.site.call)))
    )


def _print_plain(site: Site) -> str:
    return str(site.first_call)


def _print_numbered(site: Site) -> str:
    """No text for what has no calls: the gradient of a parameter, and its update."""
    return "" if site.kind == "parameter" and site.quantity != "value" else site.numbered
