"""A server of some runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from retrograd.core.serving.server import RunServer
from tests.core.serving.served import serving, write_runs


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs")


@pytest.fixture
def server(parent: Path) -> Iterator[RunServer]:
    with serving(parent) as server:
        yield server
