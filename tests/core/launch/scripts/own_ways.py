"""Modules that answer in ways of their own, also while they are constructed; and one that cannot be recorded at all."""

import sys
import threading

import torch
from torch import nn
from toy import show

torch.manual_seed(0)


class Wrapper(nn.Module):
    """Has what the wrapped model has."""

    def __init__(self, model):
        super().__init__()
        self.head = nn.Linear(1, 1)
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, x):
        return self.head(self.model(x))


class Elementwise(nn.Module):
    """Compares as tensors do, and is found equal to others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.size = 3

    def __eq__(self, other):
        return torch.ones(2) == 1

    def __hash__(self):
        return self.size

    def __bool__(self):
        raise RuntimeError("has no boolean value")

    def __len__(self):
        return 0

    @property
    def ready(self):
        raise RuntimeError("not yet")

    def forward(self, x):
        return self.layer(x)


class Odd(nn.Module):
    """Cannot be looked at: it has no forward that anybody may ask for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 3))

    @property
    def forward(self):
        raise RuntimeError("call me")

    def __call__(self, x):
        return nn.functional.linear(x, self.weight)


def make(kind):
    if kind == "thread":
        made = []
        thread = threading.Thread(target=lambda: made.append(Wrapper(nn.Linear(3, 1))))
        thread.start()
        thread.join()
        return made[0]
    return {"getattr": lambda: Wrapper(nn.Linear(3, 1)), "elementwise": Elementwise, "odd": Odd}[kind]()


for net in (make(sys.argv[1]), *((nn.Linear(3, 1),) if sys.argv[1] == "odd" else ())):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 3)).square().mean()
        loss.backward()
        optimizer.step()
        show(loss)
