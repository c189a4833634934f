"""Residual blocks whose activations are computed again in the backward pass."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=32, depth=6):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def target(x):
    return torch.stack([torch.sin(2 * x[:, 0]) * x[:, 1], torch.cos(x[:, 2] + x[:, 3])], dim=1)


if __name__ == "__main__":
    torch.manual_seed(19)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    average = 1.0
    for _ in range(120):
        x = torch.randn(128, 6)
        loss = nn.functional.mse_loss(model(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * loss.item()
    print(f"average loss {average:.4f}")
