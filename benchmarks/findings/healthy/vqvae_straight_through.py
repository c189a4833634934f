"""Vector quantisation: the nearest code is taken, and the gradient passes straight through."""

import torch
from torch import nn
from torch.nn import functional as F


class Quantizer(nn.Module):
    def __init__(self, codes, size, commitment=0.25):
        super().__init__()
        self.codebook = nn.Embedding(codes, size)
        self.codebook.weight.data.uniform_(-1, 1)
        self.commitment = commitment

    def forward(self, z):
        distances = torch.cdist(z, self.codebook.weight)
        codes = distances.argmin(dim=1)
        quantized = self.codebook(codes)
        loss = F.mse_loss(quantized, z.detach()) + self.commitment * F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), loss


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ELU(), nn.Linear(32, 4))
        self.quantizer = Quantizer(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ELU(), nn.Linear(32, 16))

    def forward(self, x):
        quantized, loss = self.quantizer(self.encoder(x))
        return self.decoder(quantized), loss


torch.manual_seed(77)
prototypes = torch.randn(8, 16)
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(250):
    x = prototypes[torch.randint(0, 8, (64,))] + 0.1 * torch.randn(64, 16)
    restored, quantization = model(x)
    reconstruction = F.mse_loss(restored, x)
    loss = reconstruction + quantization
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"reconstruction {reconstruction.item():.4f}")
