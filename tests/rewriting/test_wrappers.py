"""Rules beside the rest of torch: DDP, FSDP, jit, functional transforms, meta tensors, and no grad at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograd.core.errors import AttachError, CannotRewriteError, RetrogradWarning
from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.clipping import ClipNorm, ZClip
from retrograd.rewriting.rules.elements import Grokfast
from retrograd.rewriting.rules.rule import SiteState
from tests.processes import run_in_two
from tests.rewriting.models import add_one, assert_same, gradients, halve, make_net, weights


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def clip(value: Tensor, state: SiteState) -> Tensor:
    return value.clamp(-0.05, 0.05) * (1 + state.rank)


def train_clipped(rank: int, folder: Path) -> dict[str, Tensor]:
    net = make_net()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rewrite(wrapped, {"1:output.grad": clip, "2:weight.grad": clip}):
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            wrapped(x).square().mean().backward()
            optimizer.step()
    return weights(net)


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    """Each process has its rules on its own share; what they return is averaged."""
    found = run_in_two({"clipped": train_clipped}, tmp_path)["clipped"]
    assert_same(*found)
    net = make_net()
    for step in range(3):
        shares = []
        for rank in range(2):
            net.zero_grad()
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))

            def by_hand(gradient: Tensor, rank: int = rank) -> Tensor:
                return gradient.clamp(-0.05, 0.05) * (1 + rank)

            h = torch.tanh(net[0](x))
            h.register_hook(by_hand)
            handle = net[2].weight.register_hook(by_hand)
            net[2:](h).square().mean().backward()
            handle.remove()
            shares.append(gradients(net))
        with torch.no_grad():
            for name, each in net.named_parameters():
                each -= 0.1 * (shares[0][name] + shares[1][name]) / 2
    for name, each in weights(net).items():
        torch.testing.assert_close(found[0][name], each)


@pytest.mark.usefixtures("process_group")
def test_data_parallel_wrapper_has_plain_names() -> None:
    net, plain, x = make_net(), make_net(), torch.randn(5, 3)
    rules = {"1:output.grad": halve, "0:weight": add_one, "2:input.input": add_one, "4:bias.grad": halve}
    wrapped = DistributedDataParallel(net)
    with rewrite(wrapped, rules), rewrite(plain, rules):
        wrapped(x).sum().backward()
        plain(x).sum().backward()
    assert_same(gradients(net), gradients(plain))


@pytest.mark.usefixtures("process_group")
def test_outputs_of_a_sharded_model() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    net, plain, x = make_net(), make_net(), torch.randn(5, 3)
    fully_shard(net, mesh=mesh)
    rules = {"1:output.grad": halve, "2:input.input": add_one}
    with rewrite(net, rules), rewrite(plain, rules):
        net(x).sum().backward()
        plain(x).sum().backward()
    found = {name: each.grad.full_tensor() for name, each in net.named_parameters()}  # type: ignore[union-attr]
    assert_same(found, gradients(plain))


def train_scaled(net: Any, rules: Any, state: Any = None) -> tuple[dict[str, Tensor], Any]:
    """Two passes a step, under loss scaling."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with rewrite(net, rules) as rewriting:
        if state is not None:
            rewriting.load_state_dict(state)
        for step in range(3):
            optimizer.zero_grad()
            for index in range(2):
                x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2 * step + index))
                scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in net.named_parameters()}
    return {name: each.detach().clone() for name, each in whole.items()}, rewriting.state_dict()


