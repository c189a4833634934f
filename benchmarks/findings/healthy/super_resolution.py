"""Super resolution by sub-pixel convolution, orthogonal initialisation."""

import torch
import torch.nn.init as init
from torch import nn, optim


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 24, 5, 1, 2)
        self.conv2 = nn.Conv2d(24, 24, 3, 1, 1)
        self.conv3 = nn.Conv2d(24, 12, 3, 1, 1)
        self.conv4 = nn.Conv2d(12, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))


def textures(count):
    grid = torch.linspace(0, 6.28, 16)
    a, b, phase = torch.rand(3, count, 1, 1) * 3
    return (0.5 + 0.5 * torch.sin(a * grid.view(1, 16, 1) + b * grid.view(1, 1, 16) + phase)).unsqueeze(1)


torch.manual_seed(123)
model = Net(2)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(5):
    epoch_loss = 0.0
    for _ in range(20):
        target = textures(8)
        small = nn.functional.avg_pool2d(target, 2)
        optimizer.zero_grad()
        loss = criterion(model(small), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
    print(f"===> Epoch {epoch}: Avg. Loss: {epoch_loss / 20:.4f}")
