import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
x, y = make_batch(32)
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    show(loss)
    return loss


for _ in range(3):
    optimizer.step(closure)
