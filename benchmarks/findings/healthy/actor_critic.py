"""Actor and critic with one trunk: balance a pole that is made here."""

from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class Pole:
    def reset(self):
        self.state = torch.randn(2) * 0.05
        return self.state.clone()

    def step(self, action):
        angle, speed = self.state.tolist()
        speed += 0.2 * (angle + (0.5 if action == 1 else -0.5)) + 0.01 * torch.randn(()).item()
        angle += 0.1 * speed
        self.state = torch.tensor([angle, speed])
        return self.state.clone(), 1.0, abs(angle) > 0.3


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(2, 48)
        self.action_head = nn.Linear(48, 2)
        self.value_head = nn.Linear(48, 1)

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def finish_episode(saved, rewards, optimizer, gamma=0.97):
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.insert(0, total / 10)
    returns = torch.tensor(returns)
    policy_losses, value_losses = [], []
    for (log_prob, value), expected in zip(saved, returns, strict=True):
        advantage = expected - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, expected.view(1)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()


def main():
    torch.manual_seed(543)
    model, pole = ActorCritic(), Pole()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    running = 10.0
    for episode in range(90):
        state, saved, rewards = pole.reset(), [], []
        for _ in range(60):
            probabilities, value = model(state)
            choice = Categorical(probabilities)
            action = choice.sample()
            saved.append(SavedAction(choice.log_prob(action), value))
            state, reward, done = pole.step(action.item())
            rewards.append(reward)
            if done:
                break
        running = 0.9 * running + 0.1 * len(rewards)
        finish_episode(saved, rewards, optimizer)
    print(f"running length {running:.1f}")


if __name__ == "__main__":
    main()
