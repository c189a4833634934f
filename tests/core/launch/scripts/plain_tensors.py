"""Linear regression of plain tensors: with an optimizer, or by hand."""

import sys

import torch

torch.manual_seed(0)
x = torch.randn(20, 3)
y = x @ torch.tensor([1.0, -2.0, 0.5])
w = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1) if sys.argv[1] == "optimizer" else None
for _ in range(5):
    loss = (x @ w - y).square().mean()
    loss.backward()
    if optimizer is None:
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
    else:
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())
