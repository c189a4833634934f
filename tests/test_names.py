"""One thing has one name, whichever tool tells of it and whatever the model is wrapped in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import retrograd as rg
from retrograd.core.errors import GraphError

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, about what enters a compiled part


class Block(nn.Module):
    """An argument by name, and a part that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.act(self.fc(self.act(hidden)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(3, 4)
        self.block = Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.first(x) * self.scale))
        return out


PARAMETERS = {
    "self:scale", "first:weight", "first:bias", "block.fc:weight", "block.fc:bias", "head:weight", "head:bias",
}  # fmt: skip
ARGUMENTS = {"self:input.x", "first:input.input", "block:input.hidden", "block.fc:input.input", "head:input.input"}
MODULES = {"self", "first", "block", "block.fc", "block.act", "head"}


def wrap_part(wrap: Callable[[nn.Module], nn.Module], net: Net) -> nn.Module:
    net.block = wrap(net.block)  # type: ignore[assignment]
    return net


def compile_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def shard(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def shard_both(net: Net) -> nn.Module:
    shard(net.block)
    return shard(net)


compile_eagerly = partial(torch.compile, backend="eager")

OPEN: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda net: net,
    "checkpoint": partial(wrap_part, checkpoint_wrapper),
    "replicas": DistributedDataParallel,
    "replicas of a checkpoint": lambda net: DistributedDataParallel(wrap_part(checkpoint_wrapper, net)),
}
SHARDED: dict[str, Callable[[Net], nn.Module]] = {"shards": shard_both}
COMPILED: dict[str, Callable[[Net], nn.Module]] = {
    "compiled": compile_eagerly,
    "compiled in place": compile_in_place,
    "compiled part": partial(wrap_part, compile_eagerly),
    "compiled replicas": lambda net: compile_eagerly(DistributedDataParallel(net)),
}
ALL = OPEN | SHARDED | COMPILED


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The only process of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.compiler.reset()


def make(wrap: Callable[[Net], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Net())


def find_loss(model: nn.Module) -> Tensor:
    out: Tensor = model(torch.ones(5, 3))
    return out.square().sum()


def parameters_of(named: object) -> set[str]:
    return {node.parameter for node in named if node.parameter is not None}  # type: ignore[attr-defined]


def modules_of(named: object) -> set[str]:
    return {node.module for node in named if node.module is not None}  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrap", ALL.values(), ids=ALL)
def test_recorded_parameters(wrap: Callable[[Net], nn.Module]) -> None:
    model = make(wrap)
    assert {site.name for site in rg.plan_recording(model, sites="*:parameters").sites} == PARAMETERS
    with rg.record(model, sites="*") as recording:
        find_loss(model).backward()
    sites = set(recording.history)
    assert {
        site.removesuffix(".grad") for site in sites if site.endswith(("weight.grad", "bias.grad", "scale.grad"))
    } == PARAMETERS


@pytest.mark.parametrize("wrap", (OPEN | SHARDED).values(), ids=OPEN | SHARDED)
def test_recorded_modules_and_arguments(wrap: Callable[[Net], nn.Module]) -> None:
    with rg.record(model := make(wrap), sites="*") as recording:
        find_loss(model).backward()
    sites = set(recording.history)
    assert {site.partition(":")[0].partition("#")[0] for site in sites if site.endswith(":output")} == MODULES
    assert {site for site in sites if ":input" in site and not site.endswith(".grad")} >= ARGUMENTS


@pytest.mark.parametrize("wrap", COMPILED.values(), ids=COMPILED)
def test_recorded_around_compiled_code(wrap: Callable[[Net], nn.Module]) -> None:
    with rg.record(model := make(wrap), sites="*") as recording:
        find_loss(model).backward()
    told = {site.partition(":")[0].partition("#")[0] for site in recording.history}
    assert {"self", "first", "block.fc", "head"} <= told <= MODULES


def walk_and_trace(model: nn.Module) -> tuple[object, object]:
    """What a walk tells of one pass, and a trace of the next."""
    with rg.record_origins(model) as origins:
        loss = find_loss(model)
        graph = rg.walk(loss, model=model, origins=origins)
    loss.backward()
    with rg.trace(model) as trace:
        find_loss(model).backward()
    return graph, trace.events


@pytest.mark.parametrize("wrap", ALL.values(), ids=ALL)
def test_walked_leaves_and_traced_events(wrap: Callable[[Net], nn.Module]) -> None:
    for named in walk_and_trace(make(wrap)):
        assert parameters_of(named) == PARAMETERS
        assert modules_of(named) <= MODULES


@pytest.mark.parametrize("wrap", OPEN.values(), ids=OPEN)
def test_walked_traced_and_kept_by_module(wrap: Callable[[Net], nn.Module]) -> None:
    graph, events = walk_and_trace(model := make(wrap))
    with rg.take_inventory(model) as inventory:
        find_loss(model).backward()
    ran = MODULES - {"block"}  # which has no operation of its own
    assert modules_of(graph) == modules_of(events) == ran
    assert set(inventory.table["module"].to_pylist()) <= ran | {None}
    kept = set(inventory.table["name"].to_pylist()) & {*PARAMETERS}
    assert kept >= {"self:scale", "block.fc:weight", "head:weight"}


@pytest.mark.parametrize("wrap", OPEN.values(), ids=OPEN)
def test_rewritten(wrap: Callable[[Net], nn.Module]) -> None:
    asked: set[str] = set()

    def note(site: str) -> Callable[[Tensor, object], None]:
        return lambda value, state: asked.add(site)

    sites = [f"{each}.grad" for each in PARAMETERS | (ARGUMENTS - {"self:input.x", "first:input.input"})]
    sites += [f"{each}:output{end}" for each in MODULES for end in ("", ".grad")]
    with rg.rewrite(model := make(wrap), {site: note(site) for site in sites}):
        find_loss(model).backward()
    assert asked == {*sites}


@pytest.mark.parametrize("wrap", OPEN.values(), ids=OPEN)
def test_checked_for_the_adjoint(wrap: Callable[[Net], nn.Module]) -> None:
    check = rg.check_adjoint(make(wrap), torch.ones(5, 3))
    assert {str(each.site).replace("#2", "") for each in check} == PARAMETERS | ARGUMENTS | {"block.act:input.input"}


def test_a_part_that_is_called_by_itself_first_has_its_name_in_the_model() -> None:
    net = Net()
    with rg.record_origins() as origins:
        net.head(torch.ones(5, 4))
        loss = find_loss(net)
    assert parameters_of(node for node in rg.walk(loss, origins=origins) if node.is_leaf) == PARAMETERS


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
    leaf = torch.randn(3, requires_grad=True)
    rg.watch("leaf", leaf)
    held = weakref.ref(leaf)
    del leaf
    assert held() is None
