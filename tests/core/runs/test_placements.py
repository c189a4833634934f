"""What ranks hold, as their folders tell it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrograd.core.errors import DamagedRunError
from retrograd.core.runs.placements import Placements, read_placements
from retrograd.core.runs.reader import open_run
from tests.core.history.made import make_steps
from tests.core.runs.written import add_step, open_writer


def write_ranks(path: Path, monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]]) -> None:
    writers = []
    for rank, facts in enumerate(told):
        monkeypatch.setenv("RANK", str(rank))
        writers.append(open_writer(path))
        if facts:
            writers[-1].describe(placements=facts)
        for batch in make_steps(range(3), seed=0):
            add_step(writers[-1], batch)
    for rank, writer in enumerate(writers):
        monkeypatch.setenv("RANK", str(rank))
        writer.close()


def hold(*ranks: int, holds: str = "copy", stage: int | None = None) -> dict[str, Any]:
    sites = {"b:output": {"holds": holds, "ranks": list(ranks)}}
    return {"stages": {} if stage is None else {"": stage}, "sites": sites}


def test_copies_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of ranks are joined, as those of one mesh dimension and those of another are."""
    write_ranks(tmp_path, monkeypatch, [hold(0, 1), hold(0, 1), hold(2, 3), hold(1, 3)])
    run = open_run(tmp_path)
    assert run.history["b:output"].count.tolist() == [8] * 3
    assert run.history["a:output"].count.tolist() == [8 * 4] * 3  # nothing is known of it
    assert run.history.matrix("count", ["b:output"]).values.tolist() == [[8.0] * 3]
    assert run.ranks[2].placements.sites["b:output"]["ranks"] == [2, 3]
    assert "placements" not in run.manifest


def test_summands_and_older_runs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path / "summands", monkeypatch, [hold(0, 1, holds="summand")] * 2)
    write_ranks(tmp_path / "older", monkeypatch, [{}, {}])
    for name, site in (("summands", "b:output.local"), ("older", "b:output")):
        assert open_run(tmp_path / name).history[site].count.tolist() == [16] * 3
    assert not (tmp_path / "older" / "rank00000" / "placements.json").exists()


def test_stages_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path, monkeypatch, [hold(0, stage=0), hold(1, stage=1)])
    history = open_run(tmp_path).history
    for stage in range(2):
        assert history[f"stage{stage}.b:output"].count.tolist() == [8] * 3
        assert [kept.rank for kept in history[f"stage{stage}.a:output"].tensors] == [stage] * 3
    assert "b:output" not in history.sites
    alone = open_run(tmp_path / "rank00001").history
    assert "stage1.b:output" in alone.sites


def test_names_of_stages() -> None:
    one, several = Placements({}, {"": 2}), Placements({}, {"early": 0, "late": 3})
    assert one.rename("self:output.grad") == "stage2:output.grad"
    assert one.rename("0.a#2:output") == "stage2.0.a#2:output"
    assert one.rename("watch/h.grad") == "watch/stage2.h.grad"
    assert several.rename("late.0:weight") == "stage3.late.0:weight"
    assert several.rename("latest:weight") == "latest:weight"


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"stages": {"": "x"}, "sites": {}}', '{"stages": {}, "sites": {"a:output": {"holds": "copy"}}}',
     '{"stages": {}, "sites": {"a:output": []}}', '{"stages": {}, "sites": ' + "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "placements.json").write_text(content)
    with pytest.raises(DamagedRunError, match=r"placements\.json"):
        read_placements(tmp_path)
