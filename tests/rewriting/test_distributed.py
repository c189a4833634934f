"""Rules under DDP, FSDP2 and tensor parallelism, in two processes, beside the same done by hand in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import CannotRewriteError
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm, SkipStep, ZClip
from retrograd.rewriting.rules.norm_rule import NormRule
from retrograd.rewriting.rules.pass_rule import PCGrad
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.processes import Work, run_in_two
from tests.rewriting.models import make_net, weights

pytestmark = pytest.mark.slow

STEPS = 6


def share(step: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(out: Tensor, step: int) -> Tensor:
    return (out - 1).square().mean() * (100.0 if step == 4 else 1.0)


def whole(net: nn.Module) -> dict[str, Tensor]:
    """The parameters as they would be in one process."""
    return {
        name.removeprefix("module."): each.full_tensor() if hasattr(each, "full_tensor") else each.detach().clone()
        for name, each in net.named_parameters()
    }


# ---- rules at sites ----


class Net(nn.Module):
    """Two layers beside a skip connection, maybe checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))
        self.head = nn.Linear(4, 2)
        self.reentrant = reentrant

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.norm(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.reentrant is None:
            x = x + self.branch(x)
        else:
            x = x + checkpoint(self.branch, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


def damp(gradient: Tensor, state: SiteState) -> Tensor:
    past = state.get("past", gradient.norm())
    state.put("past", 0.5 * past + 0.5 * gradient.norm())
    return gradient * (past / gradient.norm()).clamp(max=1)


class ByActivation(Rule):
    needs_value = True

    def __call__(self, gradient: Tensor, state: SiteState) -> Tensor:
        assert state.value is not None
        return gradient * state.value.sigmoid()


RULES: dict[str, Any] = {
    "body.0:output.grad": damp,
    "stem:output.grad": ByActivation(),
    "norm:input.input.grad": lambda gradient, state: gradient * 0.3,
    "body.2:weight": lambda value, state: value * 0.5,
    "head:input.input": lambda value, state: value + 1 + state.rank,
}


def by_hand(net: Net, x: Tensor, rank: int, past: dict[str, Tensor]) -> Tensor:
    """What a forward with the rules computes, with bare hooks."""

    def damp_by_hand(gradient: Tensor) -> Tensor:
        before = past.get("norm", gradient.norm())
        past["norm"] = 0.5 * before + 0.5 * gradient.norm()
        return gradient * (before / gradient.norm()).clamp(max=1)

    h = net.stem(x)
    factor = h.detach().sigmoid()
    h.register_hook(lambda gradient: gradient * factor)
    use = h.view_as(h)
    use.register_hook(lambda gradient: gradient * 0.3)
    inner = net.body[0](net.norm(use))
    inner.register_hook(damp_by_hand)
    h = h + F.linear(inner.relu(), net.body[2].weight * 0.5, net.body[2].bias)
    out: Tensor = net.head(h + 1 + rank)
    return out


def train_by_hand() -> dict[str, Tensor]:
    net = Net()
    pasts: list[dict[str, Tensor]] = [{}, {}]
    for step in range(STEPS):
        shares = []
        for rank, past in enumerate(pasts):
            net.zero_grad()
            loss_of(by_hand(net, share(step, rank), rank, past), step).backward()
            shares.append([each.grad.clone() for each in net.parameters() if each.grad is not None])
        with torch.no_grad():
            for each, one, other in zip(net.parameters(), *shares, strict=True):
                each -= 0.01 * (one / 2 + other / 2)
    return weights(net)


def shard(net: Net, *, leaves: bool = False) -> Net:
    mesh = init_device_mesh("cpu", (2,))
    for module in (net.norm, net.body[0], net.body[2]) if leaves else ():
        fully_shard(module, mesh=mesh)
    for module in (net.body, net):
        fully_shard(module, mesh=mesh)
    return net


def train_at_sites(
    rank: int, folder: Path, wrap: Callable[[Net], nn.Module], reentrant: bool | None, first: bool
) -> dict[str, Tensor]:
    net = Net(reentrant)
    with rewrite(net, RULES) if first else nullcontext():
        model = wrap(net)
        with nullcontext() if first else rewrite(model, RULES):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model(share(step, rank)), step).backward()
                optimizer.step()
    return whole(net)


WRAPS: dict[str, Callable[[Net], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "ddp-views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "ddp-static": partial(DistributedDataParallel, static_graph=True),
    "fsdp": shard,
    "fsdp-leaves": partial(shard, leaves=True),
}
AT_SITES: dict[str, Work] = {
    f"{name}-{reentrant}-{first}": partial(train_at_sites, wrap=wrap, reentrant=reentrant, first=first)
    for name, wrap in WRAPS.items()
    for reentrant in (None, False, True)
    for first in (False, True)
    if reentrant is None or not name.endswith(("views", "static"))
}


# ---- rules on optimizers ----


class Note(NormRule):
    """Changes nothing, and keeps the norms that it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self._norms: list[float] = []

    def scale(self, norm: Tensor, state: SiteState) -> Tensor:
        self._norms.append(norm.item())
        return torch.ones_like(norm)


JOINT: dict[str, Callable[[], NormRule]] = {
    "clip": lambda: ClipNorm(0.5),
    "skip": lambda: SkipStep(size=4),
    "zclip": lambda: ZClip(warmup=2),
}


def shard_plain(net: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def split_columns(net: nn.Sequential) -> nn.Module:
    return parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


SHARED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": shard_plain,
    "tp": split_columns,
}


def train_jointly(rank: int, folder: Path, wrap: str, rule: str) -> tuple[dict[str, Tensor], list[float]]:
    model = SHARED[wrap](make_net())
    note = Note()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rewrite(optimizer, [JOINT[rule](), note]):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model(share(step, 0 if wrap == "tp" else rank)), step).backward()
            optimizer.step()
    return whole(model), note._norms


JOINTLY: dict[str, Work] = {
    f"{wrap}-{rule}": partial(train_jointly, wrap=wrap, rule=rule) for wrap in SHARED for rule in JOINT
}


def two_losses(model: Callable[[Tensor], Tensor], x: Tensor) -> Iterator[Tensor]:
    yield model(x).square().mean()
    yield (model(x) - 3).abs().mean()


def combine_passes(rank: int, folder: Path, views: bool) -> list[dict[str, Tensor]]:
    """PCGrad under DDP; in every second step gradients are left from before."""
    model = DistributedDataParallel(make_net(), gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with rewrite(optimizer, PCGrad()):
        for step in range(STEPS):
            optimizer.zero_grad()
            for loss in two_losses(model, share(step, rank)):
                loss.backward()
            torch.autograd.grad(model(share(step, rank)).sum(), list(model.parameters()))
            optimizer.step()
            found.append(whole(model))
    return found


def combine_by_hand() -> list[dict[str, Tensor]]:
    net = make_net()
    found = []
    for step in range(STEPS):
        averaged = []
        for index in range(2):
            parts: list[Sequence[Tensor]] = []
            for rank in range(2):
                loss = list(two_losses(net, share(step, rank)))[index]
                parts.append(torch.autograd.grad(loss, list(net.parameters())))
            averaged.append([one / 2 + other / 2 for one, other in zip(*parts, strict=True)])
        first, second = averaged
        dot = sum((one * other).sum() for one, other in zip(first, second, strict=True))
        with torch.no_grad():
            for each, one, other in zip(net.parameters(), first, second, strict=True):
                total = one + other
                if dot < 0:
                    total = total - dot / _square(second) * other - dot / _square(first) * one
                each -= 0.1 * total
        found.append(weights(net))
    return found


def _square(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.square().sum() for each in gradients]).sum()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, Work] = {
        **{f"sites-{name}": work for name, work in AT_SITES.items()},
        **{f"joint-{name}": work for name, work in JOINTLY.items()},
        "passes": partial(combine_passes, views=False),
        "passes-views": partial(combine_passes, views=True),
    }
    return run_in_two(works, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", AT_SITES)
def test_rules_at_sites(found: dict[str, list[Any]], name: str) -> None:
    """Each process has its rules, and their memory, on its own share; what they return is averaged."""
    first, second = found[f"sites-{name}"]
    expected = train_by_hand()
    for key, each in expected.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], each)


@pytest.mark.parametrize("rule", JOINT)
@pytest.mark.parametrize("wrap", SHARED)
def test_rules_on_an_optimizer(found: dict[str, list[Any]], wrap: str, rule: str) -> None:
    """They see the norm of the whole gradient, and decide the same in each process."""
    (first, norms), (second, others) = found[f"joint-{wrap}-{rule}"]
    assert norms == others
    net, note = make_net(), Note()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rewrite(optimizer, [JOINT[rule](), note]):
        for step in range(STEPS):
            optimizer.zero_grad()
            x = share(step, 0) if wrap == "tp" else torch.cat([share(step, 0), share(step, 1)])
            loss_of(net(x), step).backward()
            optimizer.step()
    torch.testing.assert_close(norms, note._norms, rtol=1e-4, atol=1e-5)
    for key, each in weights(net).items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["passes", "passes-views"])
def test_passes_are_combined_as_they_are_averaged(found: dict[str, list[Any]], name: str) -> None:
    first, second = found[name]
    for one, other, expected in zip(first, second, combine_by_hand(), strict=True):
        for key, each in expected.items():
            assert torch.equal(one[key], other[key])
            torch.testing.assert_close(one[key], each, rtol=1e-4, atol=1e-5)


def test_parameters_of_the_older_fsdp_are_refused() -> None:
    """They are stretches; their mark is set by hand."""
    net = make_net()
    for each in net.parameters():
        _set_fsdp_flattened(each)
    with pytest.raises(CannotRewriteError, match="FullyShardedDataParallel"):
        rewrite(torch.optim.SGD(net.parameters(), lr=0.1), PCGrad())
    with pytest.raises(CannotRewriteError, match="flattened"):
        rewrite(net, {"0:weight.grad": ClipNorm(1.0)})
