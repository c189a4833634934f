"""Names of sites: what is printed is read back, whatever the keys and paths are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.errors import SiteSyntaxError
from retrograd.core.sites.site import WATCH, Site, check_watch_name, name_like, parse_leniently, parse_site, says_call

plain_paths = st.lists(st.from_regex(r"[A-Za-z0-9_]{1,6}", fullmatch=True), min_size=1, max_size=4).map(".".join)
odd_paths = st.text(min_size=1, max_size=12).filter(lambda path: not path.startswith(WATCH))
keys = st.one_of(st.from_regex(r"[A-Za-z0-9_]{1,6}", fullmatch=True), st.sampled_from(["grad", "update"]), st.text())
module_sites = st.builds(
    Site,
    path=st.one_of(plain_paths, odd_paths),
    keys=st.lists(keys, min_size=1, max_size=4).map(tuple),
    call=st.integers(1, 1000),
    quantity=st.sampled_from(["value", "grad", "update"]),
)
watch_names = st.text(min_size=1, max_size=12).filter(
    lambda name: not set(":#") & set(name) and not name.endswith(".grad")
)
watched_sites = st.builds(
    Site,
    path=watch_names.map(lambda name: WATCH + name),
    keys=st.lists(keys, max_size=3).map(tuple),
    call=st.integers(1, 1000),
    quantity=st.sampled_from(["value", "grad"]),
)


@given(st.one_of(module_sites, watched_sites))
def test_what_is_printed_is_read_back(site: Site) -> None:
    assert parse_site(str(site)) == site


@given(st.lists(st.one_of(module_sites, watched_sites), min_size=2, max_size=2, unique=True))
def test_different_sites_have_different_names(sites: list[Site]) -> None:
    assert str(sites[0]) != str(sites[1])


@given(st.text(max_size=30))
def test_any_text_is_a_name_or_an_error(text: str) -> None:
    try:
        site = parse_site(text)
    except SiteSyntaxError:
        return
    assert parse_site(str(site)) == site


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("blocks.3.attn:output", Site("blocks.3.attn", ("output",))),
        ("blocks.3.attn:output.grad", Site("blocks.3.attn", ("output",), quantity="grad")),
        ("head:output.logits.0.grad", Site("head", ("output", "logits", "0"), quantity="grad")),
        ("fc:input.x.grad", Site("fc", ("input", "x"), quantity="grad")),
        ('fc:input."grad".grad', Site("fc", ("input", "grad"), quantity="grad")),
        ("fc:weight.update", Site("fc", ("weight",), quantity="update")),
        ("rnn.cell#2:output", Site("rnn.cell", ("output",), call=2)),
        ("self:output", Site("self", ("output",))),
        ("watch/logits", Site("watch/logits")),
        ("watch/logits#3.grad", Site("watch/logits", call=3, quantity="grad")),
        ("watch/state:1.grad", Site("watch/state", ("1",), quantity="grad")),
        ('fc:output."a.b"', Site("fc", ("output", "a.b"))),
        ('"a:b#c":output', Site("a:b#c", ("output",))),
        ('fc:"grad"', Site("fc", ("grad",))),
    ],
)
def test_names_are_as_documented(text: str, site: Site) -> None:
    assert parse_site(text) == site
    assert str(site) == text


@pytest.mark.parametrize(
    "text",
    ["", "fc", "fc:", ":output", "fc:grad", "fc:output.", "fc:output..x", "fc#0:output", "fc#:output", "fc:out put",
     "fc:output.grad.x", 'fc:output."open', "watch/", "a:b:output", '"":output'],
)  # fmt: skip
def test_what_is_no_name_is_an_error_that_shows_one(text: str) -> None:
    with pytest.raises(SiteSyntaxError, match=r"blocks\.3\.attn:output\.grad"):
        parse_site(text)


@given(watch_names)
def test_watched_tensors_have_nearly_any_name(name: str) -> None:
    check_watch_name(name)


@pytest.mark.parametrize("name", ["", "a:b", "a#2", "a.grad"])
def test_a_name_that_could_be_misread_is_refused(name: str) -> None:
    with pytest.raises(SiteSyntaxError):
        check_watch_name(name)


def test_value_gradient_and_update_are_told_apart() -> None:
    site = Site("fc", ("weight",), call=2)
    assert site.grad.value == site
    assert site.grad.first_call == Site("fc", ("weight",), quantity="grad")
    assert {str(site), str(site.grad), str(site.update)} == {"fc#2:weight", "fc#2:weight.grad", "fc#2:weight.update"}
    assert (site.slot, site.is_watched, site.label) == ("weight", False, "#2:weight")
    assert (Site("fc", ("output", "a.b")).label, Site("watch/x", call=3).label) == ('output."a.b"', "#3")
    assert (Site("watch/x", ("0",)).slot, Site("watch/x").is_watched) == ("", True)


def test_a_name_with_the_number_of_its_call() -> None:
    site = Site("fc", ("output", "a"), quantity="grad")
    assert (str(site), site.numbered, site.numbered_label) == ("fc:output.a.grad", "fc#1:output.a.grad", "#1:output.a")
    assert parse_site(site.numbered) == site
    assert Site("watch/x", call=2).numbered == "watch/x#2"
    assert (name_like(site, "x#1:output"), name_like(site, "x:output")) == ("fc#1:output.a.grad", "fc:output.a.grad")
    assert [says_call(name) for name in ("fc#1:output", "fc:output", '"a#b":output', 'fc:output."#"', "watch/x#1")] == [
        True, False, False, False, True,
    ]  # fmt: skip
    assert parse_leniently("no site") == Site("no site")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fc:output.x", "output"), ("fc:input", "input"), ("fc:weight.grad", "parameter"),
     ("fc:parameter.output", "parameter"), ("watch/output", "watched"), ("watch/x:output", "watched")],
)  # fmt: skip
def test_kinds(name: str, kind: str) -> None:
    assert parse_site(name).kind == kind
