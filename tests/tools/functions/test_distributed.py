"""Functions that remember, in two processes: replicated, sharded, and checkpointed there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from retrograd.tools.functions.function import Function
from tests.processes import Work, run_in_two

pytestmark = pytest.mark.slow

STEPS = 3


class Remembers(Function):
    """A linear layer with its own parameters and the last inputs and gradients."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features_out, features_in))
        self.bias = nn.Parameter(torch.randn(features_out))

    def forward(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        self.remember("input", x)
        return nn.functional.linear(x, weight, bias)

    def backward(self, ctx: Any, grad_output: Tensor) -> dict[str, Tensor]:
        x, weight = ctx.saved_tensors
        self.remember("grad_output", grad_output)
        return {"x": grad_output @ weight, "weight": grad_output.T @ x, "bias": grad_output.sum(0)}


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 4)
        self.body = nn.Sequential(Remembers(4, 4), nn.Tanh(), Remembers(4, 2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return out


def share(step: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def shard(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for module in (net.body[0], net.body[2], net):
        fully_shard(module, mesh=mesh)
    return net


WRAPS = {"ddp": DistributedDataParallel, "fsdp": shard}


def train(rank: int, folder: Path, kind: str, reentrant: bool | None) -> dict[str, Any]:
    """Parameters at the end, and the histories before and after they went through a state."""
    net = Net(reentrant)
    model = WRAPS[kind](net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(share(step, rank)).square().mean().backward()
        optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    plain = {name: each.clone() for name, each in state.items() if isinstance(each, Tensor)}
    other = WRAPS[kind](Net())
    set_model_state_dict(other, state, options=options)
    loaded: Any = other.module.body[0] if kind == "ddp" else other.body[0]
    return {
        "state": plain,
        "inputs": net.body[0].remembered["input"],
        "gradients": net.body[0].remembered["grad_output"],
        "loaded": loaded.remembered["input"],
    }


def train_by_hand() -> tuple[dict[str, Tensor], list[list[Tensor]], list[list[Tensor]]]:
    """With plain layers: parameters, and for each share what came into the first of the body."""
    net: Any = Net()
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    layers.load_state_dict(net.body.state_dict())
    net.body = layers
    inputs: list[list[Tensor]] = [[], []]
    gradients: list[list[Tensor]] = [[], []]
    for step in range(STEPS):
        found = []
        for rank in range(2):
            net.zero_grad()
            x = net.stem(share(step, rank))
            out = layers[0](x)
            inputs[rank].append(x.detach())
            out.register_hook(gradients[rank].append)
            layers[1:](out).square().mean().backward()
            found.append([each.grad.clone() for each in net.parameters()])
        with torch.no_grad():
            for each, one, other in zip(net.parameters(), *found, strict=True):
                each -= 0.1 * (one / 2 + other / 2)
    return net.state_dict(), inputs, gradients


CASES = {f"{kind}-{reentrant}": (kind, reentrant) for kind in WRAPS for reentrant in (None, False, True)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    works: dict[str, Work] = {
        name: partial(train, kind=kind, reentrant=reentrant) for name, (kind, reentrant) in CASES.items()
    }
    return run_in_two(works, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", CASES)
def test_as_plain_layers(found: dict[str, list[Any]], name: str) -> None:
    """Each process remembers its own share, and once, also where a part is computed again."""
    state, inputs, gradients = train_by_hand()
    for rank in range(2):
        result = found[name][rank]
        assert {name.removeprefix("module.") for name in result["state"]} == set(state)
        for key, each in result["state"].items():
            torch.testing.assert_close(each, state[key.removeprefix("module.")])
        for kept, expected in ((result["inputs"], inputs[rank]), (result["gradients"], gradients[rank])):
            assert len(kept) == STEPS
            for one, other in zip(kept, expected, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CASES)
def test_histories_are_in_the_state_of_a_process(found: dict[str, list[Any]], name: str) -> None:
    result = found[name][0]
    assert len(result["loaded"]) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(result["loaded"], result["inputs"], strict=True))
