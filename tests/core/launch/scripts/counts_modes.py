"""Says in each step how many function modes are on in the forward."""

import torch

net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    optimizer.zero_grad()
    loss = net(torch.ones(2, 3)).sum()
    print("modes", torch._C._len_torch_function_stack())
    loss.backward()
    optimizer.step()
