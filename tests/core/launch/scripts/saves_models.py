"""Trains a model and saves it whole, in every way; prints what was written, to the byte."""

import copy
import hashlib
import io
import pickle
import threading

import torch
from torch import nn
from torch.nn.modules.linear import Linear
from torch.optim.swa_utils import AveragedModel
from toy import Net, make_batch


def see(*_: object) -> None: ...


def write(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    print(hashlib.sha256(file.getvalue()).hexdigest()[:16], len(file.getvalue()))
    return file.getvalue()


def tables(model: nn.Module) -> list[int]:
    return [len(value) for each in model.modules() for key, value in vars(each).items() if key.endswith("_hooks")]


def write_meanwhile(model: nn.Module, sizes: list[int]) -> None:
    for _ in range(20):
        sizes.append(len(pickle.dumps(model)))


torch.manual_seed(0)
net = Net()
net.head.register_forward_hook(see)
average = AveragedModel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
sizes: list[int] = []
writer = threading.Thread(target=write_meanwhile, args=(net, sizes))
for number in range(6):
    x, y = make_batch()
    if number == 1:
        writer.start()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    average.update_parameters(net)
    write(net)
    write(optimizer)
writer.join()
net.body.register_forward_pre_hook(see)
print(len(sizes), len(set(sizes)))
average(torch.ones(1, 4))
for thing in (net, average, scheduler, net.head.weight, net.state_dict(), optimizer.state_dict()):
    write(thing)
saved = write(net.body)
with torch.serialization.safe_globals([nn.Sequential, Linear, nn.ReLU, set, see]):
    loaded = torch.load(io.BytesIO(saved))
twin = copy.deepcopy(net)
print(tables(loaded), tables(twin), tables(copy.deepcopy(average)))
exported = torch.export.export(twin, (torch.ones(1, 4),))
print(exported.graph_module.code, sorted(exported.state_dict))
