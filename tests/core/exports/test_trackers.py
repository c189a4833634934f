"""What trackers were given is what their own libraries read back, and what the run says itself."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import wandb
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import retrograd as rg
from retrograd.core.exports.export import SCALARS
from tests.core.exports.offline import read_records, read_series


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rg.Run:
    """A run with micro-batches, a module that is called twice, a layer that dies, a loss that becomes NaN."""
    torch.manual_seed(0)
    shared, last = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleDict({"a": shared, "b": last})
    model.forward = lambda x: last(shared(shared(x)))  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, tmp_path_factory.mktemp("runs") / "odd name", statistics=[largest]) as recording:
        for step in range(7):
            optimizer.zero_grad()
            for _ in range(2):
                (model(torch.randn(3, 4)).square().mean() * (float("nan") if step == 6 else 1)).backward()
            optimizer.step()
    assert recording.run is not None
    assert rg.explain(recording)
    return recording.run


@pytest.fixture(scope="module", autouse=True)
def nothing_of_theirs_runs_on() -> Iterator[None]:
    """The service of W&B, and the thread that talks to it, end with these tests."""
    yield
    wandb.teardown()


def largest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().amax()


def expect(run: rg.Run) -> dict[str, dict[int, float]]:
    """Names and values, from the series themselves."""
    history = run.history
    scalars = history.scalars.items()
    expected = {name: dict(zip(curve.steps.tolist(), curve.values, strict=True)) for name, curve in scalars}
    for site in history.sites:
        for statistic in (*SCALARS, "largest"):
            if statistic != "update_ratio" or site.endswith(".update"):
                series = history[site]
                values = series.statistic(statistic)
                expected[f"{statistic}/{site}"] = dict(zip(series.steps.tolist(), values, strict=True))
    assert len(expected) > 50
    assert any("#2" in name for name in expected)
    return expected


def check_same(found: Mapping[str, Mapping[int, Any]], expected: dict[str, dict[int, float]], digits: float) -> None:
    assert {name: list(values) for name, values in found.items()} == {
        name: list(values) for name, values in expected.items()
    }
    for name, values in expected.items():
        read = [float(value) for value in found[name].values()]
        np.testing.assert_allclose(read, list(values.values()), rtol=digits, err_msg=name)


def export_quietly(run: rg.Run, to: str, folder: Path) -> Path:
    """Export, and see that nothing of the process has changed."""
    before = see_process()
    path = rg.export(run, to, folder / to)
    assert before == see_process()
    return path


def see_process() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist(), sys.exit, sys.excepthook, sys.stdout, sys.stderr


def test_parquet(run: rg.Run, tmp_path: Path) -> None:
    table = pandas.read_parquet(rg.export(run, "parquet", tmp_path / "all.parquet"))
    expected = run.history.to_pandas()[list(table)]
    pandas.testing.assert_frame_equal(table, expected, check_dtype=False, check_categorical=False)
    assert rg.export(run, "parquet") == run.path / "statistics.parquet"
    assert rg.open_run(run.path).history.rows.count == len(table)  # it is not taken for a part of the run


def test_findings_of_tensorboard(run: rg.Run, tmp_path: Path) -> None:
    board = EventAccumulator(str(export_quietly(run, "tensorboard", tmp_path)), {"tensors": 0, "scalars": 0}).Reload()
    found = {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in board.Tags()["scalars"]}
    check_same(found, expect(run), 1e-6)
    for finding in rg.explain(run):
        texts = [
            e.tensor_proto.string_val[0].decode() for e in board.Tensors(f"findings/{finding.detector}/text_summary")
        ]
        assert any(finding.message in text and finding.severity in text for text in texts)


def test_wandb(run: rg.Run, tmp_path: Path) -> None:
    records = read_records(export_quietly(run, "wandb", tmp_path))
    series = read_series(records)
    histograms = {name: series.pop(name) for name in list(series) if name.startswith("exponents/")}
    ours = {name: values for name, values in series.items() if name != "step" and not name.startswith("_")}
    check_same(ours, expect(run), 1e-12)
    for site in run.history.sites:
        steps, counts = run.history[site].exponents
        for step, count in zip(steps.tolist(), counts, strict=True):
            used = np.flatnonzero(count)
            if not len(used):
                assert step not in histograms.get(f"exponents/{site}/bins", {})
                continue
            assert histograms[f"exponents/{site}/bins"][step] == list(range(used[0] - 127, used[-1] - 125))
            assert histograms[f"exponents/{site}/values"][step] == count[used[0] : used[-1] + 1].tolist()
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    findings = rg.explain(run)
    assert len(alerts) == len(findings)
    assert all(finding.message in alert.text for finding, alert in zip(findings, alerts, strict=True))
    (started,) = {record.run.display_name for record in records if record.WhichOneof("record_type") == "run"}
    assert started == "odd name"


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's own
def test_mlflow(run: rg.Run, tmp_path: Path) -> None:
    path = export_quietly(run, "mlflow", tmp_path)
    client = MlflowClient(f"sqlite:///{path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("retrograd")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("odd name", "FINISHED")
    expected = {name.replace("#", "_"): values for name, values in expect(run).items()}
    assert found.data.metrics.keys() == expected.keys()
    some = {name: values for number, (name, values) in enumerate(expected.items()) if number % 10 == 0}
    read = {name: {m.step: m.value for m in client.get_metric_history(found.info.run_id, name)} for name in some}
    check_same(read, some, 1e-12)
    for finding in rg.explain(run):
        assert finding.message in found.data.tags[f"finding.{finding.detector}"]
        assert finding.message in found.data.tags["mlflow.note.content"]  # the description
