"""A small diffusion model of points on two moons: the net predicts the noise."""

import math

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.inlet = nn.Linear(2, width)
        self.middle = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.outlet = nn.Linear(width, 2)
        nn.init.zeros_(self.outlet.weight)
        nn.init.zeros_(self.outlet.bias)

    def forward(self, x, t):
        rates = torch.exp(torch.linspace(0, math.log(50.0), 8))
        waves = t.unsqueeze(1) * rates
        h = self.inlet(x) + self.time(torch.cat([waves.sin(), waves.cos()], dim=1))
        for layer in self.middle:
            h = h + nn.functional.silu(layer(h))
        return self.outlet(h)


def moons(count):
    angle = torch.rand(count) * math.pi
    side = torch.randint(0, 2, (count,)) * 2.0 - 1
    return torch.stack([angle.cos() + 0.5 * (1 - side), side * angle.sin() - 0.25 * (1 - side)], dim=1)


torch.manual_seed(30)
model = Denoiser()
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
running = 1.0
for step in range(200):
    clean, noise, t = moons(128), torch.randn(128, 2), torch.rand(128)
    signal = torch.cos(t * math.pi / 2).unsqueeze(1)
    noisy = signal * clean + (1 - signal**2).sqrt() * noise
    loss = (model(noisy, t) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    running = 0.97 * running + 0.03 * loss.item()
print(f"loss {running:.4f}")
