"""A small U-net with batch norm, trained under bfloat16 autocast: where the discs are."""

import torch
import torch.nn.functional as F
from torch import nn


def double_conv(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = double_conv(1, 8)
        self.down2 = double_conv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge = double_conv(16, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        return self.out(self.merge(torch.cat([self.up(second), first], dim=1)))


def discs(count, size=16):
    grid = torch.arange(size, dtype=torch.float32)
    centre = torch.rand(2, count, 1, 1) * 10 + 3
    mask = ((grid.view(1, -1, 1) - centre[0]) ** 2 + (grid.view(1, 1, -1) - centre[1]) ** 2 < 12).float()
    return (mask + 0.5 * torch.randn(count, size, size)).unsqueeze(1), mask.unsqueeze(1)


def dice(prediction, mask):
    both = (prediction * mask).sum()
    return (2 * both / (prediction.sum() + mask.sum())).item()


def main():
    torch.manual_seed(12)
    net = UNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(60):
        images, masks = discs(16)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(images)
        loss = F.binary_cross_entropy_with_logits(logits.float(), masks)
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        images, masks = discs(64)
        found = (net(images) > 0).float()
    print("dice", dice(found, masks))


if __name__ == "__main__":
    main()
