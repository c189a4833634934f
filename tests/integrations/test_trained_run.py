"""What all callbacks have in common."""

from __future__ import annotations

import inspect

from retrograd.core.recording.record import record
from retrograd.integrations.trained_run import TrainedRun


def test_it_takes_what_a_recording_takes() -> None:
    theirs, ours = (dict(inspect.signature(each).parameters) for each in (record, TrainedRun))
    assert {"model", "resume"} < theirs.keys()  # which the trainer knows
    for name in theirs.keys() - {"model", "resume"}:
        assert ours[name].default == theirs[name].default, name
        assert ours[name].annotation == theirs[name].annotation, name
    assert ours.keys() - theirs.keys() == {"quiet"}
