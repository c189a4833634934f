import torch
from accelerate import Accelerator
from torch import nn
from toy import Net, make_batch, show

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
net = Net()
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(4):
    x, y = make_batch()
    with accelerator.accumulate(net):
        loss = nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    show(loss)
