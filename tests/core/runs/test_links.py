"""A run that came from elsewhere may hold links to anywhere: nothing is written or removed where they lead to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import retrograd as rg
from retrograd.core.errors import RunWriteError
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.lock import Lock, is_locked
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from retrograd.following.hangs.ring import Ring
from tests.core.runs.written import write_run

WRITERS: dict[str, Callable[[Path], object]] = {
    "compact": compact,
    "resume": lambda run: RunWriter(run, resume=True).close(),
    "resume at a step": lambda run: RunWriter(run, resume=True, step=1).close(),
    "record": lambda run: RunWriter(run, join=True).close(),
    "ring": Ring.create,
}
LINKS = {
    "rank00000": ("compact", "resume", "resume at a step", "record", "ring"),
    "rank00000/statistics": ("compact", "resume", "resume at a step"),
    "rank00000/events": ("resume", "resume at a step"),
    "rank00000/tensors": ("resume", "resume at a step"),
    "rank00000/.lock": ("compact", "resume", "resume at a step"),
}


def list_all(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("link", "writer"), [(link, each) for link, writers in LINKS.items() for each in writers])
def test_a_link_to_a_run_of_the_user_is_refused(tmp_path: Path, link: str, writer: str) -> None:
    own, other = write_run(tmp_path / "own", range(6)), write_run(tmp_path / "other", range(3))
    before = list_all(own)
    target = other / link
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    target.symlink_to(own / link)
    with pytest.raises(RunWriteError, match="is a link") as caught:
        WRITERS[writer](other)
    assert str(target) in caught.value.problem
    assert list_all(own) == before
    assert open_run(own).history["a:output"].steps.tolist() == list(range(6))


def test_the_folder_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(3))
    (tmp_path / "latest").symlink_to(run)
    write_run(tmp_path / "latest", range(3, 5), resume=True)
    compact(tmp_path / "latest")
    assert open_run(run).history["a:output"].steps.tolist() == list(range(5))


def test_an_export_and_a_report_are_not_written_through_links(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(3))
    (tmp_path / "precious").write_text("mine")
    for name in ("report.html", "statistics.csv", "findings.jsonl"):
        (run / name).symlink_to(tmp_path / "precious")
    rg.write_report(run)
    rg.explain(run)
    with pytest.raises(RunWriteError, match="is a link"):
        rg.export(run, "csv")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_lock_that_is_a_link_or_a_pipe(tmp_path: Path) -> None:
    mine = Lock(tmp_path / "mine")
    assert mine.acquire()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert is_locked(tmp_path / "mine")
    assert not is_locked(tmp_path / "link")
    assert not is_locked(tmp_path / "pipe")  # it does not wait for a writer
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(OSError, match=r"link|not a file"):
            Lock(tmp_path / name).acquire()
    assert not (tmp_path / "nowhere").exists()
    mine.release()
