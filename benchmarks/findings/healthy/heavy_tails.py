"""Targets with heavy tails and small batches: the loss has spikes all the time and training is fine."""

import torch
from torch import nn
from torch.distributions import StudentT


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 40), nn.Softplus(), nn.Linear(40, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


torch.manual_seed(66)
noise = StudentT(2.5)
truth = torch.randn(5)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(300):
    x = torch.randn(16, 5)
    y = x @ truth + 0.3 * noise.sample((16,))
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
with torch.no_grad():
    x = torch.randn(1000, 5)
    print(f"error {nn.functional.mse_loss(model(x), x @ truth).item():.4f}")
