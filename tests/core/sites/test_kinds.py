"""All outputs, inputs or parameters of modules: by the meaning of names, not by their letters."""

from __future__ import annotations

import fnmatch

import pytest

from retrograd.core.errors import NoSuchSiteError, PatternError
from retrograd.core.sites.pattern import Candidate
from retrograd.core.sites.selection import Selection
from retrograd.core.sites.site import Site, parse_site
from tests.core.sites.test_selection import CANDIDATES, NAMES, chosen

ODD = [
    "fc:parameter.parameters.grad", "fc:parameter.output", "fc:output.parameters", "fc:output.grads.0.grad",
    'fc:output."grad"', '"odd:outputs":output', "watch/y:outputs", "watch/y:parameters.grad", "fc:input.inputs",
    "fc#2:output", "fc#2:input.x.grad", "fc:weights.update",
    "fc:weight.local.grad", "fc:weight.before.grad", "optimizer/SGD:0.2.grad", "fc:output.before",
]  # fmt: skip
"""Names that look like what they are not, with what they are: kind, quantity."""
KINDS = [
    ("parameter", "grad"), ("parameter", "value"), ("output", "value"), ("output", "grad"),
    ("output", "value"), ("output", "value"), ("watched", "value"), ("watched", "grad"), ("input", "value"),
    ("output", "value"), ("input", "grad"), ("parameter", "update"),
    ("named alone", "grad"), ("named alone", "grad"), ("parameter", "grad"), ("output", "value"),
]  # fmt: skip


def matched(pattern: str) -> list[str]:
    selection = Selection(pattern)
    return [name for name in ODD if selection.wants(Candidate(parse_site(name)))]


@pytest.mark.parametrize("quantity", ["value", "grad", "update"])
@pytest.mark.parametrize("kind", ["output", "input", "parameter"])
def test_kinds_are_told_by_what_a_name_means(kind: str, quantity: str) -> None:
    if quantity == "update" and kind != "parameter":
        return
    tail = "" if quantity == "value" else f".{quantity}"
    assert matched(f"*:{kind}s{tail}") == [
        name for name, is_ in zip(ODD, KINDS, strict=True) if is_ == (kind, quantity)
    ]


@pytest.mark.parametrize(
    ("pattern", "globs"),
    [
        ("*:parameters", ["*:weight", "*:bias"]),
        ("*:parameters.grad", ["*:weight.grad", "*:bias.grad"]),
        ("blocks.*:parameters.update", ["blocks.*:weight.update", "blocks.*:bias.update"]),
        ("*:outputs", ["*:output"]),
        ("blocks.?.fc:outputs.grad", ["blocks.?.fc:output.grad"]),
        ("*:inputs", ["*:input.x"]),
        ("head:inputs.grad", ["head:input.x.grad"]),
    ],
)
def test_they_are_what_is_written_out(pattern: str, globs: list[str]) -> None:
    assert chosen(pattern) == [name for name in NAMES if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def test_they_go_together_with_others_and_with_exclusions() -> None:
    assert chosen(["*:parameters.grad", "head:output", "!*norm*:parameters.grad", "!blocks.1.*"]) == [
        name for name in NAMES if name in ("blocks.0.fc:weight.grad", "blocks.0.fc:bias.grad", "head:output",
                                           "head:weight.grad", "head:bias.grad")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    ["*:parameters.x", "*:outputs.update", "*:inputs.update", "*:outputs.*", "*:outputs.logits", "*:parameters.",
     "fc#2:parameters.grad", "fc#0:outputs", "*:parameters.grad.grad"],
)  # fmt: skip
def test_what_no_site_of_the_kind_has_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError) as caught:
        Selection(pattern)
    assert caught.value.repair


@pytest.mark.parametrize("pattern", ["*:parameter", "*:output.parameters", "nowhere:outputs", "*:Parameters"])
def test_what_is_not_quite_one_is_a_glob_that_matches_nothing(pattern: str) -> None:
    if pattern == "*:output.parameters":
        return  # a leaf that may come
    with pytest.raises(NoSuchSiteError):
        chosen(pattern)


@pytest.mark.parametrize(
    ("pattern", "said"), [("*.grad", "*:parameters.grad"), ("head.update", "head:parameters.update")]
)
def test_a_quantity_of_nothing_is_told_how_to_say_of_what(pattern: str, said: str) -> None:
    with pytest.raises(NoSuchSiteError) as caught:
        chosen(pattern)
    assert said in caught.value.repair


def test_one_call_of_a_kind() -> None:
    later = Candidate(Site("head", ("input", "x"), 2))
    assert Selection("head#2:inputs").wants(later)
    assert not Selection("head#1:inputs").wants(later)
    Selection("head#2:inputs").check(CANDIDATES)
