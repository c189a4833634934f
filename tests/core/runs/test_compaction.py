"""Runs that are compacted: the same numbers from fewer files, also when it is killed."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest

from retrograd.core import files
from retrograd.core.cli import main
from retrograd.core.errors import DamagedRunError, RetrogradWarning, RunExistsError, RunWriteError
from retrograd.core.history import windows
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs import compaction
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.stored import StoredRows
from retrograd.explaining.comparing.comparison import compare
from tests import warm
from tests.core.history.made import make_batch, make_steps
from tests.core.runs.written import add_step, open_writer, sort_rows, write_run

RANKS = 3


def make_elements(step: int, micro: int, rank: int, name: str = "") -> dict[int, np.ndarray]:
    """Elements of all sites; the update, number 4, is the same on all ranks."""
    elements = {}
    for number in range(5):
        random = np.random.default_rng([step, micro, number, 0 if number == 4 else rank])
        elements[number] = random.standard_normal(20) * 2.0 ** (number * 3)
    return elements


def write_ranks(path: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 12) -> Path:
    holds = {"b:weight.update": {"holds": "copy", "ranks": list(range(RANKS))}}
    for rank in range(RANKS):
        monkeypatch.setenv("RANK", str(rank))
        writer = open_writer(path, join=True)
        writer.describe(placements={"stages": {}, "sites": holds}, statistics={"mine": "mean", "most": "max"})
        for step in range(steps):
            for micro in range(2):
                if (step + micro) % 5 == rank:
                    continue  # not every rank has every moment
                custom = {"mine": ([0, 2], [float(step), 1.0 + rank]), "most": ([1], [float(rank)])}
                batch = make_batch(Moment(step, micro, 0), make_elements(step, micro, rank), custom=custom)
                add_step(writer, batch)
            if step == 2:
                writer.add_rows(make_batch(Moment(step, 0, -1, "eval"), {0: make_elements(step, 9, rank)[0]}))
            writer.flush()
        writer.close()
    monkeypatch.delenv("RANK")
    return path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_ranks(tmp_path / "run", monkeypatch)


STATISTICS = ("count", "mean", "std", "rms", "min", "max", "l1", "zero_share", "update_ratio", "mine", "most")


def read_all(history: History) -> dict[str, Any]:
    """Every number that does not tell ranks apart."""
    found: dict[str, Any] = {"sites": history.sites, "loss": history.loss.values}
    for statistic in STATISTICS:
        for phase in ("train", "eval", None):
            found[f"{statistic} {phase}"] = history.matrix(statistic, phase=phase).values
    for site in history.sites:
        series = history[site]
        found[f"steps of {site}"], found[f"exponents of {site}"] = series.exponents
        found[f"micro of {site}"] = series.select(micro=1).rms
        found[f"tensors of {site}"] = [kept.step for kept in series.tensors]
        for statistic in STATISTICS[2::4]:  # of a long record each is a pass over the files
            found[f"{statistic} of {site}"] = series.statistic(statistic)
    return found


def read_sums(history: History) -> dict[str, Any]:
    """Numbers that change if a row is missing, or is there twice."""
    found = {name: history.matrix(name, phase=None).values for name in ("count", "l1", "max")}
    return {**found, "rows": history["a:output.grad"].select(micro=1).l1}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, numbers in expected.items():
        if isinstance(numbers, list) or np.asarray(numbers).dtype.kind == "i":
            assert np.array_equal(found[name], numbers), name
        else:
            np.testing.assert_allclose(found[name], numbers, rtol=1e-12, atol=1e-12, err_msg=name)


def count_files(run: Path) -> int:
    return len(list(run.glob("rank*/statistics/*"))) + len(list(run.glob("rank*/merged/*")))


@pytest.mark.parametrize("keep_ranks", [False, True])
def test_the_same_numbers_come_from_fewer_files(run: Path, keep_ranks: bool) -> None:
    expected, rows, files = read_all(open_run(run).history), sort_rows(open_run(run).history), count_files(run)
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent.name != "statistics"}
    saved = compact(run, keep_ranks=keep_ranks)
    assert_same(read_all(open_run(run).history), expected)
    assert (saved.files_before, saved.files_after) == (files, count_files(run))
    assert saved.files_after == (RANKS if keep_ranks else 1)
    assert saved.bytes_after < saved.bytes_before
    if keep_ranks:
        pandas.testing.assert_frame_equal(sort_rows(open_run(run).history).to_pandas(), rows.to_pandas())
        assert all(path.read_bytes() == content for path, content in kept.items())
    else:
        assert "cannot be told apart" in str(saved)
        assert saved.rows_after < saved.rows_before
        assert all(path.read_bytes() == content for path, content in kept.items() if path.name != "manifest.json")
    assert compact(run, keep_ranks=keep_ranks).files_after == saved.files_after  # again, which changes nothing
    assert_same(read_all(open_run(run).history), expected)


def test_a_run_is_the_same_as_its_compacted_copy(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copy")
    compact(tmp_path / "copy")
    for a, b in ((run, tmp_path / "copy"), (tmp_path / "copy", run)):
        comparison = compare(a, b)
        assert comparison.verdict != "different"
        assert comparison.largest < 1e-12
        assert not comparison.findings  # every row has its partner


@pytest.mark.parametrize("keep_ranks", [False, True])
def test_stopped_at_any_moment_it_reads_as_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_ranks: bool
) -> None:
    """Each change of the folder is made, then the next one fails; what is there must be the same numbers."""
    run = write_ranks(tmp_path / "run", monkeypatch, steps=4)
    expected = read_sums(open_run(run).history)
    unlink, replace = Path.unlink, Path.replace
    for allowed in range(60):
        left = [allowed]

        def count(left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1

        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", lambda path, **rest: (count(), unlink(path, **rest))[1])
            patched.setattr(Path, "replace", lambda path, target: (count(), replace(path, target))[1])
            try:
                compact(run, keep_ranks=keep_ranks)
            except KeyboardInterrupt:
                assert_same(read_sums(open_run(run).history), expected)
                continue
        break
    else:
        pytest.fail("it is never done")
    assert_same(read_sums(open_run(run).history), expected)


def test_killed_it_reads_as_before_or_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system itself: with a file half done, with the new files unannounced, and with old ones left over."""
    run = write_ranks(tmp_path / "run", monkeypatch, steps=3)
    expected = read_sums(open_run(run).history)
    for number, allowed in ((signal.SIGKILL, 0), (signal.SIGKILL, 1), (signal.SIGINT, 2), (signal.SIGKILL, 4)):
        words = [sys.executable, "-m", "tests.core.runs.compacting", str(run), str(int(number)), str(allowed)]
        done = warm.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == -number, done.stderr
        assert_same(read_sums(open_run(run).history), expected)
    compact(run)
    assert_same(read_sums(open_run(run).history), expected)
    assert count_files(run) == 1


