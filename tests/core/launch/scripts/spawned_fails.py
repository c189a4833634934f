"""A process that it spawns raises in its second backward pass."""

import runpy
import sys

import torch.multiprocessing


def work(index):
    sys.argv[1:] = ["raise"]
    runpy.run_path(__file__.replace("spawned_fails", "fails_in_backward"))


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=1)
