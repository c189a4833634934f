"""A gradient that is not finite, from the branch of ``where`` that is not taken; prints what became of it."""

import torch
from torch import nn
from toy import Net, make_batch, show


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x):
        hidden = self.net.body(x)
        length = hidden.square().sum(1, keepdim=True).sqrt()
        unit = torch.where(length > 0, hidden / length, hidden)
        return self.net.head(unit)


torch.manual_seed(0)
model = Normed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x, y = make_batch()
    if step == 1:
        x[3] = 0
        model.net.body[0].bias.data.zero_()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    show(sum(p.grad.isnan().sum() for p in model.parameters()))
