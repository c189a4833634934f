"""Trains three steps and ends in the way that its argument names."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from toy import Net, make_batch, show

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    show(loss)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "exit":
    sys.exit(3)
elif sys.argv[1] == "interrupt":
    raise KeyboardInterrupt
elif sys.argv[1] == "caught":
    try:
        sys.exit(3)
    except SystemExit:
        sys.exit()
elif sys.argv[1] == "raise":
    raise ValueError("as planned")
while Path("run").exists() and not [*Path().glob("run/rank*/statistics/part-*.parquet")]:
    time.sleep(0.1)  # what is recorded is written every two seconds
if sys.argv[1] == "_exit":
    os._exit(4)
else:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
