"""A GAN on a ring of points: two optimizers, and the discriminator's step detaches what was generated."""

import math

import torch
from torch import nn

torch.manual_seed(8)
NOISE = 8

generator = nn.Sequential(
    nn.Linear(NOISE, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2)
)
discriminator = nn.Sequential(
    nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=5e-3, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()


def real_points(count):
    angle = torch.rand(count) * 2 * math.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
for iteration in range(300):
    optimizer_d.zero_grad()
    fake = generator(torch.randn(64, NOISE))
    loss_d = bce(discriminator(real_points(64)), ones) + bce(discriminator(fake.detach()), zeros)
    loss_d.backward()
    optimizer_d.step()

    optimizer_g.zero_grad()
    fake = generator(torch.randn(64, NOISE))
    loss_g = bce(discriminator(fake), ones)
    loss_g.backward()
    optimizer_g.step()
    if iteration % 50 == 0:
        print(f"{iteration}: d {loss_d.item():.3f} g {loss_g.item():.3f}")

with torch.no_grad():
    radius = generator(torch.randn(1000, NOISE)).norm(dim=1)
print(f"distance from the ring {(radius - 1).abs().mean().item():.3f}")
