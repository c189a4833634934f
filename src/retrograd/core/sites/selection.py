"""A selection: patterns together, and the error that names the nearest sites when one of them matches nothing."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from retrograd.core.errors import NoSuchSiteError, PatternError
from retrograd.core.sites.pattern import (
    MAGIC,
    Candidate,
    Pattern,
    Test,
    as_regex,
    asks_for_node,
    compile_pattern,
    describe_pattern,
    escape_glob,
    names_functions,
    parse_kinds,
    translate_glob,
)
from retrograd.core.sites.site import WATCH, Site

_RUN_SLOTS = ("output", "input")
_WORD = re.compile(r"[A-Za-z0-9_]+")
_MOST_WORDS = 6


def may_match_later(pattern: Pattern, candidates: Iterable[Candidate], *, parameters_have_calls: bool = False) -> bool:
    """Return whether a pattern that matches none of these sites may match one of their modules' once the model runs.

    A type or a predicate says nothing of the sites it waits for, so the answer is no.

    Args:
        pattern: the pattern.
        candidates: the sites that are known.
        parameters_have_calls: the value of a parameter is looked at in each call of its module.
    """
    sites = [candidate.site for candidate in candidates]
    sites = [
        site
        for site in sites
        if site.slot in _RUN_SLOTS or (parameters_have_calls and site.kind == "parameter" and site.quantity == "value")
    ]
    regex = as_regex(pattern)
    if regex is not None:
        words = [*dict.fromkeys(_WORD.findall(regex.pattern))][:_MOST_WORDS]
        return any(regex.search(name) for site in sites for name in _guess_names(site, words, "#" in regex.pattern))
    return isinstance(pattern, str) and _may_glob_later(pattern, sites)


def _may_glob_later(glob: str, sites: Sequence[Site]) -> bool:
    kinds = parse_kinds(glob)
    if kinds is not None:
        return any(kinds.may_match_later(site) for site in sites)
    path, _, slot = glob.partition(":")
    path, _, call = path.partition("#")
    slot, _, deeper = slot.partition(".")
    if not call and (not slot or deeper in ("", "grad")):
        return False
    in_path, in_slot = translate_glob(path), translate_glob(slot or "output")
    return any(
        in_path(site.path) and in_slot(site.slot) and (site.slot in _RUN_SLOTS or deeper not in ("grad", "update"))
        for site in sites
    )


def _guess_names(site: Site, words: Sequence[str], by_call: bool) -> Iterator[str]:
    """Names that may come up, made with the words of a regular expression as keys and as numbers of calls."""
    tail = "" if site.quantity == "value" else f".{site.quantity}"
    keys = ".".join(site.keys)
    for call in ("#1", "#2", *(f"#{word}" for word in words if word.isdecimal())) if by_call else ("",):
        for depth in range(3):
            for more in itertools.product(("0", *words), repeat=depth):
                yield f"{site.path}{call}:{'.'.join((keys, *more))}{tail}"


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
        self._exclusions: list[Pattern] = [pattern for pattern in listed if _is_exclusion(pattern)]
        self._compile(self.patterns, [_strip(pattern) for pattern in self._exclusions])

    def _compile(self, patterns: list[Pattern], excluded: list[Pattern]) -> None:
        self._read = patterns
        self._tests = [_include(pattern) for pattern in patterns] or [_default]
        self._excluded = [compile_pattern(pattern) for pattern in excluded]

    def settle(self, candidates: Iterable[Candidate]) -> None:
        """Take a pattern that is the name of one of these sites, or begins with one of a module, for that."""
        patterns, excluded = self.patterns, [_strip(pattern) for pattern in self._exclusions]
        if any(isinstance(pattern, str) and MAGIC.search(pattern) for pattern in (*patterns, *excluded)):
            known = _KnownNames(candidates)
            self._compile([*map(known.read, patterns)], [*map(known.read, excluded)])

    def wants(self, candidate: Candidate) -> bool:
        """Return whether this site is selected."""
        return any(test(candidate) for test in self._tests) and not any(test(candidate) for test in self._excluded)

    def may_reach(self, candidate: Candidate, *, parameters_have_calls: bool = False) -> bool:
        """Return whether this site or a leaf nested in it may be selected, as far as is known before a forward."""
        return self.wants(candidate) or any(
            may_match_later(pattern, (candidate,), parameters_have_calls=parameters_have_calls)
            for pattern in self._read
        )

    @property
    def names_functions(self) -> bool:
        """Whether functions that modules call may be selected."""
        return any(map(names_functions, self.patterns))

    @property
    def asks_for_nodes(self) -> bool:
        """Whether gradients may be selected by the kind of node that they come to."""
        return any(map(asks_for_node, self.patterns))

    def may_mean(self, function: str) -> bool:
        """Whether functions of this name may be selected."""
        return any(_may_mean(pattern, function) for pattern in self.patterns if names_functions(pattern))

    def describe(self) -> list[str]:
        """The patterns as text, for a manifest."""
        return [describe_pattern(pattern) for pattern in (*self.patterns, *self._exclusions)] or ["(default)"]

    def check(self, candidates: Sequence[Candidate], *, parameters_have_calls: bool = False) -> None:
        """Make sure that every pattern can match something, and that they leave something over.

        The leaves of nested outputs and inputs, further calls of a module and watched tensors are not known before a
        model has run, so a pattern for one of them is only held against the module that would have it.

        Args:
            candidates: the sites that are known.
            parameters_have_calls: as for :func:`~retrograd.core.sites.selection.may_match_later`.

        Raises:
            NoSuchSiteError: naming the sites that are nearest.
        """
        self.settle(candidates)
        for pattern in self.unmatched(candidates):
            bare = _strip(pattern)
            comes_later = may_match_later(bare, candidates, parameters_have_calls=parameters_have_calls)
            if not (_is_of_watched(bare) or comes_later or _may_be_called(bare, candidates)):
                raise NoSuchSiteError(
                    f"The pattern {describe_pattern(pattern)} matches no site.", repair=suggest(bare, candidates)
                )
        may_reach = partial(self.may_reach, parameters_have_calls=parameters_have_calls)
        if not (any(map(may_reach, candidates)) or any(_is_of_watched(e) or names_functions(e) for e in self.patterns)):
            raise NoSuchSiteError(
                f"The patterns {', '.join(self.describe())} exclude every site.", repair="exclude less."
            )

    def unmatched(self, candidates: Sequence[Candidate]) -> list[Pattern]:
        """The patterns that match none of these sites."""
        tests = [*zip(self.patterns, self._tests, strict=False), *zip(self._exclusions, self._excluded, strict=True)]
        return [pattern for pattern, test in tests if not any(test(candidate) for candidate in candidates)]


class _KnownNames:
    """The names of sites and modules in which a glob would see more than letters."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        sites = [each.site for each in candidates]
        odd = [site for site in sites if MAGIC.search(str(site))]
        self._sites = {name for site in odd for name in (str(site), site.numbered, str(site.first_call))}
        self._paths = {path for site in odd for path in (site.path, site.printed_path) if MAGIC.search(path)}

    def read(self, pattern: Pattern) -> Pattern:
        if not isinstance(pattern, str):
            return pattern
        if pattern in self._sites:
            return escape_glob(pattern)
        for path in self._paths:
            if pattern == path or pattern.startswith((f"{path}:", f"{path}#")):
                return escape_glob(path) + pattern[len(path) :]
        return pattern


