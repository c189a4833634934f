"""Sites of one thing are one place."""

from __future__ import annotations

from retrograd.core.views.shown import group_places


def test_places_come_in_the_order_of_their_first_site() -> None:
    places = group_places(["a:weight.grad", "b:output", "a:weight.update", "b:output.grad", "a:weight"])
    assert [place.name for place in places] == ["a:weight", "b:output"]
    assert places[0].sites == {"grad": "a:weight.grad", "update": "a:weight.update", "value": "a:weight"}


def test_inputs_outputs_and_watched_tensors_are_activations() -> None:
    sites = ["a:input.x.grad", "a:output.logits", "watch/z.grad", "a:bias.grad"]
    assert [place.kind for place in group_places(sites)] == ["activation"] * 3 + ["parameter"]


def test_a_name_that_is_no_site_is_a_place_by_itself() -> None:
    (place,) = group_places(["not a site at all"])
    assert (place.name, place.path) == ("not a site at all", "not a site at all")
