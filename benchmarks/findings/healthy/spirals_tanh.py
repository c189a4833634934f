"""Three spirals, a deep tanh net, SGD with momentum and full batches."""

import math

import torch
from torch import nn


def make_spirals(points_per_arm, arms=3):
    radius = torch.linspace(0.1, 1.0, points_per_arm)
    xs, ys = [], []
    for arm in range(arms):
        angle = radius * 4.0 + arm * 2 * math.pi / arms + 0.1 * torch.randn(points_per_arm)
        xs.append(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))
        ys.append(torch.full((points_per_arm,), arm))
    return torch.cat(xs), torch.cat(ys)


class SpiralNet(nn.Module):
    def __init__(self, width=48, depth=5):
        super().__init__()
        self.stem = nn.Linear(2, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)
        self.act = nn.Tanh()
        self.init_weights()

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=1.4)
                nn.init.zeros_(module.bias)

    def forward(self, x):
        x = self.act(self.stem(x))
        for layer in self.hidden:
            x = self.act(layer(x))
        return self.head(x)


torch.manual_seed(3)
points, arms = make_spirals(80)
net = SpiralNet()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(250):
    scores = net(points)
    loss = nn.functional.cross_entropy(scores, arms)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
print("final loss", loss.item())
