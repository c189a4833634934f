"""Rules that add a layer's input to its output make the net that has the sum in its code, gradients and all."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograd as rg
from tests.examples.scripts import load_script

script = load_script("add_residual")


class Residual(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x


def make_net(layers: int = 6) -> Any:
    torch.manual_seed(0)
    return script.make_net(layers)


def rules_for(net: nn.Module) -> dict[str, Any]:
    return {site: rule for name, _ in net.named_children() for site, rule in script.residual_around(name).items()}


def gradients(net: nn.Module, output: Tensor, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().mean(), [x, *net.parameters()]))


def test_it_is_the_net_with_residuals_in_its_code() -> None:
    net, x = make_net(), torch.randn(8, 16, requires_grad=True)
    with rg.rewrite(net, rules_for(net)):
        output = net(x)
        ours = gradients(net, output, x)
    expected = nn.Sequential(*map(Residual, make_net()))
    assert torch.equal(output, expected(x))
    for ours_, theirs in zip(ours, gradients(expected, expected(x), x), strict=True):
        torch.testing.assert_close(ours_, theirs)


def test_so_it_is_where_the_layers_are_computed_again() -> None:
    net, x = make_net(), torch.randn(8, 16, requires_grad=True)
    with rg.rewrite(net, rules_for(net)):
        for _ in range(2):
            ours = gradients(net, checkpoint(net, x, use_reentrant=False), x)
    expected = nn.Sequential(*map(Residual, make_net()))
    for ours_, theirs in zip(ours, gradients(expected, expected(x), x), strict=True):
        torch.testing.assert_close(ours_, theirs)


def test_the_rules_hold_no_activation_behind_the_forward() -> None:
    net, x = make_net(), torch.randn(8, 16)
    seen: list[weakref.ref[Tensor]] = []
    handle = net[2].register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    gc.disable()
    try:
        with rg.rewrite(net, rules_for(net)), torch.no_grad():
            net(x)
            assert [each() for each in seen] == [None]
    finally:
        gc.enable()
        handle.remove()


def test_it_prints_that_the_gradient_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    script.main()
    without, with_residuals = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    torch.manual_seed(0)
    net, x = script.make_net(), torch.randn(32, 16)
    residual = nn.Sequential(*map(Residual, net))
    for printed, model in ((without, net), (with_residuals, residual)):
        norm = torch.autograd.grad(model(x).square().mean(), net[0][0].weight)[0].norm()
        assert printed == pytest.approx(norm.item(), rel=1e-2)
    assert with_residuals > 1e6 * without
