"""A recording that is displayed in a notebook is kept up to date there; training does not know of it."""

from __future__ import annotations

import gc
import inspect
import json
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import retrograd as rg
from retrograd.core.errors import RetrogradWarning
from retrograd.core.history.sink import Event, Moment
from retrograd.core.limits import LIMITS
from retrograd.core.runs.findings import Finding
from tests.drawing import draw, make_net, train

pytest.importorskip("IPython")

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display as ipython_display
from traitlets.config import Config

display: Callable[[object], None] = ipython_display


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "flush_seconds", 0.01)
    monkeypatch.setattr(LIMITS, "look_share", 10.0)


class Screen:
    """What IPython was given to show."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.publisher: Any = CapturingDisplayPublisher()  # type: ignore[no-untyped-call]
        shell.display_pub = self.publisher

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return list(self.publisher.outputs)

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [output for output in self.outputs if output.get("update")]

    @property
    def texts(self) -> list[str]:
        return [output["data"]["text/plain"] for output in self.outputs]

    @property
    def ids(self) -> set[str]:
        return {output["transient"]["display_id"] for output in self.outputs}

    def wait_for(self, wanted: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not wanted() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert wanted()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Screen]:
    """A shell in this process whose publisher keeps what it is given."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell puts its own there
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield Screen(shell)
    InteractiveShell.clear_instance()


@pytest.mark.parametrize("is_on_disk", [True, False])
def test_it_follows_and_ends_with_all_of_it(screen: Screen, tmp_path: Path, *, is_on_disk: bool) -> None:
    model = make_net()
    with rg.record(model, tmp_path / "run" if is_on_disk else None) as recording:
        display(recording)
        assert screen.texts == ["running, no step yet, loss not known"]
        train(model)
        screen.wait_for(lambda: "running, step " in screen.texts[-1])
        losses = train(model)
    assert len(screen.ids) == 1
    assert [output.get("update") for output in screen.outputs].count(True) == len(screen.outputs) - 1 >= 2
    last = screen.updates[-1]["data"]
    assert last["text/plain"].startswith("finished, step 23, ")
    assert f"loss {losses[-1]:.3g}" in last["text/plain"]
    for word in ("finished", f"{losses[-1]:.3g}", "changed most"):
        assert word in last["text/html"]
    assert any(site in last["text/html"] for site in recording.history.sites)
    assert (str(tmp_path / "run") in last["text/html"]) == is_on_disk


def test_training_is_bitwise_the_same(screen: Screen, tmp_path: Path) -> None:
    model = make_net()
    plain = train(model, 30), [p.clone() for p in model.parameters()], torch.rand(1), random.random(), draw()
    model = make_net()
    with rg.record(model, tmp_path / "run") as recording:
        display(recording)
        losses = train(model, 30, each=lambda: time.sleep(0.02))
        screen.wait_for(lambda: screen.updates)
    with rg.record(model) as again:  # in memory there is something new at every look
        display(again)
        before = len(screen.updates)
        model.load_state_dict(make_net().state_dict())
        assert train(model, 30, each=lambda: time.sleep(0.02)) == losses == plain[0]
        drawn = torch.rand(1), random.random(), draw()
        assert len(screen.updates) > before + 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain[1], strict=True))
    assert drawn == plain[2:]


def test_a_failing_step_is_told(screen: Screen) -> None:
    model = make_net()
    with pytest.raises(RuntimeError), rg.record(model) as recording:
        display(recording)
        train(model, 3)
        model(torch.randn(1, 5))
    assert screen.texts[-1].startswith("failed, step 2")


def test_wherever_it_is_displayed_it_is_one_and_after_the_end_it_rests(screen: Screen) -> None:
    model = make_net()
    with rg.record(model) as recording:
        for _ in range(5):
            display(recording)
        assert sum(thread.name == "retrograd-lookout" for thread in threading.enumerate()) == 1
        train(model)
    shown = len(screen.outputs)
    display(recording)
    assert len(screen.outputs) == shown + 1
    assert screen.texts[-1].startswith("finished, step 11")
    closed = rg.record(model)
    closed.close()
    display(closed)
    assert screen.texts[-1].startswith("finished, no step")
    assert len(screen.ids) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("retrograd")]


