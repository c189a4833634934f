"""Selecting sites by glob, regular expression, module type or predicate.

    "blocks.*:output.grad"      glob over whole names; ``*`` matches dots too
    "blocks.3"                  no colon: everything that is recorded by default of these modules
    "!*.dropout*"               leaves out what it matches
    "re:^blocks\\.[0-3]:"       regular expression, searched; a compiled one does as well
    nn.LayerNorm                a module type: everything that is recorded by default of its instances
    lambda c: c.site.path ...   any predicate on a :class:`Candidate`
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.errors import NoSuchSiteError, PatternError
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
        """Whether it is recorded when nothing is asked for: outputs, their gradients, parameters' gradients and updates."""
        site = self.site
        if site.slot == "input":
            return False
        return site.slot in ("output", "") or site.quantity != "value"


Pattern = str | re.Pattern[str] | type | Callable[[Candidate], bool]
Test = Callable[[Candidate], bool]


class Selection:
    """A list of patterns, read once; asked whether it wants a site.

    Args:
        patterns: one pattern or several; a site is wanted when one of them matches it and none that begins with
            ``!`` does. None selects the default sites.

    Raises:
        PatternError: for a pattern of the wrong kind, or an empty one.
    """

    def __init__(self, patterns: Pattern | Iterable[Pattern] | None = None) -> None:
        listed = _as_list(patterns)
        self.patterns: list[Pattern] = [pattern for pattern in listed if not _is_exclusion(pattern)]
        self._excluded = [_compile(pattern[1:]) for pattern in listed if _is_exclusion(pattern)]  # type: ignore[index]
        self._tests = [_compile(pattern) for pattern in self.patterns] or [_default]

    def wants(self, candidate: Candidate) -> bool:
        """Whether this site is selected."""
        return any(test(candidate) for test in self._tests) and not any(test(candidate) for test in self._excluded)

    def may_reach(self, candidate: Candidate) -> bool:
        """Whether this site or a leaf nested in it may be selected, as far as is known before the model has run."""
        return self.wants(candidate) or any(
            _may_match_later(pattern, (candidate,))
            for pattern in self.patterns
            if not (isinstance(pattern, str) and pattern.startswith(WATCH))
        )

    def describe(self) -> list[str]:
        """The patterns as text, for a manifest."""
        return [_describe(pattern) for pattern in self.patterns] or ["(default)"]

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Make sure that every pattern can match something.

        The leaves of nested outputs and inputs are not known before a model has run, so a pattern for one of them
        is only held against the module that would have it.

        Raises:
            NoSuchSiteError: naming the sites that are nearest.
        """
        for pattern, test in zip(self.patterns, self._tests, strict=False):
            if not any(test(candidate) for candidate in candidates) and not _may_match_later(pattern, candidates):
                raise NoSuchSiteError(
                    f"The pattern {_describe(pattern)} matches no site.",
                    repair=_suggest(pattern, candidates),
                )


def _as_list(patterns: Pattern | Iterable[Pattern] | None) -> list[Pattern]:
    if patterns is None:
        return []
    if isinstance(patterns, (str, re.Pattern, type)) or callable(patterns):
        return [patterns]
    try:
        listed = list(patterns)
    except TypeError:
        raise PatternError(
            f"{patterns!r} is no pattern.",
            repair="give a glob such as 'blocks.*:output', a compiled regex, a module type, or a predicate.",
        ) from None
    if not listed:
        raise PatternError("An empty list selects no site.", repair="leave `sites` out to record the default sites.")
    return listed


def _is_exclusion(pattern: Pattern) -> bool:
    return isinstance(pattern, str) and pattern.startswith("!")


def _compile(pattern: Pattern) -> Test:
    if isinstance(pattern, str):
        if pattern.startswith("re:"):
            return _compile(_regex(pattern[3:]))
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


def _compile_glob(pattern: str) -> Test:
    matches = re.compile(fnmatch.translate(pattern)).match
    if ":" in pattern or pattern.startswith(WATCH) or pattern == "*":
        return lambda candidate: bool(matches(str(candidate.site)) or matches(str(candidate.site.first_call)))
    return lambda candidate: matches(candidate.site.path) is not None and candidate.is_default


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise PatternError(f"{text!r} is no regular expression: {error}.", repair="mend the expression.") from None


def _default(candidate: Candidate) -> bool:
    return candidate.is_default


def _may_match_later(pattern: Pattern, candidates: Sequence[Candidate]) -> bool:
    if isinstance(pattern, type):
        return False
    if not isinstance(pattern, str) or pattern.startswith("re:"):
        return any(candidate.site.slot == "output" for candidate in candidates)
    if pattern.startswith(WATCH):
        return True
    path, _, slot = pattern.rpartition(":")
    first_key, _, deeper = slot.partition(".")
    if deeper in ("", "grad"):
        return False
    matches = re.compile(fnmatch.translate(path.split("#")[0])).match
    return any(candidate.site.slot == first_key and matches(candidate.site.path) for candidate in candidates)


def _describe(pattern: Pattern) -> str:
    if isinstance(pattern, str):
        return repr(pattern)
    if isinstance(pattern, re.Pattern):
        return f"'re:{pattern.pattern}'"
    return getattr(pattern, "__qualname__", repr(pattern))


def _suggest(pattern: Pattern, candidates: Sequence[Candidate]) -> str:
    if isinstance(pattern, type):
        kinds = sorted({type(candidate.module).__name__ for candidate in candidates if candidate.module is not None})
        return f"the modules are of these types: {', '.join(kinds)}."
    names = list(dict.fromkeys(str(candidate.site) for candidate in candidates))
    near = difflib.get_close_matches(str(pattern), names, n=5, cutoff=0.3) or names[:5]
    return f"the nearest sites are {', '.join(near)}; `rg.plan(model)` prints them all."
