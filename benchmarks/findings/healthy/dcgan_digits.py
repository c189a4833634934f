"""A convolutional GAN on small pictures, one optimizer a side, the discriminator's loss in two passes."""

import torch
from torch import nn, optim

nz, ngf, ndf = 12, 16, 16


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.Conv2d(ngf, 1, 3, 1, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
        )

    def forward(self, picture):
        return self.main(picture).view(-1)


def pictures(count):
    grid = torch.arange(8.0)
    row, column = torch.rand(2, count, 1, 1) * 4 + 2
    distance = (grid.view(1, 8, 1) - row) ** 2 + (grid.view(1, 1, 8) - column) ** 2
    return (2 * torch.exp(-distance / 4) - 1).unsqueeze(1)


if __name__ == "__main__":
    torch.manual_seed(999)
    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for i in range(120):
        netD.zero_grad()
        real = pictures(32)
        label = torch.full((32,), 1.0)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(32, nz, 1, 1))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        if i % 30 == 0:
            print(f"[{i}] Loss_D: {(errD_real + errD_fake).item():.4f} Loss_G: {errG.item():.4f}")
    with torch.no_grad():
        difference = (netG(torch.randn(256, nz, 1, 1)).mean(0) - pictures(256).mean(0)).abs().mean()
    print(f"difference of the means {difference.item():.4f}")
