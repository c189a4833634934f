import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
parameters = list(net.parameters())
for _ in range(3):
    x, y = make_batch()
    loss = nn.functional.cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.1 * gradient
    show(loss)