def test_it_keeps_nothing_alive(screen: Screen) -> None:
    model = make_net()
    recording = rg.record(model)
    display(recording)
    train(model)
    recording.close()
    left = weakref.ref(model), weakref.ref(recording), weakref.ref(recording.history)
    assert screen.updates
    del model, recording
    ends = time.monotonic() + 10  # a thread that draws may be in its last look
    while any(each() is not None for each in left) and time.monotonic() < ends:
        gc.collect()
        time.sleep(0.01)
    assert [each() for each in left] == [None] * 3


def test_a_display_that_fails_later_is_told_once(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    model, failures = make_net(), []

    def fail(*_: Any, **__: Any) -> None:
        failures.append(threading.current_thread().name)
        raise ConnectionError("nobody listens")

    with pytest.warns(RetrogradWarning, match="nobody listens") as told, rg.record(model) as recording:
        display(recording)
        monkeypatch.setattr(screen.publisher, "publish", fail)
        while len(failures) < 3:
            train(model, 2)
            time.sleep(0.01)
    assert len(told) == 1
    assert set(failures) == {"retrograd-lookout"}
    assert recording.history.loss.steps[-1] >= 5


def test_one_that_fails_at_once_leaves_the_text(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.core.views.notebook.live.glance_at", lambda record: 1 / 0)
    with rg.record(make_net()) as recording:
        formatter: Any = screen.shell.display_formatter
        with pytest.warns(RetrogradWarning, match="could not show a recording in the notebook: ZeroDivisionError"):
            formatted, _ = formatter.format(recording, include={"text/plain"})
        assert formatted == {"text/plain": repr(recording)}
        assert not [thread for thread in threading.enumerate() if thread.name == "retrograd-lookout"]


def test_of_a_long_record_what_was_said_is_shown(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "explained_rows", -1)
    finding = Finding(detector="d", severity="critical", message="it burns", site="0:weight")
    with rg.record(make_net()) as recording:
        recording.history.add_event(Event(Moment(0), "finding", text=json.dumps(finding.as_dict())))
        display(recording)
    assert "it burns" in screen.outputs[0]["data"]["text/html"]


def test_a_console_of_ipython_prints_the_text(screen: Screen) -> None:
    formatter: Any = screen.shell.display_formatter
    formatter.active_types = ["text/plain"]  # as the shell of a terminal has it
    with rg.record(make_net()) as recording:
        display(recording)
        assert screen.texts == [repr(recording)]
        assert not [thread for thread in threading.enumerate() if thread.name == "retrograd-lookout"]


def test_ipython_is_not_loaded_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "IPython"]:
        monkeypatch.delitem(sys.modules, name)
    with rg.record(make_net()) as recording, pytest.raises(NotImplementedError):
        recording._ipython_display_()
    assert "IPython" not in sys.modules


CELLS = (
    """
    import hashlib, random, time, torch
    from torch import nn
    import retrograd as rg

    def make():
        torch.manual_seed(0)
        random.seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def train(model, steps, pause=0.0):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(5, 4)).square().mean() * (1 + random.random())).backward()
            optimizer.step()
            time.sleep(pause)
        return [p.tolist() for p in model.parameters()], random.random(), torch.rand(1).item()

    plain = train(make(), 60)
    model = make()
    recording = rg.record(model)
    recording
    """,
    """
    print(train(model, 60, 0.12) == plain)
    """,
    """
    recording.close()
    import threading
    print([thread.name for thread in threading.enumerate() if "retrograd" in thread.name])
    """,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of the libraries that run kernels are theirs
def test_a_kernel_shows_it_while_another_cell_trains() -> None:
    nbclient: Any = pytest.importorskip("nbclient")
    nbformat: Any = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    updates: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc]  # it is not known before
        def process_message(self, message: Any, cell: Any, cell_index: int) -> Any:
            if message["msg_type"] == "update_display_data":
                updates.append(message["content"]["data"]["text/plain"])
            return super().process_message(message, cell, cell_index)

    v4 = nbformat.v4
    notebook = v4.new_notebook(cells=[v4.new_code_cell(inspect.cleandoc(cell)) for cell in CELLS])
    Client(notebook, timeout=240, kernel_name="python3").execute()
    shown, trained, closed = (cell.outputs for cell in notebook.cells)
    assert [output.output_type for output in shown] == ["display_data"]
    assert "finished, step 59" in shown[0].data["text/html"]
    assert [output.text for output in (*trained, *closed)] == ["True\n", "[]\n"]
    assert len({text for text in updates if text.startswith("running, step ")}) >= 2
    assert updates[-1].startswith("finished, step 59")
