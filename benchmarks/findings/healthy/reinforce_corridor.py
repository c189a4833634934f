"""REINFORCE in a corridor: the loss is negative as often as not, and its size says nothing."""

import torch
from torch import nn
from torch.distributions import Categorical

LENGTH = 7


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(LENGTH, 32)
        self.affine2 = nn.Linear(32, 2)

    def forward(self, x):
        return self.affine2(torch.tanh(self.affine1(x)))


def play(policy):
    place, log_probs, rewards = LENGTH // 2, [], []
    for _ in range(12):
        state = nn.functional.one_hot(torch.tensor(place), LENGTH).float()
        choice = Categorical(logits=policy(state.unsqueeze(0)))
        action = choice.sample()
        log_probs.append(choice.log_prob(action))
        place += 1 if action.item() == 1 else -1
        done = place in (0, LENGTH - 1)
        rewards.append(1.0 if place == LENGTH - 1 else -0.1)
        if done:
            break
    return log_probs, rewards


def discounted(rewards, gamma=0.95):
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.insert(0, total)
    return torch.tensor(returns)


torch.manual_seed(543)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
running, baseline = 0.0, 0.0
for episode in range(120):
    log_probs, rewards = play(policy)
    returns = discounted(rewards)
    advantage = returns - baseline
    baseline = 0.9 * baseline + 0.1 * returns.mean().item()
    loss = -(torch.cat(log_probs) * advantage).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    running = 0.95 * running + 0.05 * sum(rewards)
print(f"running reward {running:.3f}")
