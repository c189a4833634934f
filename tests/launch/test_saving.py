"""Scripts that save whole models: what they write, and what becomes of it, is what it is without us."""

from __future__ import annotations

from tests.launch.recorded import Outcome, outputs, recorded


@recorded("saves_models.py")
def test_whole_models_are_saved_as_ever(outcome: Outcome) -> None:
    """The script prints digests and hooks of all that it has written and copied, which a bare run prints too."""
    assert outputs("self", "body", "head") <= outcome.sites()
    assert outcome.status() == "finished"
