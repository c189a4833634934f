"""Part files in a store that are too large to be held: each reading fetches what it needs of them, once."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import retrograd as rg
from retrograd.core.addresses import open_folder
from retrograd.core.errors import DamagedRunError
from retrograd.core.limits import LIMITS
from retrograd.core.runs.parts import PartFile
from tests.core.runs.written import sort_rows, write_run

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("upath")
memory = pytest.importorskip("fsspec.implementations.memory")

STEPS = range(70)
RUN = "memory://runs/large"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local folders of runs at addresses lie below the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two merged parts of several row groups, and six of a step."""
    monkeypatch.setattr(LIMITS, "group_rows", 30)
    monkeypatch.setattr(LIMITS, "rows_at_once", 30)
    return write_run(tmp_path / "run", STEPS)


@pytest.fixture
def fetched(local: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int]]]:
    """Name, start and end of what is fetched of a copy of that run in a store, all of whose files are large."""
    store = fsspec.filesystem("memory")
    store.put(str(local), "/runs/large", recursive=True)
    monkeypatch.setattr(LIMITS, "whole_bytes", 0)
    noted: list[tuple[str, int, int]] = []

    class Noting(io.BytesIO):
        """A file of the store, each reading of which is noted."""

        name = ""

        def read(self, size: int | None = -1) -> bytes:
            start = self.tell()
            data = super().read(size)
            noted.append((self.name, start, start + len(data)))
            return data

    def open_noting(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        assert options == {"cache_type": "none"}  # a file that reads ahead would fetch more
        file = Noting(self.cat_file(path))
        file.name = path
        return file

    monkeypatch.setattr(memory.MemoryFileSystem, "open", open_noting)
    yield noted
    store.store.clear()
    store.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("most_events", [0, 1 << 16])
def test_what_is_read_is_what_a_disk_holds(
    local: Path, fetched: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, most_events: int
) -> None:
    monkeypatch.setattr(LIMITS, "held_events", most_events)
    here, there = rg.open_run(local).history, rg.open_run(RUN).history
    assert sort_rows(here).equals(sort_rows(there))
    assert here.events == there.events
    np.testing.assert_array_equal(here.loss.values, there.loss.values)


def test_a_reading_fetches_what_it_needs_once(local: Path, fetched: list[tuple[str, int, int]]) -> None:
    run = rg.open_run(RUN)
    fetched.clear()
    np.testing.assert_array_equal(run.history["a:output"].rms, rg.open_run(local).history["a:output"].rms)
    whole = sum(path.stat().st_size for path in (local / "rank00000/statistics").iterdir())
    assert 0 < sum(end - start for _, start, end in fetched) < whole / 2


@pytest.mark.parametrize("columns", [["step"], ["bins"], ["step", "bins"], None])
def test_a_row_group_is_fetched_at_once(
    local: Path, fetched: list[tuple[str, int, int]], columns: list[str] | None
) -> None:
    path = next(
        path for path in (local / "rank00000/statistics").iterdir() if pq.read_metadata(path).num_row_groups > 2
    )
    file = PartFile(open_folder(f"{RUN}/rank00000/statistics/{path.name}"))
    fetched.clear()
    assert file.read_group(1, columns).equals(PartFile(path).read_group(1, columns))
    assert len(fetched) == 1


def test_a_file_that_is_removed_while_it_is_read(fetched: list[tuple[str, int, int]]) -> None:
    run = rg.open_run(RUN)
    fsspec.filesystem("memory").rm("/runs/large/rank00000/statistics", recursive=True)
    with pytest.raises(DamagedRunError, match=r"part-.* is gone"):
        run.history["a:output"].statistic("rms")
