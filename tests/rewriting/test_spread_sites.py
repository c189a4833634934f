"""Rules on activations and values of parameters under tensor parallelism and the older FSDP, and what is recorded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import CannotRewriteError, RetrogradWarning
from retrograd.core.recording.record import record
from retrograd.core.runs.reader import open_run
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm, SkipStep, ZClip
from retrograd.rewriting.rules.elements import Centralise, ClipValue, Grokfast, Scale
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.processes import Work, run_in_two
from tests.rewriting.models import make_net
from tests.rewriting.test_spread import batch, damp, loss_of, share_of, whole

pytestmark = pytest.mark.slow

STEPS = 3


def divide(value: Tensor, state: SiteState) -> Tensor:
    """Needs the whole, and has a derivative."""
    return value / (1 + value.norm()) + value.mean()


def train(model: nn.Module, rules: Any, share: Any = lambda x: x) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with rewrite(model, rules):
        for step in range(STEPS):
            optimizer.zero_grad()
            out = model(share(batch(step, 0)))
            loss_of(out.full_tensor() if hasattr(out, "full_tensor") else out, step).backward()
            optimizer.step()
    return {name.replace("_fsdp_wrapped_module.", ""): each for name, each in whole(model).items()}


# ---- tensor parallelism ----

SPREAD_RULES: dict[str, dict[str, Any]] = {
    "output.grad": {"0:output.grad": damp, "1:output.grad": ClipNorm(0.02), "2:output.grad": ClipValue(0.01)},
    "elements.grad": {"0:output.grad": Grokfast(0.9), "1:output.grad": Centralise()},
    "input.grad": {"2:input.input.grad": [damp, ClipNorm(0.02)]},
    "output": {"0:output": divide, "1:output": ClipNorm(0.5), "2:output": Scale(0.5)},
    "input": {"2:input.input": [Scale(0.7), divide]},
    "weight": {"0:weight": divide, "2:weight": ClipNorm(0.5), "2:bias": Scale(0.5)},
}


def split(net: nn.Sequential, *, local: bool) -> nn.Module:
    plan = {
        "0": ColwiseParallel(use_local_output=local),
        "2": RowwiseParallel(use_local_output=True),
    }
    return parallelize_module(net, init_device_mesh("cpu", (2,)), plan)


def train_split(rank: int, folder: Path, rules: str) -> dict[str, Tensor]:
    return train(split(make_net(), local=False), SPREAD_RULES[rules])


# ---- tensor parallelism that hands on plain tensors, torch's default ----


class Besides(Rule):
    """Needs the whole of all that it is shown."""

    needs_value = True
    needs_input = True

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        assert state.value is not None
        return value * (1 + state.value.norm() / 5) + state.input.norm() * value.mean() / 7


PLAIN_RULES: dict[str, dict[str, Any]] = {
    "output": {"0:output": divide, "1:output": Scale(0.5), "2:output": ClipNorm(0.5)},
    "output.grad": {"0:output.grad": [damp, ClipNorm(0.02)], "1:output.grad": ClipValue(0.01), "2:output.grad": damp},
    "both": {"0:output": [Scale(0.7), ClipNorm(0.5)], "0:output.grad": [ClipValue(0.02), damp]},
    "scaled-before": {"0:output": Scale(0.7), "0:output.grad": damp},
    "beside": {"0:output.grad": Besides(), "4:output.grad": Besides()},
    "input": {"0:input.input": ClipNorm(0.5), "4:input.input": divide, "4:input.input.grad": damp},
}
PART_RULES: dict[str, dict[str, Any]] = {
    "value": {"1:output": ClipNorm(0.5)},
    "grad": {"1:output.grad": damp},
    "input": {"1:output.grad": Besides()},
}


def train_plain(rank: int, folder: Path, rules: str) -> dict[str, Tensor]:
    return train(split(make_net(), local=True), PLAIN_RULES[rules])


def train_scaled(model: nn.Module, rules: Any) -> dict[str, Tensor]:
    """Under loss scaling by a power of two, which changes no bit of what the optimizer sees."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with rewrite(model, rules):
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(batch(step, 0)), step)).backward()
            for each in model.parameters():  # torch's own takes no mixture of plain tensors and others
                assert each.grad is not None
                each.grad /= 1024
            optimizer.step()
    return whole(model)


