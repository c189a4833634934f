"""What runs behind the last update makes no step: an evaluation with grad, micro-batches that no update follows."""

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for number in range(14):  # three updates of four, and two left over
    x, y = make_batch()
    loss = nn.functional.cross_entropy(net(x), y) / 4
    loss.backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
    show(loss)
net.eval()
net(make_batch()[0])
