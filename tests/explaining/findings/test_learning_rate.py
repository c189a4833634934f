import torch
from torch import nn

import retrograd as rg


def test_a_layer_that_is_thawed_is_not_put_back_while_this_is_recorded() -> None:
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    first.requires_grad_(False)
    before = first.weight.detach().clone()
    with rg.record(model) as recording:
        for step in range(16):
            if step == 8:
                assert torch.equal(before, first.weight)
                first.requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(32, 6)).square().mean().backward()
            optimizer.step()
        assert not torch.equal(before, first.weight)
        assert "not-updated" not in {found.detector for found in rg.explain(recording)}
