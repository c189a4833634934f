"""Assigns rules to sites: patterns, each with its rules, in the order in which they were given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrograd.core.errors import CannotRewriteError, PatternError, RewriteError
from retrograd.core.sites.pattern import Candidate, Pattern, describe_pattern, is_module
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import WATCH
from retrograd.rewriting.rules.pass_rule import PassRule
from retrograd.rewriting.rules.rule import Change, Rule, as_rule
from retrograd.rewriting.spread import needs_whole

RuleLike = Rule | Change


class Assignment:
    """A pattern and its rules.

    Attributes:
        pattern: the pattern.
        rules: its rules, in their order.
        was_reached: whether any of its sites has been reached.
    """

    __slots__ = ("pattern", "rules", "selection", "was_reached")

    def __init__(self, pattern: Pattern, rules: RuleLike | Iterable[RuleLike]) -> None:
        if isinstance(pattern, type) or is_module(pattern) or (isinstance(pattern, str) and not _names_a_slot(pattern)):
            raise PatternError(
                f"{describe_pattern(pattern)} does not say what of a module is to be rewritten.",
                repair="name a slot, 'blocks.*:output.grad', 'fc:weight.grad', 'watch/logits', a function, "
                "'*/relu:output.grad', or all of a kind, '*:parameters.grad', 'blocks.*:outputs'.",
            )
        self.pattern = pattern
        self.selection = Selection(pattern)
        self.rules = list_rules(rules)
        self.was_reached = False
        for rule in self.rules:
            if isinstance(rule, PassRule):
                raise CannotRewriteError(
                    f"{rule.name} combines several backward passes, and cannot act at {describe_pattern(pattern)}.",
                    repair=f"give it the optimizer: rg.rewrite(optimizer, {rule.name}).",
                )


class Assignments:
    """All patterns of a rewriting.

    Args:
        given: rules by pattern.

    Raises:
        RewriteError: if there are none, or one that is not a rule.
        SiteError: for an invalid pattern.
    """

    def __init__(self, given: object) -> None:
        if not isinstance(given, Mapping) or not given:
            raise RewriteError(
                f"{given!r} does not say where its rules act.",
                repair="give them by site: rg.rewrite(model, {'blocks.*:output.grad': rg.rules.ClipNorm(1.0)}).",
            )
        self.all = [Assignment(pattern, rules) for pattern, rules in given.items()]

    def check(self, candidates: Sequence[Candidate]) -> None:
        """Make sure that every pattern can match a site.

        Raises:
            NoSuchSiteError: naming the nearest.
        """
        for each in self.all:
            each.selection.check(candidates)
            wanted = [candidate for candidate in candidates if each.selection.wants(candidate)]
            if wanted and all(candidate.site.quantity == "update" for candidate in wanted):
                raise CannotRewriteError(
                    f"{describe_pattern(each.pattern)} is what an optimizer adds, which no rule can change.",
                    repair="set the rule on the gradient: 'fc:weight.grad', or of all parameters, '*:parameters.grad'.",
                )

    @property
    def needs_whole(self) -> bool:
        """Whether a rule needs more of a tensor than the part that a process may have."""
        return any(needs_whole(rule) for each in self.all for rule in each.rules)

    def may_reach(self, candidate: Candidate) -> bool:
        """True if a rule may act at this site, or at one nested in it."""
        return any(each.selection.may_reach(candidate) for each in self.all)

    def may_reach_value(self, candidate: Candidate) -> bool:
        """The same of a value, where a pattern that ends with ``.grad`` is known to mean a gradient."""
        return any(
            each.selection.may_reach(candidate)
            for each in self.all
            if not (isinstance(each.pattern, str) and each.pattern.endswith(".grad"))
        )

    def list_possible(self, candidate: Candidate) -> list[Rule]:
        """The rules that may act at this site, or at one nested in it."""
        return [rule for each in self.all if each.selection.may_reach(candidate) for rule in each.rules]

    @property
    def selections(self) -> list[Selection]:
        """What says where each of them acts."""
        return [each.selection for each in self.all]

    def may_reach_watched(self) -> bool:
        """True if a rule may act at a tensor that is watched by hand."""
        named = (each.pattern for each in self.all if isinstance(each.pattern, str))
        return any(not isinstance(each.pattern, str) for each in self.all) or any(
            pattern.startswith((WATCH, "re:", "*")) for pattern in named
        )

    def find_rules(self, candidate: Candidate) -> list[Rule]:
        """The rules for a site that has been reached, in their order."""
        found: list[Rule] = []
        for each in self.all:
            if each.selection.wants(candidate):
                each.was_reached = True
                found += each.rules
        return found

    def unreached(self) -> list[Assignment]:
        """Those of which no site has been reached."""
        return [each for each in self.all if not each.was_reached]


def list_rules(given: object) -> list[Rule]:
    """A rule, or a list of them, as a list.

    Raises:
        RuleError: for something that is not a rule.
        RewriteError: for an empty list.
    """
    several: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    if not several:
        raise RewriteError("An empty list holds no rule.", repair="give at least one, or leave the site out.")
    return [as_rule(each) for each in several]


def _names_a_slot(pattern: str) -> bool:
    return ":" in pattern or pattern.removeprefix("!").startswith(WATCH) or pattern.startswith("re:")
