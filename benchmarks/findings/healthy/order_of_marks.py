"""A transformer over a signal: which of two marks comes first. Positions are sines of a table."""

import math

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, width, longest=64):
        super().__init__()
        at = torch.arange(longest).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(1000.0) / width))
        table = torch.zeros(1, longest, width)
        table[0, :, 0::2], table[0, :, 1::2] = torch.sin(at * rate), torch.cos(at * rate)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[:, : x.size(1)]


class Order(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inner = nn.Linear(3, width)
        self.positions = Positions(width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        return self.head(self.encoder(self.positions(self.inner(x))).mean(dim=1))


def sample(count, length=12):
    x = torch.zeros(count, length, 3)
    x[:, :, 2] = torch.randn(count, length) * 0.3
    places = torch.stack([torch.randperm(length)[:2] for _ in range(count)])
    rows = torch.arange(count)
    x[rows, places[:, 0], 0], x[rows, places[:, 1], 1] = 1.0, 1.0
    return x, (places[:, 0] < places[:, 1]).long()


torch.manual_seed(1)
model = Order()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(150):
    x, y = sample(40)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
x, y = sample(400)
with torch.no_grad():
    print("right", (model(x).argmax(1) == y).float().mean().item())
