"""A variational autoencoder; the KL term is faded in, so the loss rises for a while, as it should."""

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, pixels=64, hidden=64, latent=4):
        super().__init__()
        self.fc1 = nn.Linear(pixels, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.mu(h), self.logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return self.fc4(F.relu(self.fc3(z)))

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(logits, x, mu, logvar, beta):
    reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / len(x)
    return reconstruction + beta * kl, reconstruction


def blobs(count):
    grid = torch.arange(8.0)
    row, column = torch.rand(2, count, 1, 1) * 5 + 1
    distance = (grid.view(1, 8, 1) - row) ** 2 + (grid.view(1, 1, 8) - column) ** 2
    return torch.exp(-distance / 3).flatten(1)


def main():
    torch.manual_seed(4)
    data = blobs(640)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for _ in range(15):
        for x in data[torch.randperm(len(data))].split(64):
            beta = min(1.0, step / 100)
            logits, mu, logvar = model(x)
            loss, reconstruction = loss_function(logits, x, mu, logvar, beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    print(f"reconstruction {reconstruction.item():.3f}")


if __name__ == "__main__":
    main()
