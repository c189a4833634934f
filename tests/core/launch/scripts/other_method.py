import torch
from torch import nn
from toy import Net, make_batch, show


class Classifier(Net):
    def loss(self, x, y):
        return nn.functional.cross_entropy(self.head(self.body(x)), y)


torch.manual_seed(0)
net = Classifier()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net.loss(*make_batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss)
