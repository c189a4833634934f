import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.facts import Softmax, read_facts


class Attention(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.values = nn.Linear(6, 6)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.scale * x @ x.transpose(1, 2), dim=-1)
        self.seen.append(weights.detach().double())
        return weights @ self.values(x)


def train(model: nn.Module, steps: int = 3) -> list[Softmax]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(0)
    with rg.record(model) as recording:
        for _ in range(steps):
            loss = model(torch.randn(4, 5, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    facts = read_facts(recording.history.events)
    return [fact for fact in facts if isinstance(fact, Softmax)]


def test_how_sure_a_softmax_is() -> None:
    model = Attention(0.3)
    found = train(nn.Sequential(model))
    assert [(fact.step, fact.name, fact.entries) for fact in found] == [(0, "0", 5), (1, "0", 5), (2, "0", 5)]
    assert all("test_softmax_looks.py:" in fact.line for fact in found)
    for fact, weights in zip(found, model.seen, strict=True):
        assert abs(fact.value - float(weights.square().sum() / weights.sum())) < 1e-5


class Pooling(nn.Module):
    """Attention over 5 places, whose weights have shape [4, 5, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.score(x), dim=1)
        self.seen.append(weights.detach().double())
        return (weights * x).sum(1)


def test_a_softmax_along_another_dimension() -> None:
    model = Pooling()
    found = train(nn.Sequential(model))
    assert [fact.entries for fact in found] == [5, 5, 5]
    for fact, weights in zip(found, model.seen, strict=True):
        assert torch.allclose(weights.sum(1), torch.ones(4, 1).double())
        assert abs(fact.value - float(weights.square().sum() / weights.sum())) < 1e-5


def test_one_that_picks_one_is_sure() -> None:
    assert all(fact.value > 0.95 for fact in train(nn.Sequential(Attention(300.0))))


def test_weights_are_as_without_it() -> None:
    def run(recorded: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(Attention(0.3))
        if recorded:
            train(model)
        else:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            torch.manual_seed(0)
            for _ in range(3):
                loss = model(torch.randn(4, 5, 6)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
