from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from retrograd.core.errors import DamagedRunError, NotARunError, RetrogradWarning
from retrograd.core.files import write_json
from retrograd.core.foreign.text import read_json
from retrograd.core.limits import LIMITS
from retrograd.core.runs.reader import open_run
from tests.core.history.made import SITES
from tests.core.runs.written import write_run

PART = "rank00000/statistics/part-00000001-00000001.parquet"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(NotARunError, match="does not exist"):
        open_run(tmp_path / "nothing")
    with pytest.raises(NotARunError, match="is a file"):
        open_run(tmp_path / "file")
    with pytest.raises(NotARunError, match="contains no run"):
        open_run(tmp_path / "folder")


@pytest.mark.parametrize("file", ["manifest.json", "rank00000/rank.json"])
@pytest.mark.parametrize("damage", ["empty", "cut", "rubbish"])
def test_a_damaged_file_is_named(run: Path, file: str, damage: str) -> None:
    whole = (run / file).read_bytes()
    (run / file).write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "rubbish": b"\xff\xfe rubbish"}[damage])
    with pytest.raises(DamagedRunError, match=file):
        open_run(run)


def test_a_part_that_is_damaged_inside_is_named_when_it_is_read(run: Path) -> None:
    content = bytearray((run / PART).read_bytes())
    footer = int.from_bytes(content[-8:-4], "little")
    pages = len(content) - footer - 12
    content[4 + pages // 8 : 4 + pages] = bytes(pages - pages // 8)
    (run / PART).write_bytes(content)
    with pytest.warns(RetrogradWarning, match=PART):
        table = open_run(run).history.table()
    assert set(table["step"].to_pylist()) == {0, 2}


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\xff" * 8 + b"{}"])
def test_a_damaged_shard_is_named(run: Path, content: bytes) -> None:
    (run / "rank00000/tensors/shard-00000001.safetensors").write_bytes(content)
    opened = open_run(run)
    assert len(opened.history["a:output"].rms) == 3
    with pytest.warns(RetrogradWarning, match=r"shard-00000001\.safetensors"):
        assert [kept.step for kept in opened.history["a:output"].tensors] == [0, 2]


def test_a_foreign_table_is_named(run: Path) -> None:
    pq.write_table(pa.table({"step": [1], "site": pa.array(["a"]).dictionary_encode()}), run / PART)
    with pytest.warns(RetrogradWarning, match=r"part-00000001(.|\n)*lacks the columns"):
        opened = open_run(run)
    assert opened.history["a:output"].steps.tolist() == [0, 2]


def test_a_later_format_is_refused(run: Path) -> None:
    write_json(run / "manifest.json", {**read_json(run / "manifest.json"), "format": 99})
    with pytest.raises(DamagedRunError, match="format 99"):
        open_run(run)


def test_files_of_others_are_passed_over(run: Path) -> None:
    for name in ("notes.txt", "rank00000/statistics/README", "rank00000/tensors/x.safetensors", "rankings.csv"):
        (run / name).write_text("not ours")
    opened = open_run(run)
    assert len(opened.history["a:output"].tensors) == len(opened.history["a:output"]) == 3


def test_a_run_without_its_manifest(run: Path) -> None:
    (run / "manifest.json").unlink()
    opened = open_run(run)
    assert opened.manifest == {}
    assert opened.history.sites == SITES


def test_refreshing_keeps_the_history_and_what_was_taken_from_it(run: Path) -> None:
    opened = open_run(run)
    history, series = opened.history, opened.history["a:output"]
    (run / PART).unlink()
    opened.refresh()
    assert opened.history is history
    assert history["a:output"].steps.tolist() == [0, 2]
    assert series.steps.tolist() == [0, 1, 2]


def test_a_short_representation(run: Path) -> None:
    assert repr(open_run(run)).endswith("run', finished, 1 rank, History(5 sites, steps 0…2, 15 rows, 3 events))")


def test_the_manifest_is_part_of_the_history(run: Path) -> None:
    history = open_run(run).history
    assert history.manifest["status"] == "finished"
    assert history.manifest["sites"] == SITES


def _forget_order(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns("order"), path)


def test_a_run_from_before_the_order_was_recorded_opens(run: Path) -> None:
    for path in (run / "rank00000/statistics").iterdir():
        _forget_order(path)
    history = open_run(run).history
    assert set(history.table()["order"].to_pylist()) == {-1}
    assert len(history["a:output"].rms) == 3
    assert set(history["a:output"].rows["order"].tolist()) == {-1}


def test_such_a_run_goes_on_and_its_parts_merge(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "fan_in", 4)
    for path in (run / "rank00000/statistics").iterdir():
        _forget_order(path)
    write_run(run, range(3, 24), resume=True)
    assert len(list((run / "rank00000/statistics").iterdir())) < 24  # some were merged
    table = open_run(run).history.table()
    old = pc.less(table["step"], 3)
    assert set(table.filter(old)["order"].to_pylist()) == {-1}
    assert -1 not in table.filter(pc.invert(old))["order"].to_pylist()
    assert len(set(table["step"].to_pylist())) == 24
