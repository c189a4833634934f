"""Self-supervision without negatives: a slow copy of the network gives targets, under no_grad."""

import copy

import torch
from torch import nn


def mlp(inside, hidden, outside):
    return nn.Sequential(nn.Linear(inside, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outside))


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = mlp(24, 64, 16)
        self.predictor = mlp(16, 32, 16)
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def follow(self, momentum=0.98):
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.mul_(momentum).add_(fast, alpha=1 - momentum)

    def forward(self, one, other):
        guess = self.predictor(self.online(one))
        with torch.no_grad():
            goal = self.target(other)
        return 2 - 2 * nn.functional.cosine_similarity(guess, goal, dim=-1).mean()


torch.manual_seed(6)
things = torch.randn(400, 24)
learner = Learner()
trained = [p for p in learner.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trained, lr=1e-3)
for step in range(120):
    chosen = things[torch.randint(0, 400, (64,))]
    one, other = chosen + 0.2 * torch.randn_like(chosen), chosen + 0.2 * torch.randn_like(chosen)
    loss = (learner(one, other) + learner(other, one)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learner.follow()
print(f"similarity loss {loss.item():.4f}")
