"""Q-learning in a corridor: the target is of a copy of the network, which follows it every so often."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

LENGTH = 6


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(LENGTH, 48)
        self.fc2 = nn.Linear(48, 2)

    def forward(self, place):
        return self.fc2(F.relu(self.fc1(F.one_hot(place, LENGTH).float())))


def walk(place, action):
    place = max(0, place + (1 if action else -1))
    done = place == LENGTH - 1
    return place, float(done), done


random.seed(5)
torch.manual_seed(5)
memory = []
for _ in range(60):
    place = 0
    for _ in range(25):
        action = random.randrange(2)
        after, reward, done = walk(place, action)
        memory.append((place, action, reward, after, float(done)))
        if done:
            break
        place = after

online = QNet()
target = copy.deepcopy(online)
optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
for step in range(300):
    place, action, reward, after, done = map(torch.tensor, zip(*random.sample(memory, 64), strict=True))
    values = online(place).gather(1, action.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = target(after).max(dim=1).values
    expected = reward + 0.9 * best * (1 - done)
    loss = F.smooth_l1_loss(values, expected)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        target.load_state_dict(online.state_dict())
with torch.no_grad():
    right = 0.9 ** torch.arange(LENGTH - 2, -1, -1.0)
    print(f"error {(online(torch.arange(LENGTH - 1))[:, 1] - right).abs().max().item():.4f}")
