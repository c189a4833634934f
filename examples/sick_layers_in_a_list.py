"""A sick script: the hidden layers are kept in a plain list, where no optimizer finds them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Images of 64 pixels to scores of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(64, 64), nn.Linear(64, 64)]  # the fault: nn.ModuleList is what modules are found in
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.hidden:
            images = F.relu(layer(images))
        return self.head(images)


torch.manual_seed(0)
torch.set_num_threads(1)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)

model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    batch = torch.randint(1500, (64,))
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 49:
        print(f"step {step + 1}   loss {loss.item():.4f}")
