"""Scripts that save whole models: what they write, and what becomes of it, is what it is without us."""

from __future__ import annotations

from tests.core.launch.recorded import Outcome, outputs, recorded


@recorded("saves_models.py")
def test_whole_models_are_saved_as_ever(outcome: Outcome) -> None:
    """The script prints digests and hooks of all that it has written and copied, which a bare run prints too."""
    assert outputs("self", "body", "head") <= outcome.sites()
    assert outcome.status() == "finished"


@recorded("sweep.py")
def test_models_that_the_program_has_dropped_are_freed(outcome: Outcome) -> None:
    """The script prints how many there are, as a bare run does; what was recorded of each is all there."""
    names = ["", "net.", "net_2.", "net_3.", "net_4.", "net_5."]
    seen = [row["site"] for row in outcome.rows() if row["phase"] == "train"]
    for name in names:
        assert [seen.count(f"{name}{site}") for site in ("head:output", "head:weight.grad", "head:bias.update")] == [
            2
        ] * 3
    assert not [each for each in outcome.manifest()["not_recorded"] if each["site"].startswith("net")]