def test_a_run_that_goes_on_is_refused(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run")
    with pytest.raises(RunWriteError, match="still being recorded"):
        compact(tmp_path / "run")
    writer.close()
    compact(tmp_path / "run")


def test_to_merged_ranks_nothing_is_added(run: Path) -> None:
    compact(run)
    with pytest.raises(RunExistsError, match="merged by `retrograd compact`"):
        open_writer(run, resume=True)


def test_a_run_of_one_rank_goes_on(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(4))
    compact(run)
    write_run(run, range(4, 6), resume=True)
    assert open_run(run).history["a:output"].steps.tolist() == list(range(6))


def test_in_several_windows_and_parts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_all(open_run(run).history)
    monkeypatch.setattr(LIMITS, "compacted_cells", 32)
    monkeypatch.setattr(LIMITS, "compacted_part_rows", 30)
    monkeypatch.setattr(LIMITS, "compacted_group_rows", 7)
    assert compact(run).files_after > 2
    assert_same(read_all(open_run(run).history), expected)


def list_sites(path: Path) -> list[str]:
    return list(pq.read_table(path, columns=["site"])["site"].to_pylist())


@pytest.mark.parametrize("limit", [100, 37, 1 << 17])
def test_a_long_part_of_one_rank_is_sorted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """As pandas sorts it; no more rows are held than a part may have, and the row group that is read."""
    writer = open_writer(tmp_path / "run")
    for batch in make_steps(range(40)):
        add_step(writer, batch)
    writer.flush()
    for batch in make_steps(range(40, 44)):
        add_step(writer, batch)
    writer.close()
    run, folder = tmp_path / "run", tmp_path / "run" / "rank00000" / "statistics"
    monkeypatch.setattr(LIMITS, "compacted_part_rows", limit)
    monkeypatch.setattr(LIMITS, "compacted_group_rows", 16)
    expected = sort_rows(open_run(run).history)
    before = {path: pq.read_table(path).to_pandas() for path in folder.iterdir()}
    held: list[int] = []
    join = compaction._join
    monkeypatch.setattr(compaction, "_join", lambda tables: (held.append(sum(map(len, tables))), join(tables))[1])
    compact(run)
    assert sort_rows(open_run(run).history).equals(expected)
    assert max(held) <= limit
    for path in folder.iterdir():
        sites = list_sites(path)
        assert sum(one != other for one, other in itertools.pairwise(sites)) == len(set(sites)) - 1
        if path in before:
            number = {site: at for at, site in enumerate(dict.fromkeys(before[path]["site"]))}
            wanted = before[path].assign(at=before[path]["site"].map(number)).sort_values(["at", "step"], kind="stable")
            found = pq.read_table(path).to_pandas()
            pandas.testing.assert_frame_equal(found, wanted.drop(columns="at").reset_index(drop=True))
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    compact(run)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times  # it is sorted already


def test_what_a_killed_one_has_left_is_cleared_by_the_next(run: Path) -> None:
    """Half of a part, of a manifest and of the merged parts, of this version and of one before."""
    expected = read_sums(open_run(run).history)
    rank = run / "rank00000"
    (rank / "merged").mkdir()
    left = [
        rank / ".tmp-0123456789ab-part-00000000-00000011_parquet",
        run / ".tmp-0123456789ab-manifest_json",
        rank / "statistics" / ".tmp-0123456789ab-part-00000000-00000011.parquet",
        rank / "merged" / "part-00000000-00000000.parquet",
    ]
    for path in left:
        path.write_bytes(b"PAR1half of it")
    compact(run, keep_ranks=True)
    assert not any(path.exists() for path in left)
    assert_same(read_sums(open_run(run).history), expected)


def test_statistics_that_were_never_merged_are_not_removed(run: Path) -> None:
    """A manifest may say what is not so: of a run that came from elsewhere, or was copied in part."""
    expected, manifest = read_sums(open_run(run).history), json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "compacted": {"ranks": [0, 1, 2]}}))
    assert_same(read_sums(open_run(run).history), expected)
    (run / "rank00000" / "merged").mkdir()
    before = sorted(run.rglob("*.parquet"))
    with pytest.raises(DamagedRunError, match="no file in 'merged' has"):
        compact(run)
    shutil.copy(run / "rank00000" / "statistics" / "part-00000000-00000000.parquet", run / "rank00000" / "merged")
    with pytest.raises(DamagedRunError, match="no file in 'merged' has"):
        compact(run)
    assert set(before) <= set(run.rglob("*.parquet"))
    shutil.rmtree(run / "rank00000" / "merged")
    compact(run)
    assert_same(read_sums(open_run(run).history), expected)


