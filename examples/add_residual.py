"""Put a residual around layers of a net whose code stays as it is: layer(x) becomes layer(x) + x.

    python examples/add_residual.py

Forty layers of tanh in a row: hardly any gradient comes back to the first. A pair of rules turns each layer into a
residual one: the rule on its input remembers what goes in, the rule on its output adds it. What they return is part of
the graph, so gradients flow back on both ways.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograd as rg

Rule = Callable[[Tensor, rg.rules.SiteState], Tensor | None]


def residual_around(layer: str) -> dict[str, Rule]:
    """Rules, by site, that add a layer's input to its output."""
    held: dict[str, Tensor] = {}

    def remember(x: Tensor, state: rg.rules.SiteState) -> None:
        held["x"] = x

    def add(output: Tensor, state: rg.rules.SiteState) -> Tensor:
        return output + held.pop("x")

    return {f"{layer}:input.input": remember, f"{layer}:output": add}


def make_net(layers: int = 40, width: int = 16) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def measure_gradient(net: nn.Sequential, x: Tensor) -> Tensor:
    """The norm of the gradient of the first layer's weight."""
    net.zero_grad()
    net(x).square().mean().backward()
    return net[0][0].weight.grad.norm()


def main() -> None:
    torch.manual_seed(0)
    net, x = make_net(), torch.randn(32, 16)
    print(f"gradient of the first layer as it is:       {measure_gradient(net, x):.2e}")

    rules: dict[str, Rule] = {}
    for name, _ in net.named_children():
        rules |= residual_around(name)
    with rg.rewrite(net, rules):
        print(f"gradient of the first layer with residuals: {measure_gradient(net, x):.2e}")


if __name__ == "__main__":
    main()
