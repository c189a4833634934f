"""Selecting sites: every kind of pattern means what it says, and one that means nothing is refused."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from retrograd.core.errors import NoSuchSiteError, PatternError, SiteError
from retrograd.core.sites.pattern import Candidate, Pattern
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import Site


def all_candidates() -> list[Candidate]:
    """Two blocks of a norm and a linear layer, and a head: as a recorder would list them."""
    found = []
    modules: dict[str, nn.Module] = {"self": nn.Sequential(), "head": nn.Linear(2, 2)}
    for block in ("0", "1"):
        modules |= {f"blocks.{block}.norm": nn.LayerNorm(2), f"blocks.{block}.fc": nn.Linear(2, 2)}
    for path, module in modules.items():
        sites = [Site(path, ("output",)), Site(path, ("input", "x"))]
        found += [Candidate(each, module) for site in sites for each in (site, site.grad)]
        for name, _ in module.named_parameters(recurse=False):
            site = Site(path, (name,))
            found += [Candidate(each, module) for each in (site, site.grad, site.update)]
    return found


CANDIDATES = all_candidates()
NAMES = [str(candidate.site) for candidate in CANDIDATES]


def chosen(patterns: Pattern | list[Pattern] | None) -> list[str]:
    selection = Selection(patterns)
    selection.check(CANDIDATES)
    return [str(candidate.site) for candidate in CANDIDATES if selection.wants(candidate)]


def test_nothing_asked_for_is_outputs_and_gradients_and_updates() -> None:
    assert chosen(None) == [name for name in NAMES if "input" not in name and not name.endswith(("weight", "bias"))]


@pytest.mark.parametrize("glob", ["*:output", "blocks.*:output.grad", "*:weight", "blocks.?.fc:*", "*fc:input.*", "*"])
def test_a_glob_with_a_colon_is_over_whole_names(glob: str) -> None:
    assert chosen(glob) == [name for name in NAMES if fnmatch.fnmatchcase(name, glob)]


def test_a_glob_without_a_colon_is_over_modules() -> None:
    default = chosen(None)
    assert chosen("blocks.0.*") == [name for name in default if name.startswith("blocks.0.")]
    assert chosen("self") == ["self:output", "self:output.grad"]


@pytest.mark.parametrize("pattern", ["re:^blocks[.]1.*output$", re.compile(r"^blocks[.]1.*output$")])
def test_a_regular_expression_is_searched(pattern: Pattern) -> None:
    assert chosen(pattern) == ["blocks.1.norm:output", "blocks.1.fc:output"]


def test_a_module_type_is_its_instances() -> None:
    assert chosen(nn.LayerNorm) == [name for name in chosen(None) if ".norm:" in name]


def test_a_predicate_is_asked() -> None:
    assert chosen(lambda candidate: candidate.site.path == "head" and candidate.site.quantity == "update") == [
        "head:weight.update",
        "head:bias.update",
    ]


def test_exclusions_take_away_from_what_is_asked_for_or_the_default() -> None:
    assert chosen(["*:output", "!*norm:*"]) == [
        name for name in NAMES if name.endswith(":output") and "norm" not in name
    ]
    assert chosen("!blocks.*") == [name for name in chosen(None) if not name.startswith("blocks.")]
    assert chosen(["*:output", "!re:^blocks"]) == ["self:output", "head:output"]


patterns = st.sampled_from(["*:output", "*:*.grad", "blocks.*", "head", "re:weight", "*fc:input.x", "*"])


@given(st.lists(patterns, min_size=1, max_size=3), st.lists(patterns, max_size=2))
def test_a_selection_is_the_union_less_the_exclusions(wanted: list[str], excluded: list[str]) -> None:
    selection = Selection([*wanted, *(f"!{pattern}" for pattern in excluded)])
    for candidate in CANDIDATES:
        asked = any(Selection(pattern).wants(candidate) for pattern in wanted)
        refused = any(Selection(pattern).wants(candidate) for pattern in excluded)
        assert selection.wants(candidate) == (asked and not refused)


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("block.0.fc:output", "blocks.0.fc:output"),
        ("haed", "head"),
        ("re:^heed:output", "head:output"),
        (nn.Conv2d, "LayerNorm, Linear, Sequential"),
        (lambda candidate: False, "self:output"),
        ("*weight*", "say '*:weight*' for what is in them"),
        ("!*dropout*", "blocks.0"),
        ("blocks.0.fc:ouput.grad", "blocks.0.fc:output.grad"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: Pattern, nearest: str) -> None:
    with pytest.raises(NoSuchSiteError, match=re.escape(nearest)):
        chosen(pattern)


def test_a_selection_that_leaves_nothing_over_is_an_error() -> None:
    with pytest.raises(NoSuchSiteError, match="exclude every site"):
        chosen(["head:output", "!head"])


@pytest.mark.parametrize(
    "pattern",
    ["head:output.logits", "head:output.logits.grad", "blocks.*:input.mask.0", "*:output.*.grad", "head#2:output",
     "head#2", "head#2:outputs.grad", "hea*#[23]:inputs", r"re:^head:output\.logits$", "re:#3:output", "watch/anything",
     r"re:\.0\.h\.grad$"],
)  # fmt: skip
def test_sites_that_come_up_later_may_be_asked_for(pattern: str) -> None:
    assert chosen(pattern) in ([], [name for name in NAMES if fnmatch.fnmatchcase(name, pattern)])
    reached = [candidate.site.path for candidate in CANDIDATES if Selection(pattern).may_reach(candidate)]
    assert ("head" in reached) == (not pattern.startswith(("blocks", "watch")))


@pytest.mark.parametrize(
    "pattern", ["haed:output.logits", "head:weight.x", "haed#2:output", r"re:^haed:output\.logits", "head#2:weight"]
)
def test_a_later_site_of_a_module_that_is_not_there_is_an_error(pattern: str) -> None:
    with pytest.raises(NoSuchSiteError):
        chosen(pattern)


FIRST, SECOND, TENTH = (Site("head", ("output",), call=call) for call in (1, 2, 10))
STATE = [Site("watch/state", ("h",), call=call, quantity="grad") for call in (1, 2)]


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("head:output", [FIRST, SECOND, TENTH]),
        ("head#*:output", [FIRST, SECOND, TENTH]),
        ("head#1:output", [FIRST]),
        ("head#2:output", [SECOND]),
        ("h*#1*:output", [FIRST, TENTH]),
        ("head#?:output", [FIRST, SECOND]),
        ("head", [FIRST, SECOND, TENTH]),
        ("head#1", [FIRST]),
        ("head#2", [SECOND]),
        ("*#2", [SECOND]),
        ("*#[!1]*:*", [SECOND, STATE[1]]),
        ("head#1:outputs", [FIRST]),
        ("head:outputs", [FIRST, SECOND, TENTH]),
        ("re:^head:output$", [FIRST, SECOND, TENTH]),
        ("re:^head#2:", [SECOND]),
        (re.compile("#1"), [FIRST, TENTH, STATE[0]]),
        (lambda candidate: candidate.site.call == 2, [SECOND, STATE[1]]),
        ("*1:output", []),
        ("watch/state:h.grad", STATE),
        ("watch/state#1:h.grad", STATE[:1]),
        ("watch/*#2*", STATE[1:]),
    ],
)
def test_a_name_is_every_call_and_a_number_is_one(pattern: Pattern, sites: list[Site]) -> None:
    selection = Selection(pattern)
    assert [site for site in (FIRST, SECOND, TENTH, *STATE) if selection.wants(Candidate(site))] == sites


def test_a_call_can_be_left_out() -> None:
    selection = Selection(["head:output", "!head#2"])
    assert [selection.wants(Candidate(site)) for site in (FIRST, SECOND, TENTH)] == [True, False, True]


@pytest.mark.parametrize("pattern", ["head#0:output", "head#01:output", "head#:output", "head#x", "head#-1:output",
                                     "watch/y#0.grad", "head#0:outputs", "head:output.a#b", "!head#0"])  # fmt: skip
def test_what_can_be_the_number_of_no_call_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="counted from 1"):
        Selection(pattern)


@pytest.mark.parametrize(
    "pattern", ["head#1:weight.grad", "head#1:weight.update", "head#2:weight", r"re:^head#1:bias\.grad$"]
)
def test_the_gradient_of_a_parameter_is_of_no_call(pattern: str) -> None:
    with pytest.raises(NoSuchSiteError):
        chosen(pattern)


def test_where_parameters_are_looked_at_in_each_call_their_values_have_calls() -> None:
    Selection("head#2:weight").check(CANDIDATES, parameters_have_calls=True)
    with pytest.raises(NoSuchSiteError):
        Selection("head#2:weight.grad").check(CANDIDATES, parameters_have_calls=True)


@pytest.mark.parametrize("patterns", [5, [5], "", ["*:output", ""], [], "!", "re:(", ["!re:["], object()])
def test_a_pattern_of_the_wrong_kind_is_refused(patterns: object) -> None:
    with pytest.raises(PatternError) as caught:
        Selection(patterns)  # type: ignore[arg-type]
    assert isinstance(caught.value, SiteError)
    assert caught.value.repair


def test_patterns_are_described_as_they_were_written() -> None:
    selection = Selection(["*:output", "!head", re.compile("x"), nn.Linear])
    assert selection.describe() == ["'*:output'", "'re:x'", "Linear", "'!head'"]
    assert Selection().describe() == ["(default)"]


def test_what_was_never_matched_is_told() -> None:
    selection = Selection(["head:output", "head:output.logits", "!watch/x"])
    assert selection.unmatched(CANDIDATES) == ["head:output.logits", "!watch/x"]
    assert selection.unmatched([*CANDIDATES, Candidate(Site("head", ("output", "logits")))]) == ["!watch/x"]
