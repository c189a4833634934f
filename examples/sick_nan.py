"""A sick script: attention over the rows of an image in which the blank rows are masked; of one image all are."""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Each row looks at the rows that are not blank: [N, 8, 32] and [N, 8] to [N, 8, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, rows: Tensor, blank: Tensor) -> Tensor:
        scores = self.query(rows) @ self.key(rows).transpose(1, 2) / math.sqrt(32)
        scores = scores.masked_fill(blank.unsqueeze(1), -math.inf)
        return scores.softmax(dim=-1) @ self.value(rows)  # the fault: where all is -inf, softmax is 0 / 0


class Classifier(nn.Module):
    """Images of eight rows, [N, 8, 8], to scores of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.attention = Attention()
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images)
        rows = rows + self.attention(rows, images.sum(dim=2) == 0)
        return self.head(F.relu(rows).mean(dim=1))


torch.manual_seed(0)
torch.set_num_threads(1)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
images[700] = 0  # a picture that nothing was written on

model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step, batch in enumerate(torch.randperm(1500).split(16)):
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}   loss {loss.item():.4f}")
