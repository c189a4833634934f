from __future__ import annotations

import os

import pytest

from retrograd.core.launch import closing
from retrograd.core.launch.requests import MIRROR
from retrograd.core.limits import LIMITS


def test_a_tracker_that_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(closing, "say", said.append)
    monkeypatch.setattr(LIMITS, "mirror_seconds", 0.0)
    monkeypatch.setenv(MIRROR, str(os.getpid()))
    closing._await_mirror()
    assert said == [f"the tracker has not taken all within 0 seconds; process {os.getpid()} goes on"]
