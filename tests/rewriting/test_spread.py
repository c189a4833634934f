"""Rules on gradients of parameters that are spread over processes, beside one process that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

from retrograd.core.errors import CannotRewriteError, RuleError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import AGC, ClipNorm, SkipStep, ZClip
from retrograd.rewriting.rules.elements import Centralise, ClipValue, Grokfast, Noise, Scale, Zero
from retrograd.rewriting.rules.pass_rule import PCGrad
from retrograd.rewriting.rules.rule import SiteState
from retrograd.rewriting.rules.spam import EmaClip, PeakClip, SpikeClip
from tests.processes import Work, run_in_two, run_together
from tests.rewriting.models import make_net, weights

pytestmark = pytest.mark.slow

STEPS = 4
PASSES = 2
"""Of each step, whose gradients add up."""
RATE = 0.2


def batch(step: int, index: int, size: int = 8) -> Tensor:
    """The whole batch of a pass, of which each process takes a part."""
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(100 * step + index))


def loss_of(out: Tensor, step: int) -> Tensor:
    return (out - 1).square().mean() * (30.0 if step == 2 else 1.0)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in model.named_parameters()
    }


# ---- how a model is spread ----


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def shard(net: nn.Sequential, *sizes: int, leaves: bool = True, **options: Any) -> nn.Module:
    mesh = mesh_of(*sizes)
    for module in (net[0], net[2]) if leaves else ():
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def split(net: nn.Sequential, mesh: Any = None) -> nn.Module:
    """Tensor parallelism; the last layer is left whole."""
    return parallelize_module(net, mesh or mesh_of(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def split_and_shard(net: nn.Sequential) -> nn.Module:
    mesh = mesh_of(2, 2)
    split(net, mesh["inner"])
    for module in (net[0], net[2]):
        fully_shard(module, mesh=mesh["outer"])
    return fully_shard(net, mesh=mesh["outer"])


Spread = Callable[[nn.Sequential], nn.Module]

IN_TWO: dict[str, tuple[Spread, int]] = {
    "fsdp": (lambda net: shard(net, 2), 2),
    "fsdp-root": (lambda net: shard(net, 2, leaves=False), 2),  # its parameters are whole between forward and backward
    "tp": (split, 1),
}
IN_FOUR: dict[str, tuple[Spread, int]] = {
    "fsdp-4": (lambda net: shard(net, 4), 4),
    "hsdp": (lambda net: shard(net, 2, 2), 4),
    "fsdp-tp": (split_and_shard, 2),
}
WAYS = {**IN_TWO, **IN_FOUR}
"""How a model is spread, and into how many shares the batch is."""


def share_of(x: Tensor, rank: int, shares: int) -> Tensor:
    return x.chunk(shares)[rank * shares // torch.distributed.get_world_size()]


# ---- rules ----


def damp(gradient: Tensor, state: SiteState) -> Tensor:
    """Needs the whole: its norm, its first row, and what was here before."""
    past = state.get("past", gradient.norm())
    state.put("past", 0.5 * past + 0.5 * gradient.norm())
    return gradient * (past / gradient.norm()).clamp(max=1) + gradient[:1].mean() / 7


EVERYWHERE = "*:parameters.grad"
RULES: dict[str, Callable[[], Any]] = {
    "scale": lambda: {EVERYWHERE: Scale(lambda step: 0.3 + step)},
    "zero": lambda: {"2:weight.grad": Zero()},
    "value": lambda: {EVERYWHERE: ClipValue(0.02)},
    "norm": lambda: {EVERYWHERE: ClipNorm(0.05)},
    "own": lambda: {EVERYWHERE: damp},
    "centralise": lambda: {EVERYWHERE: Centralise()},
    "agc": lambda: {"*:weight.grad": AGC(0.05)},
    "noise": lambda: {EVERYWHERE: Noise(0.1)},
    "grokfast": lambda: {EVERYWHERE: Grokfast(0.9)},
    "spike": lambda: {EVERYWHERE: SpikeClip(threshold=1.2, beta=0.5, rest=1)},
    "peak": lambda: {EVERYWHERE: [PeakClip(0.5), EmaClip()]},
    "zclip": lambda: {EVERYWHERE: ZClip(warmup=2, max_norm=0.1)},
    "skip": lambda: {EVERYWHERE: SkipStep(sigma=1, size=4)},
    "several": lambda: {
        "0:weight.grad": [ClipValue(0.1), damp, ClipNorm(0.1)],
        "2:weight.grad": [damp, ClipValue(0.1)],
    },
}


RULES_IN_FOUR = ("value", "norm", "own", "agc", "grokfast", "several")


def train(model: nn.Module, rules: Any, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with rewrite(model, rules):
        for step in range(STEPS):
            optimizer.zero_grad()
            for index in range(PASSES):
                loss_of(model(share(batch(step, index))), step).backward()
            optimizer.step()
    return whole(model)


def train_spread(rank: int, folder: Path, way: str, rules: str) -> dict[str, Tensor]:
    spread, shares = WAYS[way]
    model = spread(make_net())
    return train(model, RULES[rules](), lambda x: share_of(x, rank, shares))


def works_of(ways: Iterable[str], every: Iterable[str]) -> dict[str, Work]:
    return {f"{way}-{rules}": partial(train_spread, way=way, rules=rules) for way in ways for rules in every}


# ---- special cases ----


def train_mixed(rank: int, folder: Path) -> dict[str, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return train(shard(make_net(), 2, mp_policy=policy), RULES["own"](), lambda x: share_of(x, rank, 2))


def train_mixed_by_hand() -> dict[str, Tensor]:
    """Each half of a batch in bfloat16, the mean of both in float32, and the rule on that."""
    net = make_net()
    states = {name: SiteState(name) for name, _ in net.named_parameters()}
    for step in range(STEPS):
        total = {name: torch.zeros_like(each) for name, each in net.named_parameters()}
        for index in range(PASSES):
            halves = []
            for part in batch(step, index).chunk(2):
                narrow = {name: each.detach().bfloat16().requires_grad_() for name, each in net.named_parameters()}
                out = functional_call(net, narrow, part.bfloat16())
                found = torch.autograd.grad(loss_of(out, step), list(narrow.values()))
                halves.append([each.float() for each in found])
            for (name, sum_of), one, other in zip(total.items(), *halves, strict=True):
                sum_of += damp((one + other) / 2, states[name])
        with torch.no_grad():
            for name, each in net.named_parameters():
                each -= RATE * total[name]
    return weights(net)


def first_set(rank: int, folder: Path) -> dict[str, Tensor]:
    """The rules are set before the model is sharded."""
    net = make_net()
    optimizer = None
    with rewrite(net, RULES["own"]()):
        shard(net, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        for step in range(STEPS):
            optimizer.zero_grad()
            for index in range(PASSES):
                loss_of(net(share_of(batch(step, index), rank, 2)), step).backward()
            optimizer.step()
    return whole(net)


def two_losses(model: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
    yield model(x).square().mean()
    yield (model(x) - 3).abs().mean()


def combine_passes(rank: int, folder: Path, way: str, per_tensor: bool = False) -> list[dict[str, Tensor]]:
    """PCGrad; in every second step a pass before is thrown away by hand, and nothing is left of it."""
    spread, shares = WAYS[way]
    model = spread(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with rewrite(optimizer, PCGrad(per_tensor=per_tensor)):
        for step in range(STEPS):
            if step % 2:
                model(share_of(batch(step, 9), rank, shares)).sum().backward()
            optimizer.zero_grad()
            for loss in two_losses(model, share_of(batch(step, 0), rank, shares)):
                loss.backward()
            optimizer.step()
            found.append(whole(model))
    return found


def combine_by_hand(per_tensor: bool) -> list[dict[str, Tensor]]:
    net = make_net()
    found = []
    for step in range(STEPS):
        losses = two_losses(net, batch(step, 0))
        first, second = (torch.autograd.grad(loss, list(net.parameters())) for loss in losses)
        with torch.no_grad():
            for place, each in enumerate(net.parameters()):
                among = slice(place, place + 1) if per_tensor else slice(None)
                dot = _multiply(first[among], second[among])
                total = first[place] + second[place]
                if dot < 0:
                    total = total - dot / _multiply(second[among], second[among]) * second[place]
                    total = total - dot / _multiply(first[among], first[among]) * first[place]
                each -= 0.1 * total
        found.append(weights(net))
    return found


def _multiply(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()


def nest(rank: int, folder: Path) -> dict[str, Tensor]:
    """Two rewritings of one parameter; the later one acts first on gradients."""
    model = shard(make_net(), 2)
    with rewrite(model, {"0:weight.grad": lambda gradient, state: gradient + 1}):
        return train(model, {"0:weight.grad": Scale(0.5)}, lambda x: share_of(x, rank, 2))


def leave_early(rank: int, folder: Path) -> list[Any]:
    """Rules are taken back within a pass, a pass fails, and nothing is lost of what ``.grad`` held."""
    model: Any = shard(make_net(), 2)
    x = share_of(batch(0, 0), rank, 2)
    model(x).sum().backward()
    before = [each.grad for each in model.parameters()]
    values = [each.grad.full_tensor() for each in model.parameters()]
    handle = rewrite(model, {EVERYWHERE: Zero()})
    out = model(x)
    out.register_hook(lambda gradient: handle.remove())
    out.sum().backward()
    doubled = [
        torch.equal(each.grad.full_tensor(), 2 * one) for each, one in zip(model.parameters(), values, strict=True)
    ]
    same = [each.grad is one for each, one in zip(model.parameters(), before, strict=True)]

    def wrong(gradient: Tensor, state: SiteState) -> Tensor:
        raise ValueError("no")

    with rewrite(model, {"0:weight.grad": wrong}), pytest.raises(RuleError, match="ValueError"):
        model(x).sum().backward()
    same += [each.grad is one for each, one in zip(model.parameters(), before, strict=True)]
    return [all(doubled), all(same)]


def refuse(rank: int, folder: Path) -> list[str]:
    told = []
    model: Any = shard(make_net(), 2)
    x = share_of(batch(0, 0), rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    for target, rules in ((model, {"0:weight.grad": Scale(2)}), (optimizer, PCGrad())):
        with rewrite(target, rules), pytest.raises(CannotRewriteError) as caught:
            model(x).sum().backward()
        told.append(str(caught.value))
    model(x).sum().backward()  # is left unreduced
    model.set_requires_gradient_sync(True)
    with rewrite(model, {"0:weight.grad": Scale(2)}), pytest.raises(CannotRewriteError) as caught:
        model(x).sum().backward()
    told.append(str(caught.value))
    other: Any = shard(make_net(), 2)
    handle = other[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with rewrite(other, {"0:weight.grad": Scale(2)}), pytest.raises(CannotRewriteError) as caught:
        other(x).sum().backward()
    told.append(str(caught.value))
    handle.remove()
    return told


def single(rules: str) -> dict[str, Tensor]:
    return train(make_net(), RULES[rules](), lambda x: x)


def nested_by_hand() -> dict[str, Tensor]:
    net = make_net()
    net[0].weight.register_hook(lambda gradient: gradient * 0.5 + 1)
    return train(net, {"0:bias.grad": Scale(1.0)}, lambda x: x)


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, Work] = {
        **works_of(IN_TWO, RULES),
        "mixed": train_mixed,
        "first": first_set,
        "nest": nest,
        "early": leave_early,
        "refuse": refuse,
        **{
            f"passes-{way}-{per_tensor}": partial(combine_passes, way=way, per_tensor=per_tensor)
            for way in IN_TWO
            for per_tensor in (False, True)
        },
    }
    return run_in_two(works, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, Work] = {
        **works_of(IN_FOUR, RULES_IN_FOUR),
        **{f"passes-{way}": partial(combine_passes, way=way) for way in IN_FOUR},
    }
    return run_together(works, tmp_path_factory.mktemp("four"), 4)


def assert_all(found: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for each in found:
        assert each.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(each[name], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(each[name], found[0][name])


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("way", IN_TWO)
def test_two_processes_do_what_one_does(in_two: dict[str, list[Any]], way: str, rules: str) -> None:
    assert_all(in_two[f"{way}-{rules}"], single(rules))


@pytest.mark.parametrize("rules", RULES_IN_FOUR)
@pytest.mark.parametrize("way", IN_FOUR)
def test_four_processes_do_what_one_does(in_four: dict[str, list[Any]], way: str, rules: str) -> None:
    assert_all(in_four[f"{way}-{rules}"], single(rules))


def test_mixed_precision(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["mixed"], train_mixed_by_hand())


def test_rules_that_were_there_before_the_model_was_sharded(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["first"], single("own"))


def test_two_rewritings(in_two: dict[str, list[Any]]) -> None:
    assert_all(in_two["nest"], nested_by_hand())


def test_nothing_is_lost_where_a_pass_is_left(in_two: dict[str, list[Any]]) -> None:
    assert in_two["early"] == [[True, True]] * 2


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("way", IN_TWO)
def test_passes_are_combined(in_two: dict[str, list[Any]], way: str, per_tensor: bool) -> None:
    for step, expected in enumerate(combine_by_hand(per_tensor)):
        assert_all([each[step] for each in in_two[f"passes-{way}-{per_tensor}"]], expected)


@pytest.mark.parametrize("way", IN_FOUR)
def test_passes_are_combined_in_four(in_four: dict[str, list[Any]], way: str) -> None:
    for step, expected in enumerate(combine_by_hand(False)):
        assert_all([each[step] for each in in_four[f"passes-{way}"]], expected)


def test_what_is_refused(in_two: dict[str, list[Any]]) -> None:
    for told in in_two["refuse"]:
        assert ["not reduced by itself" in each for each in told] == [True, True, True, False]
        assert "before the pass is over" in told[3]
