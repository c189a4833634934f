"""A Wasserstein critic with a gradient penalty: gradients of gradients, and five critic steps to one."""

import torch
from torch import nn

torch.manual_seed(44)


class MLP(nn.Module):
    def __init__(self, inside, outside, width=48):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inside, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outside)
        )

    def forward(self, x):
        return self.layers(x)


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
    return ((slope.norm(dim=1) - 1) ** 2).mean()


generator, critic = MLP(4, 2), MLP(2, 1)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=4e-3, betas=(0.0, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.0, 0.9))
for iteration in range(90):
    for _ in range(4):
        real = torch.randn(64, 2) * 0.5 + torch.tensor([2.0, -1.0])
        with torch.no_grad():
            fake = generator(torch.randn(64, 4))
        loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
        optimizer_c.zero_grad()
        loss_c.backward()
        optimizer_c.step()
    loss_g = -critic(generator(torch.randn(64, 4))).mean()
    optimizer_g.zero_grad()
    loss_g.backward()
    optimizer_g.step()
with torch.no_grad():
    centre = generator(torch.randn(500, 4)).mean(dim=0)
print(f"distance {(centre - torch.tensor([2.0, -1.0])).norm().item():.4f}")
