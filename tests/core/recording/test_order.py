"""The order in which sites were reached: that of the forward, then of the backward pass, then of the update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.core.recording.collector import Collector, collect


class Crossed(nn.Module):
    """Runs its parts in another order than that in which they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.spoils = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(self.c(x).tanh()).tanh()
        if self.spoils:
            y = y / 0 * 0
        return self.b(y)


def listen(net: nn.Module, heard: list[str]) -> None:
    """Note by hooks of torch's own in which order outputs and gradients come."""
    for path, module in net.named_modules():

        def after(module: nn.Module, args: object, output: torch.Tensor, path: str = path or "self") -> None:
            heard.append(f"{path}:output")
            if output.requires_grad:
                output.register_hook(lambda gradient: heard.append(f"{path}:output.grad"))

        module.register_forward_hook(after)
    for name, parameter in net.named_parameters():
        site = ":".join(name.rsplit(".", 1))
        parameter.register_hook(lambda gradient, site=site: heard.append(f"{site}.grad"))


def by_order(seen: Collector, **where: object) -> list[str]:
    rows = [row for row in seen.rows if all(getattr(row, name) == value for name, value in where.items())]
    assert len({row.order for row in rows}) == len(rows)
    return [row.site for row in sorted(rows, key=lambda row: row.order)]


def first_of(heard: list[str]) -> list[str]:
    return list(dict.fromkeys(heard))


def test_the_order_is_that_of_execution() -> None:
    torch.manual_seed(0)
    net = Crossed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    heard: list[str] = []
    with collect(net) as seen:
        listen(net, heard)
        for step in range(3):
            heard.clear()
            net(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            reached = first_of(heard)
            seen.facts[str(step)] = reached
    for step in range(3):
        found = by_order(seen, step=step)
        updates = [site for site in found if site.endswith(".update")]
        assert found == [*seen.facts[str(step)], *updates]
        assert len(updates) == 6


def test_the_first_nan_by_order_is_its_origin() -> None:
    net = Crossed()
    net.spoils = True
    with collect(net) as seen:
        net(torch.randn(4, 3)).sum().backward()
    spoilt = [row for row in seen.rows if row.nan]
    assert min(spoilt, key=lambda row: row.order).site == "b:output"
    gradients = [row for row in spoilt if row.backward == 0]
    assert min(gradients, key=lambda row: row.order).site == "b:weight.grad"


def test_each_micro_batch_and_each_further_pass_begins_anew() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with collect(net, sites="*:output*") as seen:
        for _ in range(2):
            out = net(torch.randn(4, 3)).sum()
            out.backward(retain_graph=True)
            out.backward()
    forward = ["0:output", "1:output", "2:output", "self:output"]
    for micro in range(2):
        first = by_order(seen, micro=micro, backward=-1) + by_order(seen, micro=micro, backward=0)
        assert first[:4] == forward
        assert sorted(first[4:6]) == ["2:output.grad", "self:output.grad"]
        assert first[6:] == ["1:output.grad", "0:output.grad"]
        assert by_order(seen, micro=micro, backward=1)[2:] == first[6:]
        assert min(row.order for row in seen.rows if (row.micro, row.backward) == (micro, 1)) == 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_evaluation_has_an_order_too(context: type) -> None:
    net = Crossed()
    with collect(net) as seen, context():
        net(torch.randn(4, 3))
    assert by_order(seen) == ["c:output", "a:output", "b:output", "self:output"]
