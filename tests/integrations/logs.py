"""What trainers' loggers have written, read back by the libraries of TensorBoard and of W&B."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.exports.offline import read_records


class Breaks:
    """Makes the weights of a model infinite as soon as so many batches have gone through it, once."""

    def __init__(self, after: int) -> None:
        self.after, self.seen = after, 0

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        self.seen += 1
        if self.seen == self.after + 1:
            with torch.no_grad():
                next(module.parameters()).fill_(float("inf"))


def read_board(folder: Path, name: str = "retrograd/critical") -> tuple[dict[int, float], dict[int, str]]:
    """The number of critical findings, and the texts, each by the step at which TensorBoard was told."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (path,) = {each.parent for each in folder.rglob("events.out*")}
    events = EventAccumulator(str(path)).Reload()
    texts = events.Tensors("retrograd/findings/text_summary")
    numbers = {each.step: each.value for each in events.Scalars(name)}
    return numbers, {each.step: each.tensor_proto.string_val[0].decode() for each in texts}


def read_alerts(folder: Path) -> list[str]:
    """The titles of the alerts of the one offline run of W&B."""
    records = read_records(folder)
    return [record.alert.title for record in records if record.WhichOneof("record_type") == "alert"]


@contextmanager
def offline(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """A run of W&B goes to this folder, and is ended with all that the library has started."""
    wandb: Any = pytest.importorskip("wandb")
    exits = sys.exit, sys.excepthook
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"MODE": "offline", "DIR": str(folder), "CONSOLE": "off", "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    wandb.finish()
    wandb.teardown()
    sys.exit, sys.excepthook = exits  # which it never gives back
