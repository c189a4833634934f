"""``rg.record`` as users call it: in memory, into a folder, and on again after a restart."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import CallError, RecordingError, RunExistsError
from retrograd.core.runs.reader import open_run


def make_net() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def test_in_memory_the_history_can_be_read_while_it_grows() -> None:
    net, optimizer = make_net()
    with rg.record(net) as recording:
        assert recording.history.sites[0] == "0:weight.grad"
        for step in range(3):
            assert recording.step == step
            train(net, optimizer)
            assert recording.history["0:output.grad"].steps.tolist() == list(range(step + 1))
            assert recording.step == step + 1
    history = recording.history
    gradient = history["2:output.grad"]
    assert gradient.value.steps.tolist() == gradient.steps.tolist() == [0, 1, 2]
    assert history.loss.steps.tolist() == [0, 1, 2]
    assert repr(recording) == "<Recording in memory, step 3>"


def test_history_in_the_middle_of_a_step_is_up_to_the_last_whole_one() -> None:
    net, optimizer = make_net()
    with rg.record(net) as recording:
        train(net, optimizer)
        out = net(torch.randn(5, 3)).sum()
        assert recording.history["0:output"].steps.tolist() == [0]
        out.backward()
        assert recording.history["0:output"].steps.tolist() == [0]
        optimizer.step()
        assert recording.history["0:output"].steps.tolist() == [0, 1]


def test_without_with() -> None:
    net, optimizer = make_net()
    recording = rg.record(net)
    train(net, optimizer)
    recording.close()
    recording.close()
    train(net, optimizer)
    assert recording.history["0:output"].steps.tolist() == [0]


def test_a_recording_that_has_ended_is_not_entered_again() -> None:
    with rg.record(nn.Linear(2, 1)) as recording:
        pass
    with pytest.raises(RecordingError, match="has ended"):
        recording.__enter__()  # nothing would be recorded


def test_into_a_folder(tmp_path: Path) -> None:
    net, optimizer = make_net()
    with rg.record(net, tmp_path / "run", tensors="0:output") as recording:
        train(net, optimizer, steps=2)
        assert recording.history["0:output.grad"].steps.tolist() == [0, 1]
    history = open_run(tmp_path / "run").history
    assert history["0:output.grad"].rms.tolist() == recording.history["0:output.grad"].rms.tolist()
    assert [kept.step for kept in history["0:output"].tensors] == [0, 1]
    assert recording.path == tmp_path / "run"
    with pytest.raises(RunExistsError, match=r"run-\{date\}") as taken:
        rg.record(net, tmp_path / "run")
    files = [Path(frame.filename).name for frame in traceback.extract_tb(taken.value.__traceback__)]
    assert files[0] == Path(__file__).name
    assert set(files[1:]) <= {"guesses.py"}  # none of the way down to it


def test_a_name_with_date_is_a_new_folder_each_time(tmp_path: Path) -> None:
    net, optimizer = make_net()
    recordings = [rg.record(net, tmp_path / "deep" / "mine-{date}") for _ in range(3)]  # within a second
    train(net, optimizer)
    paths = [recording.path for recording in recordings]
    for recording in recordings:
        recording.close()
        assert recording.path is not None
        assert re.fullmatch(r"mine-\d{8}-\d{6}(-\d)?", recording.path.name)
        assert open_run(recording.path).history["0:output"].steps.tolist() == [0]
    assert set(paths) == set((tmp_path / "deep").iterdir())
    with pytest.raises(CallError, match="nothing can be gone on with"):
        rg.record(net, tmp_path / "mine-{date}", resume=True)
    assert not list(tmp_path.glob("mine*"))


def test_ranks_do_not_each_take_a_time_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(CallError, match="another folder on each rank"):
            rg.record(nn.Linear(2, 1), tmp_path / "{date}", ranks=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by_state", [False, True])
def test_a_training_that_starts_again_goes_on_recording(tmp_path: Path, by_state: bool) -> None:
    net, optimizer = make_net()
    with rg.record(net, tmp_path / "run") as recording:
        train(net, optimizer, steps=3)
        checkpoint: dict[str, Any] = recording.state_dict()
        train(net, optimizer, steps=2)  # of no avail: the checkpoint was before
    assert checkpoint == {"step": 3}
    with rg.record(net, tmp_path / "run", resume=checkpoint if by_state else True) as recording:
        assert recording.step == (3 if by_state else 5)
        train(net, optimizer, steps=2)
    history = open_run(tmp_path / "run").history
    steps = list(range(5 if by_state else 7))
    for site in ("0:output", "0:output.grad", "2:weight.update"):
        assert history[site].steps.tolist() == steps
        assert history[site].rows["calls"].tolist() == [1] * len(steps)
    assert history.loss.steps.tolist() == steps


def test_two_recordings_of_one_model_are_alike() -> None:
    net, optimizer = make_net()
    with rg.record(net) as first, rg.record(net, sites="*:output*") as second:
        train(net, optimizer, steps=2)
    for site in second.history.sites:
        assert first.history[site].rms.tolist() == second.history[site].rms.tolist()


def test_all_hooks_are_gone_afterwards_and_the_users_are_left() -> None:
    net, optimizer = make_net()
    calls = []
    mine = net[0].register_forward_hook(lambda module, args, output: calls.append("forward"))
    net[0].weight.register_hook(lambda gradient: calls.append("gradient"))
    recording = rg.record(net, sites=["*:output*", "*:input*", "*:weight*"])
    train(net, optimizer)
    out = net(torch.randn(2, 3))
    with pytest.raises(ZeroDivisionError), recording:
        raise ZeroDivisionError
    assert [len(module._forward_hooks) for module in net.modules()] == [0, 1, 0, 0]
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert [len(parameter._backward_hooks or ()) for parameter in net.parameters()] == [1, 0, 0, 0]
    calls.clear()
    out.sum().backward()
    net(torch.randn(2, 3))
    assert calls == ["gradient", "forward"]
    mine.remove()
