import sys

import torch
from accelerate import Accelerator
from task import Net, make_data
from torch.utils.data import DataLoader, TensorDataset

from retrograd.integrations.accelerate import RetrogradTracker

tracker = RetrogradTracker(ranks="0" if "first" in sys.argv else "all")
accelerator = Accelerator(cpu=True, log_with=tracker)
net = Net()
loader = DataLoader(TensorDataset(*make_data()), batch_size=2)
model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
accelerator.init_trackers("demo")
tracker.watch(accelerator, model)
for x, labels in loader:
    accelerator.backward(model(x, labels)["loss"])
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
