"""Ten threads run a pass each, of tensors alone, while others make tuples of generators."""

import threading

import torch

errors = []
done = threading.Event()


def build() -> None:
    while not done.is_set():
        try:
            tuple(number * 2 for number in range(300))
        except SystemError as error:
            errors.append(error)


def train() -> None:
    x = torch.ones(5, 5, requires_grad=True)
    y = (x + 3) * (x + 4) * 0.5
    y.sum().backward()


builders = [threading.Thread(target=build) for _ in range(2)]
trainers = [threading.Thread(target=train) for _ in range(10)]
for thread in (*builders, *trainers):
    thread.start()
for thread in trainers:
    thread.join()
done.set()
for thread in builders:
    thread.join()
print("errors:", len(errors))
