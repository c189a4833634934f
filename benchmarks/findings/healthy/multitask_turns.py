"""Two tasks in turns on one trunk: each head is without a gradient every other step."""

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(48, 4), "size": nn.Linear(48, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


torch.manual_seed(40)
to_kind, to_size = torch.randn(10, 4), torch.randn(10)
model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
last = {}
for step in range(240):
    x = torch.randn(64, 10)
    task = "kind" if step % 2 == 0 else "size"
    if task == "kind":
        loss = nn.functional.cross_entropy(model(x, task), (x @ to_kind).argmax(dim=1))
    else:
        loss = nn.functional.mse_loss(model(x, task).squeeze(1), torch.sin(x @ to_size / 3))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    last[task] = loss.item()
print(last, "sum", sum(last.values()))
