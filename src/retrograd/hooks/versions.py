"""Which torch this is. One that is older than the oldest that the tests run with is refused when it is imported."""

from __future__ import annotations

import re

import torch

from retrograd.errors import TorchVersionError

OLDEST = (2, 11)
"""Also what ``pyproject.toml`` asks for."""


def parse_version(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 11) of ``"2.11.0a0+git1234"``."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def check_torch(version: str) -> None:
    """Refuse a torch that is too old.

    Raises:
        TorchVersionError: it is.
    """
    if parse_version(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise TorchVersionError(
            f"This is torch {version}, and retrograd needs {oldest} or later.",
            repair=f'pip install "torch>={oldest}"',
            reason="older ones do not show what their graphs hold, so much of what is said of a graph would be wrong.",
        )


TORCH = parse_version(torch.__version__)
"""The torch that is imported."""

check_torch(torch.__version__)