@pytest.mark.parametrize("keep_ranks", [False, True])
def test_nothing_is_removed_for_what_cannot_be_read_back(
    run: Path, monkeypatch: pytest.MonkeyPatch, keep_ranks: bool
) -> None:
    """As a disk may do that takes what is written and keeps something else."""
    before, expected = sorted(run.rglob("part-*")), read_sums(open_run(run).history)
    monkeypatch.setattr(files, "create", lambda path: Forgetful(path))
    with pytest.raises(DamagedRunError):
        compact(run, keep_ranks=keep_ranks)
    assert sorted(run.rglob("part-*")) == before
    assert_same(read_sums(open_run(run).history), expected)


class Forgetful(io.FileIO):
    """A file that holds zeros where much is written at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")

    def write(self, data: Any) -> int:
        return super().write(bytes(data) if len(data) < 200 else bytes(len(data)))


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compact", str(run)]) == 0
    assert "36 → 1 file" in capsys.readouterr().out
    assert main(["compact", str(run / "nothing")]) == 2


# ---- long records, read some steps at a time ----


@pytest.mark.parametrize("cells", [12, 1 << 19])
def test_a_long_record_is_read_as_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    run = write_ranks(tmp_path / "run", monkeypatch, steps=3)
    short = open_run(run).history
    expected, differing = read_all(short), short.disagreements
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "merged_cells", cells)
    monkeypatch.setattr(LIMITS, "histograms_at_once", 3)
    monkeypatch.setattr(LIMITS, "histograms_at_once", 4)
    monkeypatch.setattr(LIMITS, "open_groups", 5)  # files are closed and opened again
    history = open_run(run).history
    assert isinstance(history.rows, windows.LongRows)
    assert_same(read_all(history), expected)
    assert history.disagreements == differing
    for site in ("a:output.grad", "b:weight.update"):
        for choice in ({"rank": 1}, {"backward": None}, {"phase": None, "micro": None}):
            mine, theirs = history[site].select(**choice), short[site].select(**choice)  # type: ignore[arg-type]
            np.testing.assert_allclose(mine.std, theirs.std, rtol=1e-12)
            assert {name: column.tolist() for name, column in mine.rows.items() if name not in ("mine", "most")} == {
                name: column.tolist() for name, column in theirs.rows.items() if name not in ("mine", "most")
            }
    assert history["a:output.grad"].value.rms.tolist() == short["a:output.grad"].value.rms.tolist()


def test_copies_that_differ_are_told_in_a_long_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds = {"b:weight.update": {"holds": "copy", "ranks": [0, 1]}}
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        writer = open_writer(tmp_path, join=True)
        writer.describe(placements={"stages": {}, "sites": holds})
        for step in range(5):
            writer.add_rows(make_batch(Moment(step, 0, 0), make_elements(step, 0, rank if step > 2 else 0)))
            if step > 2:
                same = make_elements(step, 0, 0)[4]
                writer.add_rows(make_batch(Moment(step, 1, 0), {4: same + rank}))
        writer.close()
    expected = open_run(tmp_path).history.disagreements
    assert [(each.site, each.step, each.shown, each.other) for each in expected] == [("b:weight.update", 3, 0, 1)]
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    history = open_run(tmp_path).history
    assert history.disagreements == expected
    with pytest.warns(RetrogradWarning, match="Ranks 0 and 1 hold copies of 'b:weight.update' that differ from step 3"):
        history.matrix("rms")
    monkeypatch.setattr(LIMITS, "held_rows", 1 << 20)
    compact(tmp_path)
    assert open_run(tmp_path).history.disagreements == expected


def test_of_one_site_few_row_groups_are_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "compacted_group_rows", 12)
    monkeypatch.setattr(LIMITS, "held_rows", 10)
    compact(run)
    history = open_run(run).history
    table = pandas.concat(pandas.read_parquet(path) for path in run.rglob("*.parquet") if "merged" in path.parts)
    read = set[tuple[Path, int]]()
    original = StoredRows._read_groups

    def count(self: StoredRows, numbers: Sequence[int], names: tuple[str, ...]) -> Any:
        read.update((self.path, number) for number in numbers)
        return original(self, numbers, names)

    monkeypatch.setattr(StoredRows, "_read_groups", count)
    expected = table[(table["site"] == "b:weight.update") & (table["phase"] == "train")].sort_values("step")
    groups = sum(pq.ParquetFile(path).num_row_groups for path in run.rglob("*.parquet") if "merged" in path.parts)
    series = history["b:weight.update"]
    assert series.rows["sum"].tolist() == expected["sum"].tolist()
    assert len(read) < groups / 2