def _as_list(patterns: Pattern | Iterable[Pattern] | None) -> list[Pattern]:
    if patterns is None:
        return []
    if isinstance(patterns, (str, re.Pattern, type)) or callable(patterns):
        return [patterns]
    try:
        listed = list(patterns)
    except TypeError:
        raise PatternError(
            f"{patterns!r} is not a pattern.",
            repair="give a glob such as 'blocks.*:output', a compiled regex, a module type, or a predicate.",
        ) from None
    if not listed:
        raise PatternError("An empty list selects no site.", repair="leave `sites` out to record the default sites.")
    return listed


def _is_exclusion(pattern: Pattern) -> bool:
    return isinstance(pattern, str) and pattern.startswith("!")


def _strip(pattern: Pattern) -> Pattern:
    return pattern[1:] if isinstance(pattern, str) and pattern.startswith("!") else pattern


def _is_of_watched(pattern: Pattern) -> bool:
    return isinstance(pattern, str) and pattern.startswith(WATCH)


def _default(candidate: Candidate) -> bool:
    return candidate.is_default and candidate.node is None


def _include(pattern: Pattern) -> Test:
    """The question whether a pattern selects a site: that of a function only if it names functions."""
    test = compile_pattern(pattern)
    return test if names_functions(pattern) else lambda candidate: candidate.node is None and test(candidate)


