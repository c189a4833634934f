"""What losses are given as targets, against counts by hand."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retrograd.core.history.facts import AttendedTokens, Targets
from tests.explaining.facts.looking import facts_while, line_of

VOCABULARY, LENGTH = 7, 9


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens))
        return out


def train(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], tokens: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for each in tokens:
        optimizer.zero_grad()
        loss_of(model, each).backward()
        optimizer.step()


def make_tokens(steps: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator) for _ in range(steps)]


def targets_of(loss_of: Callable[[nn.Module, Tensor], Tensor], tokens: list[Tensor] | None = None) -> list[Targets]:
    torch.manual_seed(0)
    model = Tokens()
    return facts_while(lambda: train(model, loss_of, make_tokens() if tokens is None else tokens), model, Targets)


def share_at(shift: int, rows: list[list[int]], tokens: list[list[int]]) -> float:
    """The share of targets that are the token so many places ahead, counted one by one; −100 is left out."""
    hits = total = 0
    for row, own in zip(rows, tokens, strict=True):
        for place, target in enumerate(row):
            if target != -100 and 0 <= place + shift < len(own):
                total += 1
                hits += target == own[place + shift]
    return hits / total


def one_ahead(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def by_hand(model: nn.Module, tokens: Tensor) -> Tensor:
    logs = torch.log_softmax(model(tokens)[:, :-1], -1)
    return -logs.gather(2, tokens[:, 1:].unsqueeze(2)).mean()


def with_channels_first(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:])


@pytest.mark.parametrize("loss_of", [one_ahead, by_hand, with_channels_first])
def test_targets_are_held_against_tokens_at_each_shift(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> None:
    tokens = make_tokens()
    found = targets_of(loss_of)
    assert [fact.step for fact in found] == [0, 1]
    for fact, each in zip(found, tokens, strict=True):
        rows = each.tolist()
        expected = [share_at(shift, [row[1:] for row in rows], rows) for shift in (-2, -1, 0, 1, 2, 3)]
        assert list(fact.shifts) == pytest.approx(expected)
        assert fact.axis == 1
        assert fact.tokens == line_of("self.head(self.embedding", Tokens)


def test_classes_are_counted_without_what_is_ignored() -> None:
    def ignoring(model: nn.Module, tokens: Tensor) -> Tensor:
        targets = tokens.masked_fill(tokens == 3, -100)
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    tokens = make_tokens(1)
    [fact] = targets_of(ignoring, tokens)
    flat = [each for each in tokens[0].flatten().tolist() if each != 3]
    most = max(set(flat), key=flat.count)
    assert fact.elements == 4 * LENGTH
    assert fact.ignored == 4 * LENGTH - len(flat)
    assert fact.classes == VOCABULARY
    assert fact.seen == len(set(flat))
    assert flat.count(fact.most) == flat.count(most)
    assert fact.share == pytest.approx(flat.count(most) / len(flat))
    assert fact.line == line_of("targets.flatten()", ignoring)


def test_the_loss_stands_beside_them() -> None:
    torch.manual_seed(0)
    model, [tokens] = Tokens(), make_tokens(1)
    expected = one_ahead(model, tokens).item()
    [fact] = facts_while(lambda: train(model, one_ahead, [tokens]), model, Targets)
    assert fact.value == pytest.approx(expected)


def test_padding_is_a_tail_of_rows_of_different_length() -> None:
    rows = [[2, 3, 4, 0, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0, 0, 0], [5, 6, 1, 2, 3, 0, 0, 0]]
    [fact] = targets_of(one_ahead, [torch.tensor(rows)])
    assert (fact.most, fact.tail, fact.lengths, fact.filler) == (0, 1.0, 3, True)
    assert fact.share == pytest.approx(14 / 21)
    rows[0][6] = 4  # one more that is none, behind three of padding
    [fact] = targets_of(one_ahead, [torch.tensor(rows)])
    assert fact.most == 0
    assert fact.tail == pytest.approx(10 / 13)


def test_tokens_whose_time_comes_first() -> None:
    def first(model: nn.Module, tokens: Tensor) -> Tensor:
        turned = tokens.t()
        return F.cross_entropy(model(turned)[:-1].reshape(-1, VOCABULARY), turned[1:].reshape(-1))

    [fact] = targets_of(first, make_tokens(1))
    assert (fact.axis, fact.shifts[3]) == (0, 1.0)
    assert fact.shifts[2] < 0.5


class Masked(nn.Module):
    """Attention that may not take what a mask hides."""

    def __init__(self, *, inverts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.inverts = inverts

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hides = (tokens != 0) if self.inverts else (tokens == 0)
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(hides.unsqueeze(1), float("-inf"))
        out: Tensor = scores.softmax(-1) @ hidden
        return out


@pytest.mark.parametrize("inverts", [False, True])
def test_which_tokens_a_mask_lets_pass(inverts: bool) -> None:
    tokens = torch.tensor([[2, 3, 4, 0, 0], [1, 2, 0, 0, 0], [5, 6, 1, 2, 0]])
    model = Masked(inverts=inverts)
    [fact] = facts_while(
        lambda: train(model, lambda net, each: net(each).square().mean(), [tokens]), model, AttendedTokens
    )
    padding, others = 6, {1, 2, 3, 4, 5, 6}
    assert fact.value == pytest.approx((padding if inverts else 15 - padding) / 15)
    assert (fact.kept, fact.hidden) == ((1, len(others)) if inverts else (len(others), 1))
    assert fact.lengths == 3
    assert not inverts or fact.only == 0


def test_a_target_that_is_the_input_is_known_by_its_memory() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6))
    for same in (True, False):
        data = torch.randn(8, 6)

        def loss_of(net: nn.Module, x: Tensor, same: bool = same) -> Tensor:
            return F.mse_loss(net(x), x if same else x.clone())

        [fact] = facts_while(lambda: train(model, loss_of, [data]), model, Targets)  # noqa: B023
        assert fact.same is same


def test_weights_are_as_without_it() -> None:
    def run(recorded: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = Tokens()
        if recorded:
            facts_while(lambda: train(model, by_hand, make_tokens(4)), model, Targets)
        else:
            train(model, by_hand, make_tokens(4))
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
