import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for batch in range(6):
    x, y = make_batch()
    loss = nn.functional.cross_entropy(net(x), y) / 2
    loss.backward()
    show(loss)
    if batch % 2:
        optimizer.step()
        optimizer.zero_grad()
