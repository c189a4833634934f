"""Compiles a whole model, a part of it, or a function around it, and counts graphs."""

import sys

import torch
from torch import nn
from toy import Net, make_batch, show

graphs = 0


def backend(graph, inputs):
    global graphs
    graphs += 1
    return graph.forward


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


torch.manual_seed(0)
net = model = Net()
net.body = Body()
if sys.argv[1] == "model":
    model = torch.compile(net, backend=backend)
elif sys.argv[1] == "in-place":
    net.compile(backend=backend)
elif sys.argv[1] == "part":
    net.body.compile(backend=backend)


def evaluate(x, y):
    return nn.functional.cross_entropy(model(x), y)


if sys.argv[1] == "function":
    evaluate = torch.compile(evaluate, backend=backend)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(30):
    loss = evaluate(*make_batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
print(graphs, "graphs")
