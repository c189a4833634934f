"""Loss scaling, autocast and accumulation: rules see unscaled gradients, and the flow stays scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograd.rewriting.rewriting import rewrite
from retrograd.rewriting.rules.rule import Rule, SiteState
from tests.rewriting.models import assert_same, make_net, weights

SCALE = 2.0**12


class Clip(Rule):
    """By value, at a bound that means something else when the gradient is scaled."""

    def __call__(self, value: Tensor, state: SiteState) -> Tensor:
        state.put("largest", value.detach().abs().amax())
        return value.clamp(-0.001, 0.001)


def train(rules: dict[str, Any], *, scaled: bool, fused: bool = False, micro: int = 1, divided: bool = False) -> Any:
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled, growth_interval=2)
    with rewrite(net, rules):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(micro):
                loss = net(torch.randn(5, 3)).square().mean()
                if divided:
                    (scaler.scale(loss) / micro).backward()
                else:
                    scaler.scale(loss / micro).backward()
            scaler.step(optimizer)
            scaler.update()
    return weights(net), rules


RULES = {
    "outputs": "1:output.grad",
    "inputs": "2:input.input.grad",
    "parameters": "2:weight.grad",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("micro", "divided"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("kind", RULES)
def test_the_update_is_that_without_scaling(kind: str, fused: bool, micro: int, divided: bool) -> None:
    site = RULES[kind]
    found, rules = train({site: Clip()}, scaled=True, fused=fused, micro=micro, divided=divided)
    expected, plain = train({site: Clip()}, scaled=False, fused=fused, micro=micro, divided=divided)
    assert_same(found, expected)  # the scale is a power of two, so nothing is rounded
    largest = [each[site].state_at(site).get("largest") for each in (rules, plain)]
    assert torch.equal(*largest)
    assert largest[0] > 0.001  # the rule had something to do


def test_the_flow_stays_scaled() -> None:
    net, x = make_net(), torch.randn(5, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    flows: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, output: output.register_hook(flows.append) and None)
    seen: list[Tensor] = []

    def note(value: Tensor, state: SiteState) -> Tensor:
        seen.append(value)
        return value * 1

    with rewrite(net, {"0:output.grad": note, "4:bias.grad": note}):
        scaler.scale(net(x).sum()).backward()
    net[0]._forward_hooks.clear()
    assert net[4].bias.grad is not None
    assert net[4].bias.grad.item() == 5 * SCALE
    assert seen[0].item() == 5.0
    h = net[0](x)
    h.retain_grad()
    net[1:](h).sum().backward()
    assert torch.equal(seen[1], h.grad)  # type: ignore[arg-type]
    assert torch.equal(flows[0], h.grad * SCALE)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """A half gradient is too small for its type once it is unscaled, so rules see it in single precision."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    x, seen = torch.randn(5, 3), []

    def note(value: Tensor, state: SiteState) -> Tensor:
        seen.append(value)
        return value * 2

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with rewrite(net, {"0:output.grad": note}), torch.autocast("cpu", dtype):
        loss = (net(x) * 1e-7).sum()
    scaler.scale(loss).backward()
    with rewrite(net, {"0:output.grad": note}):
        with torch.autocast("cpu", dtype):
            loss = (net(x).float() * 1e-7).sum()
        scaler.scale(loss).backward()
    (value,) = seen
    assert value.dtype is (torch.float32 if dtype is torch.float16 else torch.bfloat16)
    expected = (net[1].weight.detach().to(dtype).float() * 1e-7).expand(5, 4)
    torch.testing.assert_close(value.float(), expected, rtol=0.02, atol=0)


def test_an_overflow_is_skipped_and_the_scale_changes() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    seen: list[tuple[int, bool]] = []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append((state.step, bool(value.isfinite().all())))

    with rewrite(net, {"4:output.grad": note, "4:bias.grad": note}):
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(5, 3)).sum() * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen == [(0, True)] * 2 + [(1, False)] * 2 + [(2, True)] * 2
    assert scaler.get_scale() == SCALE / 2


def test_two_losses_with_one_scaler() -> None:
    net, seen = make_net(), []

    def note(value: Tensor, state: SiteState) -> None:
        seen.append(value.unique().tolist())

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    with rewrite(net, {"4:output.grad": note}):
        out = net(torch.randn(5, 3))
        first, second = scaler.scale([out.sum(), out.sum() * 3])
        second.backward(retain_graph=True)
        first.backward()
        net(torch.randn(5, 3)).sum().backward()  # not scaled at all
    assert seen == [[3.0], [1.0], [1.0]]