@pytest.mark.usefixtures("process_group")
def test_gradients_of_a_sharded_model_under_loss_scaling() -> None:
    """Rules see what they would without sharding, and go on from a checkpoint."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    net, plain = make_net(), make_net()
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    rules = [{"0:weight.grad": [ClipNorm(0.1), Grokfast(0.5)], "2:weight.grad": ZClip(warmup=1)} for _ in range(4)]
    (found, state), (expected, others) = train_scaled(net, rules[0]), train_scaled(plain, rules[1])
    assert_same(found, expected)
    found, _ = train_scaled(net, rules[2], state)
    expected, _ = train_scaled(plain, rules[3], others)
    assert_same(found, expected)


@pytest.mark.usefixtures("process_group")
def test_passes_that_are_not_the_last_of_a_sharded_model() -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    net: Any = fully_shard(make_net(), mesh=mesh)
    plain, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"*:weight.grad": halve}), rewrite(plain, {"*:weight.grad": halve}):
        for is_last in (False, True):
            net.set_is_last_backward(is_last)
            net(x).sum().backward(retain_graph=True)
            plain(x).sum().backward()
    found = {name: each.grad.full_tensor() for name, each in net.named_parameters()}
    assert_same(found, gradients(plain))


def test_checkpoint_wrapper() -> None:
    net, plain, x = make_net(), make_net(), torch.randn(5, 3)
    net[1], net[2] = checkpoint_wrapper(net[1]), checkpoint_wrapper(net[2])
    rules = {"1:output.grad": halve, "2:input.input.grad": halve, "2:weight": add_one, "1:output": add_one}
    with rewrite(net, rules), rewrite(plain, rules):
        out = net(x)
        assert torch.equal(out, plain(x))
        out.sum().backward()
        plain(x).sum().backward()
    assert_same(
        {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in gradients(net).items()},
        gradients(plain),
    )


def test_data_parallel_is_refused() -> None:
    with pytest.raises(AttachError, match="DataParallel"):
        rewrite(nn.DataParallel(make_net()), {"*:output": halve})


def test_scripting_leaves_the_rules_out() -> None:
    net, x = make_net(), torch.randn(5, 3)
    plain = net(x)
    with rewrite(net, {"1:output": halve, "2:weight": halve, "2:input.input": halve, "1:output.grad": halve}):
        scripted = torch.jit.script(net)
        assert not torch.equal(net(x), plain)
    assert torch.equal(scripted(x), plain)


def test_a_scripted_model_has_rules_at_its_root_and_on_its_gradients() -> None:
    net, x = make_net(), torch.randn(5, 3)
    scripted = torch.jit.script(net)
    rules: dict[str, Any] = {"self:output": halve, "self:output.grad": halve, "self:input.input": add_one}
    with rewrite(scripted, {**rules, "0:weight.grad": halve}):
        out = scripted(x)
        out.sum().backward()
    found = gradients(scripted)
    net.zero_grad()
    expected = net(x + 1) * 0.5
    torch.testing.assert_close(out, expected)
    (expected.sum() * 0.5).backward()
    for name, each in gradients(net).items():
        torch.testing.assert_close(found[name], each * (0.5 if name == "0.weight" else 1.0))
    with pytest.raises(CannotRewriteError, match="compiled"):
        rewrite(scripted, {"0:weight": halve})
    with pytest.warns(RetrogradWarning, match="'1:output'"), rewrite(scripted, {"1:output": halve}):
        scripted(x)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_has_what_the_rules_made_of_values() -> None:
    """It holds what ran, as it does of any hook."""
    net, x = make_net(), torch.randn(5, 3)
    with rewrite(net, {"1:output": halve, "1:output.grad": halve}):
        traced = torch.jit.trace(net, x)
        expected = net(x)
    torch.testing.assert_close(traced(x), expected)


def test_functional_transforms() -> None:
    """Rules act inside ``torch.func.grad`` and ``vmap`` as they do outside."""
    net, x = make_net(), torch.randn(5, 3)
    parameters = dict(net.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(net, parameters, (x,)).square().sum()

    with rewrite(net, {"1:output": lambda v, s: v * 3, "2:output.grad": halve}):
        found = torch.func.grad(loss)(parameters, x)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    h = net[2](torch.tanh(net[0](x)) * 3)
    h.register_hook(lambda gradient: gradient * 0.5)
    net[3:](h).square().sum().backward()
    for name, gradient in gradients(net).items():
        torch.testing.assert_close(found[name], gradient)
        torch.testing.assert_close(each[name].sum(0), gradient)


def test_functional_call_has_the_values_that_it_was_given() -> None:
    net, x = make_net(), torch.randn(5, 3)
    other = {name: each.detach() + 1 for name, each in net.named_parameters()}
    with rewrite(net, {"0:weight": halve}):
        found = torch.func.functional_call(net, other, (x,))
    expected = torch.func.functional_call(net, {**other, "0.weight": other["0.weight"] * 0.5}, (x,))
    assert torch.equal(found, expected)
    assert net[0].weight is net[0]._parameters["weight"]


def test_inference_mode() -> None:
    net, x = make_net(), torch.randn(5, 3)
    expected = net[2:](net[1](net[0](x)) + 1)
    with (
        rewrite(net, {"1:output": add_one, "1:output.grad": halve, "2:input.input.grad": halve}),
        torch.inference_mode(),
    ):
        assert torch.equal(net(x), expected)


def test_meta_and_fake_tensors() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 4), nn.Flatten(), nn.Linear(4, 2))
    rules: dict[str, Any] = {
        "*:output": halve,
        "*:output.grad": halve,
        "*:input.input.grad": halve,
        "0:weight.grad": halve,
    }
    with rewrite(net, rules):
        out = net(torch.randn(5, 3, device="meta"))
        out.sum().backward()
    assert out.device.type == "meta"
    assert net[0].weight.grad is not None
    plain = make_net()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), rewrite(plain, {"1:output": halve}):
        assert plain(torch.randn(5, 3)).shape == (5, 1)
