"""Trains one model after the other, as a sweep does; prints how many of them are still there."""

import gc
import weakref

import torch
from torch import nn
from toy import Net, make_batch, show

torch.optim.SGD([torch.zeros(1)])  # the first optimizer loads the compiler, which leaves frames about
gc.collect()
gc.disable()
made: list[weakref.ref[nn.Module]] = []


def train(rate: float) -> None:
    net = Net()
    made.append(weakref.ref(net))
    made.extend(weakref.ref(module) for module in net.children())
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(2):
        x, y = make_batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    show(loss)


def sweep_in_one_function() -> None:
    """The variables of a function that goes on."""
    for _ in range(3):
        teacher, student = Net(), Net()
        made.extend((weakref.ref(teacher), weakref.ref(student)))
        for net in (teacher, student):
            torch.optim.SGD(net.parameters(), 0.1)
            nn.functional.cross_entropy(net(torch.ones(8, 4)), torch.zeros(8).long()).backward()
        del teacher, student, net
        print(sum(each() is not None for each in made))


torch.manual_seed(0)
for number in range(6):
    train(0.01 * (number + 1))
    print(sum(each() is not None for each in made))
sweep_in_one_function()
