"""One name for one parameter: in recordings, rules, walks, traces, inventories, checks; under wrappers too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import retrograd as rg
from retrograd.core.errors import GraphError

NAMES = ["body.0:bias", "body.0:weight", "head:bias", "head:weight", "self:scale"]


class DistributedDataParallel(nn.Module):
    """Is called like torch's, and wraps in the same way; its group is of one process, so no other is needed."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.process_group = SimpleNamespace(size=lambda: 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Net(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        first = nn.Linear(3, 3)
        self.body = nn.Sequential(checkpoint_wrapper(first) if checkpointed else first, nn.Tanh())
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale


WRAPPERS = {
    "bare": lambda: Net(),
    "compiled": lambda: torch.compile(Net(), backend="eager"),
    "ddp": lambda: DistributedDataParallel(Net()),
    "checkpointed": lambda: Net(checkpointed=True),
    "compiled ddp": lambda: torch.compile(DistributedDataParallel(Net()), backend="eager"),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_name_in_all_tools(wrapper: str) -> None:
    net = WRAPPERS[wrapper]()
    x = torch.randn(4, 3)
    with rg.record(net, sites="*:parameters.grad") as recording:
        net(x).sum().backward()
    loss = net(x).sum()
    walked = [node.parameter for node in rg.walk(loss, model=net) if node.is_leaf]
    with rg.trace(net) as trace:
        loss.backward()
    traced = [event.parameter for event in trace.events if event.number is None]
    checked = rg.check_adjoint(net, x, "*:parameters")
    rules = [each.removesuffix(".grad") for each in recording.history.sites]
    assert sorted(rules) == NAMES
    assert sorted(map(str, walked)) == NAMES
    assert sorted(set(map(str, traced))) == NAMES
    assert {str(row.site) for row in checked.rows} <= set(NAMES)
    assert sorted(site.name for site in rg.plan_recording(net, sites="*:parameters").sites) == NAMES
    inventory = rg.take_inventory(net, x)
    named = {row["name"] for row in inventory.table.to_pylist() if row["kind"] in ("parameter", "parameter view")}
    assert named <= set(NAMES)
    assert "self:scale" in named
    seen: list[str] = []
    with rg.rewrite(
        net,
        {"*:parameters.grad": lambda gradient, state: seen.append(state.site)},
    ):
        net(x).sum().backward()
    assert sorted(name.removesuffix(".grad") for name in seen) == NAMES


def test_a_part_that_is_called_by_itself_first_has_its_name_in_the_model() -> None:
    net, x = Net(), torch.randn(4, 3)
    with rg.record_origins() as origins:
        net.head(x)
        loss = net(x).sum()
    assert sorted(str(node.parameter) for node in rg.walk(loss, origins=origins) if node.is_leaf) == NAMES


def test_leaves_have_the_names_that_they_were_given_or_watched_by() -> None:
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    assert rg.watch("a", a) is a
    rg.watch("state", {"b": [b], "sum": a + b})
    loss = (a * b * c).sum()
    assert {node.parameter for node in rg.walk(loss) if node.is_leaf} == {"watch/a", "watch/state:b.0", None}
    named = rg.walk(loss, names={"c": c, "mine": a})
    assert {node.parameter for node in named if node.is_leaf} == {"mine", "watch/state:b.0", "c"}
    with rg.trace(names={"c": c}) as trace:
        loss.backward()
    assert {event.parameter for event in trace.events if event.number is None} == {"watch/a", "watch/state:b.0", "c"}
    with pytest.raises(GraphError, match="names a list"):
        rg.walk((a * b).sum(), names={"a": [a]})  # type: ignore[dict-item]


def test_a_watched_leaf_is_not_held() -> None:
    import weakref

    leaf = torch.randn(3, requires_grad=True)
    rg.watch("leaf", leaf)
    held = weakref.ref(leaf)
    del leaf
    assert held() is None
