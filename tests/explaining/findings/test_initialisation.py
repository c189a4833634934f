import pytest
import torch
from torch import nn

import retrograd as rg


class Gated(nn.Module):
    """A second branch that a mask switches off, or that has two rows of zeros behind it, or none."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 1)
        self.affine = nn.Parameter(torch.tensor([1.0, 0.5, 1.0, 0.0]).repeat(3, 1))
        self.gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.sin(self.affine[:, 0] * x[:, :1] + self.affine[:, 1]) * self.affine[:, 2] + self.affine[:, 3]
        return torch.tanh(self.a(x)).sum(1) + self.gate * branch.sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_branch_that_is_switched_off_gets_no_gradient_and_one_that_is_on_learns_as_one(gate: float) -> None:
    """The oracle is what the rows are after training, and whether they have moved."""
    torch.manual_seed(0)
    net = Gated(gate)
    start = net.affine.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with rg.record(net) as recording:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert bool((net.affine == net.affine[0]).all())
    assert torch.equal(net.affine, start) == (gate == 0)
    found = rg.explain(recording)
    assert bool(found.of("symmetric-init")) == (gate == 1)
    assert bool(found.of("missing-gradient")) == (gate == 0)


@pytest.mark.parametrize(("rate", "is_found"), [(0.0, False), (0.01, True)])
def test_rows_that_no_update_has_changed_do_not_learn_as_one(rate: float, *, is_found: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    nn.init.constant_(net[2].weight, 0.1)
    nn.init.constant_(net[2].bias, 0.0)
    nn.init.constant_(net[4].weight, 0.1)
    groups = [{"params": net[2].parameters(), "lr": rate}, {"params": net[0].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    with rg.record(net) as recording:
        for _ in range(10):
            optimizer.zero_grad()
            net(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert bool((net[2].weight == net[2].weight[0]).all())
    assert torch.equal(net[2].weight, torch.full((8, 8), 0.1)) == (rate == 0)
    assert bool(rg.explain(recording).of("symmetric-init")) == is_found
