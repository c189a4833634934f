"""Small trainings whose loss has terms: some of which train nothing, or not what they should, and healthy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

Program = Callable[[], Iterator[Any]]
"""Yields what is recorded first, then trains."""

STEPS = 6


def layers(*sizes: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for first, second in pairwise(sizes):
        made += [nn.Linear(first, second), nn.Tanh()]
    return nn.Sequential(*made[:-1])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.first(h), self.second(h)


def supervised(loss_of: Callable[[TwoHeads, Tensor, Tensor], Tensor], also: nn.Module | None = None) -> Program:
    """A classifier with a second head, and a loss."""

    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        net = TwoHeads()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        yield net if also is None else {"net": net, "also": also}
        for _ in range(STEPS):
            x = torch.randn(16, 6)
            loss = loss_of(net, x, x[:, :3].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


# ---- terms without effect ----


def number_added(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out, again = net(x)
    rebuilt = F.mse_loss(again, x)
    return F.cross_entropy(out, y) + 0.5 * rebuilt.item()  # fault


def copied(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out, again = net(x)
    rebuilt = torch.tensor(((again - x) ** 2).mean().item())  # fault
    return F.cross_entropy(out, y) + 0.2 * rebuilt


def errors_counted(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)[0]
    wrong = (out.argmax(1) != y).float().mean()  # fault
    return F.cross_entropy(out, y) + 2 * wrong


def decayed_by_data(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(net(x)[0], y)
    return loss + 0.1 * sum(p.data.norm() ** 2 for p in net.parameters())  # fault


def cut_output(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out, again = net(x)
    smooth = (again.detach()[:, 1:] - again.detach()[:, :-1]).abs().mean()  # fault
    return torch.stack([F.cross_entropy(out, y), smooth]).sum()


TEACHER = layers(6, 8, 3)


def teacher_alone(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)[0]
    with torch.no_grad():
        known = TEACHER(x)
    soft, hard = F.softmax(known / 2, -1), F.log_softmax(known.flip(0) / 2, -1)  # fault
    return F.cross_entropy(out, y) + 4 * F.kl_div(hard, soft, reduction="batchmean")


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers(6, 12, 12).requires_grad_(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # fault


FEATURES = Features()


def features_without_graph(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    again = net(x)[1]
    return F.l1_loss(again, x) + 3 * ((FEATURES(again) - FEATURES(x)) ** 2).mean()


def dropped_twice(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)[0]
    consistency = F.mse_loss(out.softmax(-1), net(x)[0].softmax(-1))  # fault
    return F.cross_entropy(out, y) + consistency


def adversarial(detached: bool, penalty: bool | None = None, pixels: bool = True) -> Program:
    """A generator and a discriminator, each with an optimizer of its own."""

    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        make, judge = layers(4, 16, 6), layers(6, 16, 1)
        makes, judges = torch.optim.Adam(make.parameters(), 1e-2), torch.optim.Adam(judge.parameters(), 1e-2)
        yield {"make": make, "judge": judge}
        for _ in range(STEPS):
            real, noise = torch.randn(16, 6), torch.randn(16, 4)
            fake = make(noise)
            one, other = judge(real), judge(fake.detach())
            loss = F.softplus(-one).mean() + F.softplus(other).mean()
            if penalty is not None:
                mixed = (real + fake.detach()).requires_grad_()
                [slope] = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=penalty)  # fault of penalty
                loss = loss + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
            judges.zero_grad()
            loss.backward()
            judges.step()
            score = judge(fake.detach() if detached else fake)  # fault of generator
            loss = F.softplus(-score).mean()  # fault of generator: in this line
            if pixels:
                loss = loss + (fake - real).abs().mean()
            makes.zero_grad()
            loss.backward()
            makes.step()

    return train


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = layers(3, 16, 1), layers(3, 16, 1)
        self.log_std = nn.Parameter(torch.zeros(1))

    def rate(self, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return Normal(self.actor(s), self.log_std.exp()).log_prob(a).sum(-1), self.critic(s).squeeze(-1)


def proximal(again: bool) -> Program:
    """PPO, whose old log-probabilities are of the rollout, or computed anew with each new one."""

    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        net = ActorCritic()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        yield {"actor": net.actor, "critic": net.critic}
        for _ in range(3):
            s = torch.randn(32, 3)
            with torch.no_grad():
                a = Normal(net.actor(s), net.log_std.exp()).sample()
                old, _ = net.rate(s, a)
            gain = -((a.squeeze(-1) - s[:, 0]) ** 2)
            for _ in range(3):
                if again:
                    old, _ = net.rate(s, a)  # fault
                new, value = net.rate(s, a)
                ratio, advantage = torch.exp(new - old), gain - value.detach()  # fault where both are in one line
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = -surrogate.mean() + 0.5 * F.mse_loss(value, gain)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    return train


# ---- straight through ----


class Codes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.codes = kind, nn.Embedding(8, 4)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.cdist(z.detach(), self.codes.weight.detach()).argmin(1)
        one_hot = F.one_hot(place, 8).float()
        code = one_hot @ self.codes.weight if self.kind == "product" else self.codes(place)
        own = 0.25 * F.mse_loss(z, code.detach())
        through = z + (code - z).detach()
        if self.kind == "right":
            return through, own + F.mse_loss(code, z.detach())
        if self.kind == "product":
            return through, own + ((through - z.detach()) ** 2).mean()  # fault by hand
        if self.kind == "averaged":
            return through, own
        return through, own + F.mse_loss(through, z.detach())  # fault


class Quantized(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encode, self.quantize, self.decode = layers(6, 4), Codes(kind), layers(4, 6)
        if kind == "averaged":
            self.quantize.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        code, loss = self.quantize(self.encode(x))
        return F.mse_loss(self.decode(code), x) + loss


def quantized(kind: str) -> Program:
    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        net = Quantized(kind)
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 1e-2)
        yield net
        for _ in range(STEPS):
            loss = net(torch.randn(16, 6))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


# ---- targets of Q-learning ----


def q_learning(target_of: Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor], by_hand: bool = False) -> Program:
    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        net, other = layers(4, 16, 3), layers(4, 16, 3)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        yield {"net": net, "other": other}
        for _ in range(STEPS):
            s, later, a = torch.randn(16, 4), torch.randn(16, 4), torch.randint(0, 3, (16,))
            q = net(s).gather(1, a[:, None]).squeeze(1)
            target = target_of(net, other, later, s[:, 0])
            loss = (q - target).pow(2).mean() if by_hand else F.smooth_l1_loss(q, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def of_itself(net: nn.Module, other: nn.Module, later: Tensor, r: Tensor) -> Tensor:
    return r + 0.9 * net(later).max(1).values  # fault


def masked(net: nn.Module, other: nn.Module, later: Tensor, r: Tensor) -> Tensor:
    going = (torch.rand(len(r)) < 0.9).float()
    return r + going * net(later).amax(dim=1) * 0.9  # fault


def double(net: nn.Module, other: nn.Module, later: Tensor, r: Tensor) -> Tensor:
    return r + 0.9 * net(later).gather(1, net(later).argmax(1, keepdim=True)).squeeze(1)  # fault


def of_another(net: nn.Module, other: nn.Module, later: Tensor, r: Tensor) -> Tensor:
    return r + 0.9 * other(later).max(1).values


def without_graph(net: nn.Module, other: nn.Module, later: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        return r + 0.9 * net(later).max(1).values


def consistent(net: nn.Module, other: nn.Module, later: Tensor, r: Tensor) -> Tensor:
    return net(later).max(1).values


# ---- sums and signs ----


def variational(loss_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Program:
    """A variational autoencoder: its loss is given output − target, mean, log variance, and which places count."""

    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        encode, decode = layers(6, 8), layers(4, 6)
        net = nn.ModuleDict({"encode": encode, "decode": decode})
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        yield {"encode": encode, "decode": decode}
        for _ in range(STEPS):
            x = torch.randn(16, 5, 6)
            mean, spread = encode(x).chunk(2, -1)
            out = decode(mean + torch.randn_like(mean) * (0.5 * spread).exp())
            loss = loss_of(out - x, mean, spread, (torch.rand(16, 5) < 0.8).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def kl_masked_late(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    kl = -0.5 * (1 + spread - mean**2 - spread.exp()).sum() * mask  # fault
    return ((off**2).mean(-1) * mask + 0.1 * kl).sum() / mask.sum()


def kl_added_late(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    kl = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())  # fault
    return ((off**2).sum(-1) + kl).mean()


def kl_masked(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    kl = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1) * mask
    return ((off**2).mean(-1) * mask + 0.1 * kl).sum() / mask.sum()


def kl_by_batch(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    kl = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())
    return (off**2).sum() / len(off) + kl / len(off)


def kl_summed(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    kl = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())  # fault
    return (off**2).mean() + kl


def sparse(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    return (off**2).mean() + 1e-3 * mean.abs().sum()


def all_summed(off: Tensor, mean: Tensor, spread: Tensor, mask: Tensor) -> Tensor:
    kl = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())
    return F.mse_loss(off, torch.zeros_like(off), reduction="sum") + kl


def policy_gradient(loss_of: Callable[[Any, Tensor, Tensor], Tensor], normal: bool = False) -> Program:
    def train() -> Iterator[Any]:
        torch.manual_seed(0)
        policy = layers(3, 16, 2 if normal else 3)
        optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
        yield {"policy": policy}
        for _ in range(STEPS):
            s = torch.randn(32, 3)
            out = policy(s)
            dist: Any = Normal(out[:, 0], F.softplus(out[:, 1]) + 1e-3) if normal else Categorical(logits=out)
            a = dist.sample()
            gain = torch.where(a > 0, 1.0, -1.0) * s[:, 0]
            loss = loss_of(dist, dist.log_prob(a), gain - gain.mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


def taken(dist: Any, log_prob: Tensor, gain: Tensor) -> Tensor:
    entropy = -log_prob.mean()
    return -(log_prob * gain).mean() + 0.05 * entropy  # fault


def taken_at_once(dist: Any, log_prob: Tensor, gain: Tensor) -> Tensor:
    return (-log_prob * gain).mean() - 0.05 * log_prob.mean()  # fault


def estimated(dist: Any, log_prob: Tensor, gain: Tensor) -> Tensor:
    return -(log_prob * gain).mean() + 0.05 * log_prob.mean()


def entropic(dist: Any, log_prob: Tensor, gain: Tensor) -> Tensor:
    return -(log_prob * gain).mean() - 0.05 * dist.entropy().mean()


# ---- with which nothing is wrong ----


def logged(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out, again = net(x)
    F.mse_loss(again, x).item()
    return F.cross_entropy(out, y) + 0.5 * F.mse_loss(again, x)


def of_an_entropy(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)[0]
    known = net(x + 0.1)[0].softmax(-1).detach()
    return F.cross_entropy(out, y) + (known * known.log()).sum(-1).mean() - (known * out.log_softmax(-1)).sum(-1).mean()


def with_a_schedule(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x)[0], y) + torch.tensor(3.0) + 0.5


def beside_a_baseline(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(net(x)[1], x) - F.mse_loss(x.roll(1, 1), x)


def stopped_gradients(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    one, other = net(x)[1], net(x + 0.1)[1]
    return F.mse_loss(one, other.detach()) + F.mse_loss(other, one.detach()) + F.cross_entropy(net(x)[0], y)


def weighted_by_numbers(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out, again = net(x)
    first, second = F.cross_entropy(out, y), F.mse_loss(again, x)
    return first + second * (first.item() / second.item())


def shifted_in_value(net: TwoHeads, x: Tensor, y: Tensor) -> Tensor:
    out, again = net(x)
    first, second = F.cross_entropy(out, y), F.mse_loss(again, x)
    return first + (second - first).detach() + second


TERMS: list[tuple[str, Program, Callable[..., Any]]] = [
    *(
        ("term-without-effect", supervised(each), each)
        for each in (number_added, copied, errors_counted, decayed_by_data, cut_output, teacher_alone, dropped_twice)
    ),
    ("term-without-effect", supervised(features_without_graph, FEATURES), Features),
    ("straight-through-loss", quantized("wrong"), Codes),
    ("straight-through-loss", quantized("product"), Codes),
    *(("td-target-gradient", q_learning(each), each) for each in (of_itself, masked, double)),
    ("td-target-gradient", q_learning(of_itself, by_hand=True), of_itself),
    *(("summed-before-mask", variational(each), each) for each in (kl_masked_late, kl_added_late)),
    ("summed-beside-mean", variational(kl_summed), kl_summed),
    *(("log-prob-as-entropy", policy_gradient(each), each) for each in (taken, taken_at_once)),
    ("log-prob-as-entropy", policy_gradient(taken, normal=True), taken),
    ("term-without-effect", adversarial(detached=True), adversarial),
    ("term-without-effect", adversarial(detached=False, penalty=False), adversarial),
    ("term-without-effect", proximal(again=True), proximal),
]
"""What is wrong, and the function with a line that has ``# fault``."""

HEALTHY: list[Program] = [
    *(
        supervised(each)
        for each in (
            logged, of_an_entropy, with_a_schedule, beside_a_baseline, stopped_gradients, weighted_by_numbers,
            shifted_in_value,
        )
    ),
    adversarial(detached=False), adversarial(detached=False, penalty=True), adversarial(detached=False, pixels=False),
    proximal(again=False), quantized("right"), quantized("averaged"),
    *map(q_learning, (of_another, without_graph, consistent)),
    *map(variational, (kl_masked, kl_by_batch, sparse, all_summed)),
    *map(policy_gradient, (estimated, entropic)), policy_gradient(entropic, normal=True),
]  # fmt: skip
