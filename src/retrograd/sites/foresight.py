"""Patterns for sites that are only known once a model has run.

These are the leaves of nested outputs and inputs (``fc:output.logits``) and further calls of a module
(``cell#2:output``).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from retrograd.sites.glob import translate_glob
from retrograd.sites.kinds import parse_kinds
from retrograd.sites.pattern import Candidate, Pattern, as_regex
from retrograd.sites.site import Site

_RUN_SLOTS = ("output", "input")
_WORD = re.compile(r"[A-Za-z0-9_]+")
_MOST_WORDS = 6


def may_match_later(pattern: Pattern, candidates: Iterable[Candidate], *, parameters_have_calls: bool = False) -> bool:
    """Whether a pattern that matches none of these sites may match one of their modules' once the model runs.

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
