"""A physics-informed net: the loss holds derivatives of the output by the input."""

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, t):
        return self.net(t)


def derivative(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


torch.manual_seed(3)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
start = torch.zeros(1, 1, requires_grad=True)
for iteration in range(300):
    t = (torch.rand(64, 1) * 3).requires_grad_(True)
    u = field(t)
    velocity = derivative(u, t)
    acceleration = derivative(velocity, t)
    residual = acceleration + 0.4 * velocity + 2 * u
    u0 = field(start)
    begin = (u0 - 1).square().mean() + derivative(u0, start).square().mean()
    loss = residual.square().mean() + 10 * begin
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
print(f"loss {loss.item():.4f}")
