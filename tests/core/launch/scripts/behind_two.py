"""Two optimizers, of which one updates three times and then the other once: 12 and 4 updates."""

import sys

import torch
from torch import nn
from toy import show

torch.manual_seed(0)
if sys.argv[1] == "critic":  # the generator's loss goes through it
    generator, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    rare, often = (torch.optim.Adam(each.parameters(), lr=0.001) for each in (generator, critic))

    def find_losses() -> tuple[torch.Tensor, torch.Tensor]:
        fake = generator(torch.randn(8, 4))
        return critic(fake.detach()).mean() - critic(torch.randn(8, 2)).mean(), -critic(fake).mean()

else:
    body, first, second = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 2)
    often = torch.optim.SGD([*body.parameters(), *first.parameters()], lr=0.01)
    rare = torch.optim.SGD(second.parameters(), lr=0.01)

    def find_losses() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, 4)
        return first(body(x)).square().mean(), second(body(x).detach()).square().mean()


for number in range(12):
    loss, _ = find_losses()
    often.zero_grad()
    loss.backward()
    often.step()
    if number % 3 == 2:
        _, other = find_losses()
        rare.zero_grad()
        other.backward()
        rare.step()
show(loss)
