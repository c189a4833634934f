"""A denoising autoencoder: sigmoid output, binary cross-entropy, Adam."""

import torch
import torch.nn.functional as F
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, code=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, code), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


def make_pictures(count):
    rows = torch.randint(0, 8, (count,))
    columns = torch.randint(0, 8, (count,))
    pictures = torch.zeros(count, 8, 8)
    pictures[torch.arange(count), rows, :] = 1.0
    pictures[torch.arange(count), :, columns] = 1.0
    return pictures.flatten(1)


torch.manual_seed(21)
data = make_pictures(800)
autoencoder = Autoencoder()
optim = torch.optim.Adam(autoencoder.parameters(), lr=5e-3)
losses = []
for epoch in range(16):
    for batch in data[torch.randperm(len(data))].split(50):
        noisy = (batch + 0.2 * torch.randn_like(batch)).clamp(0, 1)
        restored = autoencoder(noisy)
        loss = F.binary_cross_entropy(restored, batch)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
print(f"mean of the last losses {sum(losses[-16:]) / 16:.4f}")