def train_plain_scaled(rank: int, folder: Path) -> dict[str, Tensor]:
    return train_scaled(split(make_net(), local=True), PLAIN_RULES["output.grad"])


def recompute(model: nn.Module, rules: Any = None, *, is_reentrant: bool = False) -> dict[str, Tensor]:
    """The first layers are computed again in the backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    layers: Any = model
    with rewrite(model, rules or {"0:output": divide, "0:output.grad": damp}):
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(step, 0).requires_grad_()
            loss_of(layers[2:](checkpoint(layers[:2], x, use_reentrant=is_reentrant)), step).backward()
            optimizer.step()
    return whole(model)


def recompute_plain(rank: int, folder: Path) -> dict[str, Tensor]:
    return recompute(split(make_net(), local=True))


def recompute_plain_reentrantly(rank: int, folder: Path) -> dict[str, Tensor]:
    """What is first computed without grad has no whole; its gradient has one."""
    with pytest.raises(CannotRewriteError, match=r"(?s)0:output needs the whole tensor.*use_reentrant=False"):
        recompute(split(make_net(), local=True), {"0:output": divide}, is_reentrant=True)
    return recompute(split(make_net(), local=True), {"0:output.grad": damp}, is_reentrant=True)


def warn_of_parts(rank: int, folder: Path, rules: str) -> list[str]:
    with pytest.warns(RetrogradWarning) as told:
        train(split(make_net(), local=True), PART_RULES[rules])
    return [str(each.message) for each in told]


def evaluate_plain(rank: int, folder: Path) -> list[Tensor]:
    """A forward without grad: after one with grad a rule gets the whole, and before that a warning says otherwise."""
    model = split(make_net(), local=True)
    with rewrite(model, {"0:output": divide}):
        with torch.no_grad(), pytest.warns(RetrogradWarning, match="not known whether the tensor at 0:output"):
            model(batch(0, 0))
        model(batch(0, 0))
        with torch.no_grad():
            return [model(batch(0, 0)), model(batch(1, 0, 5))]


class Sequence(nn.Module):
    """A norm whose weight's gradient stays a sum over processes that nobody has formed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.norm(x.unflatten(0, (2, 4))))
        return out


def train_sequence(rank: int, folder: Path) -> dict[str, Tensor]:
    model = Sequence()
    plan = {
        "norm": SequenceParallel(),
        "fc": ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(1), use_local_output=False),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return train(model, {"norm:parameters.grad": [ClipValue(0.05), damp]})


# ---- the older FSDP ----

OLDER_RULES: dict[str, Any] = {
    "body.0:output.grad": damp,
    "stem:input.input": lambda value, state: value + 1 + state.rank,
    "body.1:output": lambda value, state: value * 0.5,
    "head:input.input.grad": ClipNorm(0.1),
}


