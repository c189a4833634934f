"""Models inside wrappers: sites have the names that they have without, and are recorded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.recording.record import record
from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row, listen

NAMES = {f"{path}:output{tail}" for path in ("0", "1", "2", "self") for tail in ("", ".grad")} | {
    f"{path}:{slot}.{quantity}" for path in ("0", "2") for slot in ("weight", "bias") for quantity in ("grad", "update")
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel() -> None:
    net = make_net()
    wrapped = DistributedDataParallel(net)
    with listen(net) as oracle, collect(wrapped) as seen:
        train(wrapped)
    assert set(seen.sites()) == NAMES
    assert {(row.step, row.micro, row.phase, row.calls) for row in seen.rows} == {
        (0, 0, "train", 1),
        (1, 0, "train", 1),
    }
    for path in ("0", "2", "self"):
        assert_row(seen.one(f"{path}:output", step=1), oracle.values[path][1])
        assert_row(seen.one(f"{path}:output.grad", step=1), oracle.gradients[path][1][0])
    assert not seen.facts["not_recorded"]


@pytest.mark.usefixtures("process_group")
def test_accumulation_under_no_sync() -> None:
    net = DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net) as seen:
        with net.no_sync():
            net(torch.randn(5, 3)).sum().backward()
        net(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    assert [(row.step, row.micro) for row in seen.all("0:output.grad")] == [(0, 0), (0, 1)]
    assert [(row.step, row.micro) for row in seen.all("0:weight.grad")] == [(0, 0), (0, 1)]


@pytest.mark.usefixtures("process_group")
def test_a_part_that_is_wrapped() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)))
            self.head = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.trunk(x))

    net = Model()
    with collect(net) as seen:
        train(net)
    assert {"trunk:output", "trunk.0:output.grad", "trunk.0:weight.update", "head:output"} <= set(seen.sites())
    assert not [name for name in seen.names if "module" in name]


def test_activation_checkpoint_wrappers() -> None:
    net = make_net()
    plain = make_net()
    net[0] = checkpoint_wrapper(net[0])
    x = torch.randn(5, 3)
    with listen(plain) as oracle:
        plain(x).square().sum().backward()
    with collect(net) as seen:
        net(x).square().sum().backward()
    assert {name for name in seen.sites() if "update" not in name} == {name for name in NAMES if "update" not in name}
    assert_row(seen.one("0:output"), oracle.values["0"][0])
    assert_row(seen.one("0:output.grad"), oracle.gradients["0"][0][0])


def test_a_compiled_model_has_the_names_of_the_plain_one() -> None:
    net = make_net()
    wrapped = torch.compile(net, backend="eager")
    with collect(wrapped) as seen:
        train(wrapped)
    assert {"self:output", "0:output.grad", "0:weight.grad", "2:bias.update"} <= set(seen.sites())
    assert not [name for name in seen.names if "_orig_mod" in name]


def test_a_model_that_is_compiled_in_place_is_recorded_and_left_as_it_was() -> None:
    bare, net = make_net(), make_net()
    for each in (bare, net):
        each.compile(backend="eager")
    compiled = net._compiled_call_impl
    x = torch.randn(4, 3)
    with collect(net) as seen:
        for _ in range(2):
            for each in (bare, net):
                each(x).square().mean().backward()
    assert {"self:output", "self:output.grad", "0:weight.grad"} <= set(seen.sites())
    assert all(map(torch.equal, (p.grad for p in net.parameters()), (p.grad for p in bare.parameters())))
    net(x)
    assert net._compiled_call_impl is compiled
    with pytest.raises(RuntimeError, match=r"shape|reduction dim"):
        net(torch.randn(1, 1))


def test_a_compiled_part() -> None:
    net = make_net()
    net[0].compile(backend="eager")
    with collect(net) as seen:
        train(net)
    assert set(seen.sites()) == NAMES


def train_stage(net: nn.Module, in_vain: int) -> list[Tensor]:
    """Train a stage for one step of two micro-batches; returns the losses, the first of which are NaN."""
    losses: list[Tensor] = []

    def loss_of(out: Tensor, target: Tensor) -> Tensor:
        losses.append((out - target).square().mean() * (torch.nan if len(losses) < in_vain else 1.0))
        return losses[-1]

    schedule = ScheduleGPipe(PipelineStage(net, 0, 1, torch.device("cpu")), 2, loss_fn=loss_of)
    schedule.step(torch.randn(4, 3), target=torch.randn(4, 1))
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return losses


@pytest.mark.usefixtures("process_group")
def test_what_a_stage_of_a_pipeline_runs_for_the_shapes_alone() -> None:
    """torch runs it on memory that nobody has written to, so that its loss may be NaN; torch 2.11 asks for none."""
    in_vain = len(train_stage(make_net(), 0)) - 2
    assert in_vain in (0, 1)
    net = make_net()
    with record(net) as recording:
        losses = train_stage(net, in_vain)
    history = recording.history
    assert not [event for event in history.few_events if event.kind == "nonfinite"]
    assert history.loss.values.tolist() == pytest.approx([torch.stack(losses[in_vain:]).mean().item()])
    assert history["0#1:output"].count.tolist() == [8]
    assert "0#3:output" not in history
    assert history.manifest["split"] == {"ranks": [], "stages": {"": 0}}
