import torch
from toy import Net, make_batch

net = Net()
print(net(make_batch()[0]).shape)
with torch.no_grad():
    net(make_batch()[0])
