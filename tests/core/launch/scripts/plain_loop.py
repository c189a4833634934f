import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
for _ in range(4):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    optimizer.step()
    show(loss)
net.eval()
with torch.no_grad():
    x, y = make_batch()
    show(criterion(net(x), y))