def _may_mean(pattern: Pattern, function: str) -> bool:
    if as_regex(pattern) is not None or asks_for_node(pattern):
        return True
    path = str(pattern).partition(":")[0].partition("#")[0]
    return bool(translate_glob(path.rpartition("/")[2])(function))


def _may_be_called(pattern: Pattern, candidates: Iterable[Candidate]) -> bool:
    """Return whether a pattern may mean a function that one of these modules calls."""
    if not names_functions(pattern):
        return False
    if as_regex(pattern) is not None:
        return True
    path = str(pattern).partition(":")[0]
    in_path = translate_glob(path if asks_for_node(pattern) else path.rpartition("/")[0])
    return any(in_path(candidate.site.path) for candidate in candidates if candidate.site.slot in _RUN_SLOTS)


_MEANT = {
    **dict.fromkeys(("grads", "grad", "gradients", "gradient"), "'*:*.grad', or '*:parameters.grad' for parameters"),
    **dict.fromkeys(("activations", "outputs", "output"), "'*:output'"),
    **dict.fromkeys(("inputs", "input"), "'*:inputs'"),
    **dict.fromkeys(("weights", "params", "parameters"), "'*:parameters'"),
    **dict.fromkeys(("updates", "update"), "'*:parameters.update'"),
    "all": "'*'",
}
"""Word for all sites of a kind → the pattern that says it."""


def suggest(pattern: Pattern, candidates: Sequence[Candidate]) -> str:
    """Suggest what a person may have meant by a pattern that matches none of these sites."""
    bare = _strip(pattern)
    if isinstance(bare, type):
        kinds = sorted({type(candidate.module).__name__ for candidate in candidates if candidate.module is not None})
        return f"the modules are of these types: {', '.join(kinds)}."
    if (word := str(bare).strip("*").lower()) in _MEANT:
        return f"for all of these write {_MEANT[word]}."
    if names_functions(bare):
        paths = list(dict.fromkeys(each.site.path for each in candidates if each.site.slot in _RUN_SLOTS))
        near = difflib.get_close_matches(str(bare).partition(":")[0].rpartition("/")[0], paths, n=5, cutoff=0.3)
        return f"before the slash stands a module: {', '.join(near or paths[:5])}, or '*' for all."
    path, _, quantity = str(bare).rpartition(".")
    if quantity in ("grad", "update") and any(translate_glob(path)(each.site.path) for each in candidates):
        slots = ("parameters", "outputs", "inputs") if quantity == "grad" else ("parameters",)
        named = ", ".join(f"{path}:{slot}.{quantity}" for slot in slots)
        return f"say of what: {named}, or {path}:*.{quantity} for all."
    names = list(dict.fromkeys(str(candidate.site) for candidate in candidates))
    if isinstance(bare, str) and ":" not in bare:  # a module was meant, so its name counts, not its slots
        names = list(dict.fromkeys(candidate.site.path for candidate in candidates))
        inside = f"*:{bare.lstrip('*')}"
        if any(translate_glob(inside)(str(candidate.site)) for candidate in candidates):
            return f"without a colon it names modules; say {inside!r} for what is in them."
    text = bare.pattern if isinstance(bare, re.Pattern) else str(bare).removeprefix("re:")
    near = difflib.get_close_matches(text, names, n=5, cutoff=0.3) or names[:5]
    return f"the nearest are {', '.join(near)}; `rg.plan_recording(model)` prints all sites."
