import os

import torch
from torch import nn
from toy import Net, make_batch


def train(rank, losses):
    os.environ["RANK"] = str(rank)
    torch.manual_seed(rank)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        x, y = make_batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.put((rank, loss.item()))


if __name__ == "__main__":
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train, (queue,), nprocs=2)
    print(sorted(queue.get() for _ in range(6)))
