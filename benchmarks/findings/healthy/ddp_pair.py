"""Two processes train together; each sees its own half of the data."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def build(rank):
    torch.manual_seed(100)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def work(rank, world, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_num_threads(1)
    model = DistributedDataParallel(build(rank))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    noise = torch.Generator().manual_seed(rank)
    for step in range(80):
        x = torch.randn(32, 6, generator=noise)
        y = (x[:, 0] * x[:, 1] > 0).long()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item() / world:.4f}")
    del model  # torch can hang where a model lets go of the group last
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(2, free_port()), nprocs=2)
