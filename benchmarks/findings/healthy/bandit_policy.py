"""A policy for a bandit with contexts: advantages without a graph, an entropy bonus, a critic of its own."""

import torch
from torch import nn
from torch.distributions import Categorical

CONTEXTS, ARMS = 12, 5


class Policy(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(CONTEXTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.arms = nn.Linear(width, ARMS)

    def forward(self, context):
        return Categorical(logits=self.arms(self.body(context)))


def pull(worth, context, arm):
    return worth[context, arm] + 0.3 * torch.randn(len(context))


def main():
    torch.manual_seed(12)
    worth = torch.rand(CONTEXTS, ARMS)
    policy, critic = Policy(), nn.Sequential(nn.Embedding(CONTEXTS, 16), nn.Linear(16, 1))
    actor_optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(400):
        context = torch.randint(0, CONTEXTS, (64,))
        choice = policy(context)
        arm = choice.sample()
        gain = pull(worth, context, arm)
        value = critic(context).squeeze(-1)
        log_prob = choice.log_prob(arm)
        actor_loss = -(log_prob * (gain - value.detach())).mean() - 0.01 * choice.entropy().mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        critic_loss = nn.functional.mse_loss(value, gain)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
    context = torch.arange(CONTEXTS)
    with torch.no_grad():
        chosen = worth[context, policy(context).probs.argmax(-1)]
    print(f"share of the best {(chosen / worth.max(-1).values).mean().item():.3f}")


main()