VALUES: dict[str, Any] = {"body.0:weight": lambda value, state: value * 0.5}
"""What has a place of its own only where FSDP keeps the names of parameters."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 4)
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head(x + self.body(x))
        return out


def flatten(net: Net, keeps_names: bool) -> nn.Module:
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": keeps_names}
    net.body = FullyShardedDataParallel(net.body, **options)  # type: ignore[assignment]
    return FullyShardedDataParallel(net, **options)


def train_older(rank: int, folder: Path, keeps_names: bool, first: bool) -> dict[str, Tensor]:
    net = Net()
    model = net if first else flatten(net, keeps_names)
    with rewrite(model, {**OLDER_RULES, **(VALUES if keeps_names else {})}):
        model = flatten(net, keeps_names) if first else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model(share_of(batch(step, 0), rank, 2)), step).backward()
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): each.detach().clone() for name, each in model.named_parameters()
        }


def train_replicas(keeps_names: bool) -> dict[str, Tensor]:
    """Two replicas in one process, each with the rules and its share, whose gradients are averaged by hand."""
    nets = [Net(), Net()]
    values = VALUES if keeps_names else {}
    ranks = [
        {**OLDER_RULES, **values, "stem:input.input": lambda value, state, rank=rank: value + 1 + rank}
        for rank in (0, 1)
    ]
    handles = [rewrite(net, rules) for net, rules in zip(nets, ranks, strict=True)]
    for step in range(STEPS):
        for net, x in zip(nets, batch(step, 0).chunk(2), strict=True):
            net.zero_grad()
            loss_of(net(x), step).backward()
        with torch.no_grad():
            for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                mean = (one.grad + other.grad) / 2
                one -= 0.2 * mean
                other -= 0.2 * mean
    for handle in handles:
        handle.remove()
    return whole(nets[0])


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
JOINT: dict[str, Any] = {
    "clip": lambda: ClipNorm(0.1),
    "zclip": lambda: ZClip(warmup=1),
    "skip": lambda: SkipStep(1, 4),
}


def train_jointly(model: nn.Module, rule: str, share: Any = lambda x: x) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with rewrite(optimizer, JOINT[rule]()):
        for step in range(STEPS + 3):
            optimizer.zero_grad()
            loss_of(model(share(batch(step, 0))), step).backward()
            optimizer.step()


def train_older_jointly(rank: int, folder: Path, rule: str, keeps_names: bool, strategy: str) -> dict[str, Tensor]:
    net = Net()
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": keeps_names}
    for name in ("stem", "body"):
        setattr(net, name, FullyShardedDataParallel(getattr(net, name), **options))
    model = FullyShardedDataParallel(net, sharding_strategy=ShardingStrategy[strategy], **options)
    train_jointly(model, rule, lambda x: share_of(x, rank, 2))
    with FullyShardedDataParallel.summon_full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): each.detach().clone() for name, each in model.named_parameters()
        }


def refuse_older(rank: int, folder: Path, keeps_names: bool) -> list[str]:
    """The gradients of its parameters, whenever the rules are set."""
    told = []
    for first in (True, False):
        net = Net()
        model = net if first else flatten(net, keeps_names)
        try:
            with rewrite(model, {"body.0:weight.grad" if first or keeps_names else "*:parameters.grad": Scale(2)}):
                model = flatten(net, keeps_names) if first else model
                model(batch(0, 0)).sum().backward()
        except CannotRewriteError as error:
            told.append(str(error))
    return told


# ---- recordings ----


def shard(net: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def record_rules(rank: int, folder: Path, first: bool) -> None:
    """A recording that was begun before the rules were set, or after."""
    model = shard(make_net())
    rules = {"0:weight.grad": ClipNorm(0.05), "2:weight.grad": ClipValue(0.01)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    early = rewrite(model, rules) if first else None
    with record(model, folder / f"run-{first}", sites=["*:weight.grad"]):
        handle = early or rewrite(model, rules)
        for step in range(STEPS):
            optimizer.zero_grad()
            for index in range(2):
                loss_of(model(share_of(batch(step, index), rank, 2)), step).backward()
            optimizer.step()
        handle.remove()


def norms_by_hand() -> dict[str, list[float]]:
    """Of each step, the norm of what the rules have made of the gradients of its passes, as of one vector."""
    net: Any = make_net()
    found: dict[str, list[float]] = {"0:weight.grad": [], "2:weight.grad": [], "4:weight.grad": []}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    changes = {
        0: lambda gradient: gradient * (0.05 / gradient.norm()).clamp(max=1),
        2: lambda gradient: gradient.clamp(-0.01, 0.01),
        4: lambda gradient: gradient,
    }
    for step in range(STEPS):
        optimizer.zero_grad()
        passes = []
        for index in range(2):
            out = loss_of(net(batch(step, index)), step)
            gradients = dict(zip(net.state_dict(), torch.autograd.grad(out, list(net.parameters())), strict=True))
            for layer, change in changes.items():
                gradients[f"{layer}.weight"] = change(gradients[f"{layer}.weight"])
            passes.append(gradients)
        for name, parameter in net.named_parameters():
            parameter.grad = passes[0][name] + passes[1][name]
        for name, each in found.items():
            key = name.replace(":", ".").removesuffix(".grad")
            each.append(torch.cat([one[key] for one in passes]).norm().item())
        optimizer.step()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def in_two(folder: Path) -> dict[str, list[Any]]:
    works: dict[str, Work] = {
        **{f"split-{rules}": partial(train_split, rules=rules) for rules in SPREAD_RULES},
        **{f"plain-{rules}": partial(train_plain, rules=rules) for rules in PLAIN_RULES},
        **{f"plain-part-{rules}": partial(warn_of_parts, rules=rules) for rules in PART_RULES},
        "plain-scaled": train_plain_scaled,
        "plain-recomputed": recompute_plain,
        "plain-reentrant": recompute_plain_reentrantly,
        "plain-evaluated": evaluate_plain,
        "sequence": train_sequence,
        **{
            f"older-{keeps}-{first}": partial(train_older, keeps_names=keeps, first=first)
            for keeps in (False, True)
            for first in (False, True)
        },
        **{f"refuse-{keeps}": partial(refuse_older, keeps_names=keeps) for keeps in (False, True)},
        **{
            f"joint-{rule}-{keeps}-{strategy}": partial(
                train_older_jointly, rule=rule, keeps_names=keeps, strategy=strategy
            )
            for rule in JOINT
            for keeps in (False, True)
            for strategy in STRATEGIES
        },
        "record-False": partial(record_rules, first=False),
        "record-True": partial(record_rules, first=True),
    }
    return run_in_two(works, folder)


def assert_all(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for each in found:
        assert each.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(each[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rules", SPREAD_RULES)
def test_activations_and_values_under_tensor_parallelism(in_two: dict[str, list[Any]], rules: str) -> None:
    assert_all(in_two[f"split-{rules}"], train(make_net(), SPREAD_RULES[rules]))


@pytest.mark.parametrize("rules", PLAIN_RULES)
def test_plain_tensors_right_behind_a_layer_that_is_split(in_two: dict[str, list[Any]], rules: str) -> None:
    assert_all(in_two[f"plain-{rules}"], train(make_net(), PLAIN_RULES[rules]))


@pytest.mark.parametrize("rules", PART_RULES)
def test_plain_parts_of_which_nothing_tells_the_whole_are_told_once(in_two: dict[str, list[Any]], rules: str) -> None:
    for told in in_two[f"plain-part-{rules}"]:
        assert len(told) == 1
        assert "at 1:" in told[0]
        assert "use_local_output=False" in told[0]


def test_plain_tensors_under_loss_scaling(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["plain-scaled"], train_scaled(make_net(), PLAIN_RULES["output.grad"]))


def test_plain_tensors_that_are_computed_again(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["plain-recomputed"], recompute(make_net()))


def test_plain_tensors_that_are_first_computed_without_grad(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["plain-reentrant"], recompute(make_net(), {"0:output.grad": damp}))


def test_plain_tensors_without_grad(in_two: dict[str, list[Any]]) -> None:
    net = make_net()
    with rewrite(net, {"0:output": divide}), torch.no_grad():
        expected = [net(batch(0, 0)), net(batch(1, 0, 5))]
    for found in in_two["plain-evaluated"]:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_gradients_that_are_still_to_be_summed(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["sequence"], train(Sequence(), {"norm:parameters.grad": [ClipValue(0.05), damp]}))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("keeps_names", [False, True])
def test_activations_under_the_older_fsdp(in_two: dict[str, list[Any]], keeps_names: bool, first: bool) -> None:
    assert_all(in_two[f"older-{keeps_names}-{first}"], train_replicas(keeps_names))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("keeps_names", [False, True])
@pytest.mark.parametrize("rule", JOINT)
def test_optimizers_under_the_older_fsdp(
    in_two: dict[str, list[Any]], rule: str, keeps_names: bool, strategy: str
) -> None:
    net = Net()
    train_jointly(net, rule)
    assert_all(in_two[f"joint-{rule}-{keeps_names}-{strategy}"], whole(net))


@pytest.mark.parametrize("keeps_names", [False, True])
def test_gradients_of_parameters_of_the_older_fsdp_are_refused(in_two: dict[str, list[Any]], keeps_names: bool) -> None:
    for told in in_two[f"refuse-{keeps_names}"]:
        assert len(told) == 2
        assert all("flattened" in each for each in told)


@pytest.mark.parametrize("first", [False, True])
def test_what_is_recorded_is_what_the_rules_have_made(in_two: dict[str, list[Any]], folder: Path, first: bool) -> None:
    history = open_run(folder / f"run-{first}").history
    for name, expected in norms_by_hand().items():
        found = torch.tensor(history[name].l2.tolist())
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-3, atol=1e-5)
    events = [event for event in history.events if event.kind == "rewrite"]
    assert {event.name for event in events} == {"0:weight.grad", "2:weight.grad"}
