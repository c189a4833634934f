"""Exports models strictly: before, while and after one is trained, and after the search for models has ended."""

import torch
from torch import nn
from torch.export import Dim, export

torch.manual_seed(0)
X = torch.randn(3, 4)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), lambda x: self.b(x).tanh(), (x,))


net = nn.Sequential(nn.Linear(4, 4), Branches(), nn.Linear(4, 2))
other = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
optimizer = torch.optim.SGD(net.parameters(), 0.1)


def show(model):
    for shapes in (None, ({0: Dim("rows", min=2, max=64)},)):
        program = export(model, (X,), strict=True, dynamic_shapes=shapes)
        print(program.graph, program.module()(X).tolist(), list(program.state_dict))


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        optimizer.step()
    print(loss.item())


show(other)
train(3)
show(net)
train(22)
show(net)
show(other)
print(torch.compile(other, fullgraph=True, backend="aot_eager")(X).sum().item())
show(other)
train(2)
