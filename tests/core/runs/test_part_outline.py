"""What part files tell of their rows, against the rows as pyarrow alone reads them."""

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.errors import DamagedRunError
from retrograd.core.history.outline import NO_ORDER, count_runs, from_runs, join_runs, list_steps, to_runs
from retrograd.core.history.rows import encode_phase
from retrograd.core.history.sink import Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.part_outline import SITES, STEPS
from retrograd.core.runs.reader import Run, open_run
from tests.core.history.made import SITES as NAMES
from tests.core.history.made import make_batch
from tests.core.runs.written import open_writer


def write(path: Path, *, ranks: int = 1, steps: int = 9) -> Path:
    """A run of uneven steps, with a phase and a site that only some of them have."""
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            writer = open_writer(path, join=True)
        for number in range(steps):
            elements = {site: np.arange(4.0) + rank for site in range(4) if number > 3 or site != 2}
            phase = "eval" if number % 4 == 3 else "train"
            writer.add_rows(make_batch(Moment(number * number, 0, 0, phase), elements))
            if number % 2:
                writer.flush()
        writer.close()
    return path


def list_files(run: Path) -> list[Path]:
    return [path for path in sorted(run.rglob("*.parquet")) if path.parent.name in ("statistics", "merged")]


def outline_by_hand(files: list[Path]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Steps of each phase, and the lowest order of each site, by a loop over rows."""
    steps: dict[str, set[int]] = {}
    orders: dict[str, int] = {}
    for file in files:
        for row in pq.read_table(file, partitioning=None, columns=["step", "phase", "site", "order"]).to_pylist():
            steps.setdefault(row["phase"], set()).add(row["step"])
            orders[row["site"]] = min(orders.get(row["site"], NO_ORDER), row["order"])
    return {phase: sorted(found) for phase, found in steps.items()}, orders


def check(run: Run, monkeypatch: pytest.MonkeyPatch, files: list[Path]) -> None:
    """The history's outline, as the parts tell it, is that of the rows."""
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    outline, names = open_run(run.path).history.outline, run.history.site_names
    steps, orders = outline_by_hand(files)
    phases = ("train", "forward", "eval", "failed")
    found = {phase: outline.steps.get(encode_phase(phase), np.empty(0)).tolist() for phase in phases}
    assert found == {phase: steps.get(phase, []) for phase in phases}
    assert {
        name: order for name, order in zip(names, outline.orders.tolist(), strict=False) if order != NO_ORDER
    } == orders


@pytest.mark.parametrize("how", ["written", "merged", "resumed", "compacted", "compacted ranks"])
def test_it_is_what_the_rows_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "merged":
        monkeypatch.setattr(LIMITS, "fan_in", 2)
        monkeypatch.setattr(LIMITS, "group_rows", 7)
    path = write(tmp_path / "run", ranks=3 if how == "compacted ranks" else 1)
    if how == "resumed":
        open_writer(path, resume=True, step=20).close()
    if how.startswith("compacted"):
        monkeypatch.setattr(LIMITS, "compacted_group_rows", 5)
        compact(path)
    for file in list_files(path):
        told = pq.read_metadata(file).metadata
        assert STEPS in told
        assert SITES in told
        footer = pq.read_metadata(file)
        rows = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        assert json.loads(told[STEPS])["rows"] == rows
        check_groups(file)
    check(open_run(path), monkeypatch, list_files(path))


def check_groups(file: Path) -> None:
    """Each row group has the sites that the footer tells."""
    reader = pq.ParquetFile(file)
    told = json.loads(zlib.decompress(base64.b64decode(reader.metadata.metadata[SITES])))
    of_part = set(told["names"]) if told["present"] is None else {told["names"][place] for place in told["present"]}
    for number, places in enumerate(told["groups"]):
        listed = of_part if places is None else {told["names"][place] for place in places}
        assert listed == set(reader.read_row_group(number, columns=["site"])["site"].to_pylist())


def rewrite(file: Path, table: pa.Table, metadata: dict[bytes, bytes] | None) -> None:
    file.unlink()
    pq.write_table(table.replace_schema_metadata(metadata), file)


def describe(run: Path) -> Any:
    history = open_run(run).history
    outline = history.outline
    return (
        history.sites,
        {name: (history[name].steps.tolist(), history[name].rms.tolist()) for name in history.sites},
        {phase: steps.tolist() for phase, steps in outline.steps.items()},
        outline.orders[[history.site_names.index(name) for name in history.sites]].tolist(),
    )


@pytest.mark.parametrize("most", [1 << 20, 0])
def test_files_that_tell_nothing_are_read_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", most)
    path = write(tmp_path / "run")
    expected = describe(path)
    for file in list_files(path):
        rewrite(file, pq.read_table(file, partitioning=None), None)
    assert describe(path) == expected


def test_rows_that_another_tool_took_out_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    path = write(tmp_path / "run")
    for file in list_files(path):
        table = pq.read_table(file, partitioning=None)
        kept = table.filter(pc.not_equal(pc.cast(table["site"], pa.string()), "a:output"))
        rewrite(file, kept.filter(pc.greater(kept["step"], 1)), table.schema.metadata)
    history = open_run(path).history
    assert history.sites == NAMES[1:4]
    assert history.outline.all_steps.tolist() == [number * number for number in range(2, 9)]


def test_opening_reads_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run", ranks=2)
    read: list[Any] = []
    plain = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", lambda *a, **k: read.append(a) or plain(*a, **k))
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    history = open_run(path).history
    assert history.sites == NAMES[:4]
    assert len(history.outline.all_steps) == 9
    assert not read
    assert len(history["a:output"])
    assert read


@given(st.lists(st.sets(st.integers(0, 40), min_size=1), min_size=1, max_size=4))
def test_runs_of_several_parts_are_those_of_all_their_steps(parts: list[set[int]]) -> None:
    joined = join_runs([to_runs(np.array(sorted(steps))) for steps in parts])
    assert from_runs(joined).tolist() == sorted(set().union(*parts))


def test_parts_that_share_a_step_are_one_run() -> None:
    assert join_runs([to_runs(np.arange(low, low + 11)) for low in (10, 0, 20, 10)]).tolist() == [[0, 30, 1]]


def pack(**told: Any) -> bytes:
    known = {"names": ["a", "b"], "orders": [0, 1], "present": None, "groups": [None]}
    return base64.b64encode(zlib.compress(json.dumps({**known, **told}).encode()))


ROWS_OF_ALL = [4]

HOSTILE_STEPS = {
    "more steps than rows": {"rows": ROWS_OF_ALL, "steps": {"train": [[0, 10**12, 1]]}},
    "not rising": {"rows": ROWS_OF_ALL, "steps": {"train": [[5, 6, 1], [0, 1, 1]]}},
    "no gap": {"rows": ROWS_OF_ALL, "steps": {"train": [[0, 1, 0]]}},
    "beyond 64 bits": {"rows": ROWS_OF_ALL, "steps": {"train": [[0, 2**63, 1]]}},
    "overflows": {"rows": ROWS_OF_ALL, "steps": {"train": [[-(2**63), 2**63 - 1, 1]]}},
    "two numbers": {"rows": ROWS_OF_ALL, "steps": {"train": [[0, 1]]}},
    "no such phase": {"rows": ROWS_OF_ALL, "steps": {"traim": [[0, 0, 1]]}},
    "words": {"rows": ROWS_OF_ALL, "steps": {"train": [["0", 1, 1]]}},
    "an empty object": {},
}

HOSTILE_SITES = {
    "other length": pack(orders=[0]),
    "place beyond": pack(present=[2]),
    "place before": pack(groups=[[-1]]),
    "other groups": pack(groups=[None, None]),
    "too large": pack(orders=[0, 2**63]),
    "a number for a name": pack(names=["a", 1]),
    "no base64": b"%%%",
    "no zlib": base64.b64encode(b"abc"),
    "a bomb": base64.b64encode(zlib.compress(b" " * (1 << 27))),
    "nothing": base64.b64encode(zlib.compress(b"{}")),
}


@pytest.mark.parametrize("name", [*HOSTILE_STEPS, *HOSTILE_SITES])
def test_what_is_no_outline_is_told(tmp_path: Path, name: str) -> None:
    writer = open_writer(tmp_path / "run")
    writer.add_rows(make_batch(Moment(0, 0, 0), {site: np.ones(2) for site in range(4)}))
    writer.close()
    [file] = list_files(tmp_path / "run")
    table = pq.read_table(file, partitioning=None)
    is_of_steps = name in HOSTILE_STEPS
    told = {STEPS: json.dumps(HOSTILE_STEPS[name]).encode()} if is_of_steps else {SITES: HOSTILE_SITES[name]}
    rewrite(file, table, {**table.schema.metadata, **told})
    with pytest.raises(DamagedRunError, match=r"part-00000000-00000000\.parquet"):
        open_run(tmp_path / "run")


@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(-30, 30), max_size=60))
def test_runs_stand_for_their_numbers(numbers: list[int]) -> None:
    steps = np.array(sorted(set(numbers)), np.int64)
    runs = to_runs(steps)
    assert count_runs(runs) == len(steps)
    np.testing.assert_array_equal(from_runs(runs), steps)
    np.testing.assert_array_equal(list_steps(np.array(numbers, np.int64)), steps)


def test_even_gaps_are_one_run() -> None:
    assert to_runs(np.arange(0, 10**6, 100)).tolist() == [[0, 999_900, 100]]
