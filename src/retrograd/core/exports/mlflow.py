"""MLflow: numbers as metrics, findings as tags; it has no histograms."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from retrograd.core.exports.tracker import OURS, Exponents, write_finding
from retrograd.core.libraries import library_needed
from retrograd.core.runs.findings import Finding

with library_needed("mlflow-skinny", "3", "trackers"):
    import mlflow
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

_MOST_AT_ONCE = 1000
_LONGEST_NAME = 250
_LONGEST_TAG = 5000
"""What the server takes."""

_DESCRIPTION = "mlflow.note.content"
"""The tag that the page of a run shows as text."""

_STRANGE = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowRun:
    """A run of a client of its own: the run that the program has active is left alone.

    Args:
        client: of the store.
        run: the identity of the run.
        home: what names begin with.
        is_ours: it is ended with :meth:`close`.
    """

    keeps_last_step = False

    def __init__(self, client: MlflowClient, run: str, home: str = "", *, is_ours: bool = True) -> None:
        self.place = f"mlflow ui --backend-store-uri {client.tracking_uri}"
        self._home = home
        self._is_ours = is_ours
        self._client = client
        self._run = run
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        self._tags: dict[str, str] = {}

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [Metric(self._fit(f"{self._home}{name}"), value, now, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST_AT_ONCE])

    def add_histogram(self, step: int, name: str, exponents: Exponents) -> None:
        """Do nothing: there is nothing that would take it."""

    def add_finding(self, finding: Finding) -> None:
        name = f"{self._home}finding.{finding.detector}"
        text = f"{finding.severity}: {write_finding(finding)}"
        self._tags[name] = "\n\n".join(filter(None, (self._tags.get(name), text)))[:_LONGEST_TAG]
        self._client.set_tag(self._run, name, self._tags[name])
        if self._is_ours:
            self._client.set_tag(self._run, _DESCRIPTION, "\n\n".join(self._tags.values())[:_LONGEST_TAG])

    def close(self, status: str) -> None:
        if self._is_ours:
            self._client.set_terminated(self._run, "FINISHED" if status == "finished" else "FAILED")

    def _fit(self, name: str) -> str:
        """A name that a server takes, and that no other one has."""
        if name not in self._names:
            plain = fitted = _STRANGE.sub("_", name)[:_LONGEST_NAME]
            for number in count(2):
                if fitted not in self._taken:
                    break
                fitted = f"{plain[: _LONGEST_NAME - 8]}_{number}"
            self._taken.add(fitted)
            self._names[name] = fitted
        return self._names[name]


def open_tracker(name: str, folder: Path, sends: bool) -> MlflowRun:
    """Open one of the experiment ``retrograd``: where the program's own are if it is sent, else in ``mlflow.db``."""
    if sends and mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
        client = MlflowClient()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    found = client.get_experiment_by_name("retrograd")
    number = client.create_experiment("retrograd") if found is None else found.experiment_id
    return MlflowRun(client, client.create_run(number, run_name=name).info.run_id)


def use_tracker(run: Run) -> MlflowRun:
    """Add to a run of the program."""
    return MlflowRun(MlflowClient(), run.info.run_id, OURS, is_ours=False)
