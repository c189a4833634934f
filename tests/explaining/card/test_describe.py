"""What a card says of a run is what the program did, as counted here by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.statistics.slab import NativeSlab
from retrograd.explaining.card import describe as describing
from retrograd.explaining.card.card import MOST_LINES, Card, CardEntry
from retrograd.explaining.card.inputs import find_period
from retrograd.explaining.card.steps import _fold
from retrograd.explaining.findings.explain import make_record


class Net(nn.Module):
    """A frozen part, one that the loss never sees, one that no optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.frozen = nn.Linear(4, 6), nn.Linear(6, 6)
        self.unused, self.head = nn.Linear(6, 5), nn.Linear(6, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(x)).relu())  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8, **more: Any) -> list[float]:
    """Train, and return the norms before clipping."""
    generator, norms = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for _ in range(more.get("micro", 1)):
            x = torch.randn(16, 4, generator=generator)
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        if "clip" in more:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), more["clip"])))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def texts(card: Card, topic: str) -> list[str]:
    return [": ".join(filter(None, (each.label, each.text))) for each in card.of(topic)]


def count(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def test_parameters_are_counted_by_what_becomes_of_them() -> None:
    model = Net()
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.unused.parameters()], lr=0.1)
    with rg.record(model) as recording:
        train(model, optimizer)
    [entry] = rg.describe(recording).of("parameters")
    assert entry.values["count"] == count(model)
    expected = {"trained": model.body, "frozen": model.frozen, "no_gradient": model.unused, "no_optimizer": model.head}
    for state, module in expected.items():
        assert entry.values[state]["count"] == count(module)
        assert [getattr(model, name) for name in entry.values[state]["of"]] == [module]
    assert f"{count(model.head)} in no optimizer (" in entry.text


def test_an_average_of_weights_has_changed_without_a_gradient() -> None:
    model = nn.Linear(4, 2)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record({"net": model, "average": average}) as recording:
        for _ in range(3):
            nn.functional.mse_loss(model(torch.ones(2, 4)), average(torch.ones(2, 4)) + 1).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.5)
    states = {name for entry in rg.describe(recording).of("parameters") for name in entry.values}
    assert {"trained", "moved"} <= states
    assert "frozen" not in states


def test_the_optimizer_its_rates_and_how_often_clipping_acted() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
            {"params": [model[0].bias, model[2].bias], "lr": 0.5, "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    with rg.record(model) as recording:
        norms = train(model, optimizer, clip=0.4)
    [entry] = rg.describe(recording).of("optimizer")
    acted = sum(norm > 0.4 for norm in norms)
    assert 0 < acted < 8
    assert entry.text == (
        "8 updates, lr 0.01 and 0.5 (constant), weight decay 0.1 of 2 of 4 tensors, betas (0.9, 0.95), "
        f"clips norms to 0.4, which acted in {acted} of 8"
    )
    assert entry.values["clipping"]["largest"] == pytest.approx(max(norms), rel=1e-6)
    assert [group["of"] for group in entry.values["groups"]] == [["0:weight", "2:weight"], ["0:bias", "2:bias"]]


def test_the_calls_from_one_update_to_the_next(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model, tmp_path / "run"):
        train(model, optimizer, micro=4)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(16, 4))
    card = rg.describe(tmp_path / "run")
    assert texts(card, "update") == ["4 × (forward → backward) → step → zero_grad"]
    assert texts(card, "modes") == [
        "32 forwards in training mode with grad (in 8 steps); 3 forwards in eval mode without grad (in 1 round)"
    ]


def test_optimizers_that_follow_each_other_have_a_cycle_each() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    with rg.record(model) as recording:
        train(model, torch.optim.SGD(model[1].parameters(), lr=0.1), steps=3)
        train(model, torch.optim.Adam(model.parameters()), steps=5, micro=2)
    cycles = texts(rg.describe(recording), "update")
    assert cycles == [
        "SGD: forward → backward → step → zero_grad", "Adam: 2 × (forward → backward) → step → zero_grad"
    ]  # fmt: skip


WEIGHTS = torch.ones(2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (nn.CrossEntropyLoss(), "mean"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "mean, label_smoothing=0.1"),
        (nn.CrossEntropyLoss(torch.ones(2), ignore_index=0, reduction="sum"), "sum, weight, ignore_index=0"),
        (lambda out, y: nn.functional.cross_entropy(out, y, WEIGHTS), "mean, weight"),
    ],
)
def test_what_a_loss_was_given_besides(make: Any, said: str) -> None:
    model, target = nn.Linear(4, 2), torch.ones(8, dtype=torch.long)
    with rg.record(model) as recording:
        for _ in range(2):
            make(model(torch.randn(8, 4)), target).backward()
    [loss] = rg.describe(recording).of("loss")
    assert loss.values["expression"] == f"cross_entropy(model(…), target, {said})"


def test_weights_of_classes_with_logits() -> None:
    model, criterion, target = nn.Linear(4, 2), nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)), torch.ones(8, 2)
    with rg.record(model) as recording:
        for _ in range(2):
            criterion(model(torch.randn(8, 4)), target).backward()
    [loss] = rg.describe(recording).of("loss")
    assert loss.values["expression"] == "binary_cross_entropy_with_logits(model(…), target, mean, pos_weight)"


def test_updates_by_hand_and_gradients_that_nobody_clears() -> None:
    model = nn.Linear(4, 2)
    with rg.record(model) as recording:
        for _ in range(4):
            nn.functional.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 2)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    card = rg.describe(recording)
    assert texts(card, "optimizer") == []
    [update] = texts(card, "update")
    cycle, by_hand, clearing = update.split("; ")
    assert (cycle, by_hand) == ("forward → backward", "updated without an optimizer of torch")
    assert clearing == "no zero_grad was seen, .grad was not empty before backward"
    assert card.of("parameters")[0].text == "all 10 parameters trained"


def test_batches_that_come_again_and_an_evaluation_on_other_numbers() -> None:
    model, batches = nn.Linear(4, 2), [torch.randn(8, 4) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rg.record(model) as recording:
        for step in range(9):
            nn.functional.mse_loss(model(batches[step % 3]), torch.zeros(8, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(100 + 30 * batches[step % 3])
    [entry] = rg.describe(recording).of("input")
    assert "9 batches, 3 different, always in the same order; without grad: " in entry.text
    together = torch.stack(batches)
    assert entry.values["with_grad"]["min"] == pytest.approx(float(together.min()))
    assert entry.values["with_grad"]["max"] == pytest.approx(float(together.max()))
    assert entry.values["without"]["mean"] > 50


@pytest.mark.parametrize(
    ("listed", "period"), [("abcabcab", 3), ("abab", 2), ("aaaa", 0), ("abcd", 0), ("abcabd", 0), ("abca", 0), ("", 0)]
)
def test_a_period_is_seen_twice(listed: str, period: int) -> None:
    assert find_period(listed) == period


def test_what_is_repeated_is_said_once() -> None:
    assert _fold("aab") == ["2 × a", "b"]
    assert _fold("abababc") == ["3 × (a → b)", "c"]
    assert _fold("aabaabc") == ["2 × (2 × a → b)", "c"]
    assert len(_fold("abcdefghijklmnop")) == 12


def test_two_models_with_two_losses_fit_on_the_card() -> None:
    generator, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    first, second = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (generator, critic))
    with rg.record({"generator": generator, "critic": critic}) as recording:
        for _ in range(4):
            fake = generator(torch.randn(8, 2))
            (critic(fake.detach()).mean() - critic(torch.randn(8, 3)).mean()).backward()
            second.step()
            critic.zero_grad()
            (-critic(fake).mean()).backward()
            first.step()
            generator.zero_grad()
    card = rg.describe(recording)
    assert len(card.of("loss")) == 2
    assert len(card.of("optimizer")) == 2
    assert next(line.text for line in card.lines if line.topic == "optimizer").startswith("4 updates, lr 0.01")
    assert "step of Adam → " in card.of("update")[0].text


def test_nothing_that_was_recorded_is_nothing_that_is_said() -> None:
    assert rg.describe(rg.History()).lines == ()


def test_a_model_that_is_never_trained() -> None:
    model = nn.Linear(4, 2)
    with rg.record(model) as recording, torch.no_grad():
        model(torch.ones(3, 4))
    card = rg.describe(recording)
    assert texts(card, "update") == ["none: no backward pass was recorded"]
    assert texts(card, "input")[0].startswith("input: without grad only: float32[3, 4], 1 everywhere")


def test_a_fault_of_one_topic_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_losses(record: object) -> object:
        raise KeyError("gone")

    model = nn.Linear(4, 2)
    with rg.record(model) as recording:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    kept: tuple[Callable[..., Any], ...] = (describing.describe_parameters, describe_losses)
    monkeypatch.setattr(describing, "TOPICS", kept)
    assert [each.text for each in rg.describe(recording).entries] == [
        "all 10 parameters trained",
        "not described, because it failed: KeyError: 'gone'",
    ]


def test_steps_that_were_not_recorded_are_said() -> None:
    model = nn.Linear(4, 2)
    with rg.record(model, schedule=rg.every(3)) as recording:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    card = rg.describe(recording)
    assert card.of("optimizer")[0].values["updates"] == 8
    assert "every 3" in card.of("left out")[0].text


def make_entries(*topics: str) -> Card:
    return Card(tuple(CardEntry(topic=topic, text=f"text {number}") for number, topic in enumerate(topics)))


def test_a_card_has_twelve_lines_and_of_a_topic_two() -> None:
    assert [line.text for line in make_entries("a", "a", "a", "b").lines] == ["text 0", "text 1; 1 more", "text 3"]
    many = make_entries(*"aabbccddeeffgghhii").lines
    assert [line.topic for line in many] == list("abcdefghi")
    assert [line.text for line in many][:2] == ["text 0; 1 more", "text 2; 1 more"]
    assert len(make_entries(*map(str, range(20))).lines) == MOST_LINES


def test_what_says_the_same_is_said_once() -> None:
    entries = [CardEntry(topic="optimizer", text="lr 1", label=name, line="a.py:1") for name in ("Adam", "Adam_2")]
    assert str(Card(tuple(entries))) == "optimizer  Adam and Adam_2, each: lr 1 (a.py:1)"


def test_the_loss_is_an_expression_with_shares_and_with_weights_that_change(tmp_path: Path) -> None:
    torch.manual_seed(0)  # else the share may lie between two percentages
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sums = [0.0, 0.0]
    with rg.record(model, tmp_path / "run"):
        for step in range(3):  # all of them are looked at
            x, target = torch.randn(8, 4), torch.randint(0, 3, (8,))
            out = model(x)
            entropy, size = nn.functional.cross_entropy(out, target), out.pow(2).mean()
            penalty = step * 0.5 * size
            (entropy + penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
            sums = [sums[0] + entropy.item(), sums[1] + penalty.item()]
    [entry] = rg.describe(tmp_path / "run").of("loss")
    share = round(100 * sums[0] / sum(sums))
    assert f"cross_entropy(model(…), target, mean) [{share} %] + w · mean(model(…)²) [w 0 → 1, " in entry.text
    assert [term["gradient"] for term in entry.values["terms"]] == [True, True]
    assert entry.values["terms"][1]["share"] == pytest.approx(sums[1] / sum(sums), rel=1e-5)


def test_targets_are_counted_by_class() -> None:
    model, counts = nn.Linear(4, 5), [6, 2, 0, 0, 0]
    target = torch.tensor([0] * counts[0] + [1] * counts[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rg.record(model) as recording:
        for _ in range(3):
            nn.functional.cross_entropy(model(torch.randn(8, 4)), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    [entry] = rg.describe(recording).of("target")
    assert entry.text == "int64, 8 elements a batch, 5 classes, of which a batch has 2, the most frequent is 75 %"


def test_what_was_loaded_and_how_much_of_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "best.pt")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rg.record(model) as recording:
        train(model, optimizer, 2)
        model.load_state_dict(torch.load(tmp_path / "best.pt"), strict=False)
        train(model, optimizer, 2)
    [entry] = rg.describe(recording).of("loaded")
    assert entry.text == "0 of 4 keys, 4 unexpected, strict=False, which changed nothing, from best.pt"
    assert entry.details[0].startswith("missing: 0.weight, 0.bias, 1.weight")


@pytest.mark.skipif(NativeSlab is None, reason="the kernel reads the bits")
def test_what_changed_between_updates() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rg.record(model) as recording:
        for _ in range(3):
            train(model, optimizer, 2)
            model[1].weight.detach().numpy()[0, 0] += 1
        train(model, optimizer, 2)
    [entry] = rg.describe(recording).of("changed")
    assert entry.text == "1:weight (parameter) changed between updates, 3 times from step 2 on"
    with rg.record(model) as recording:
        train(model, optimizer, 4)
    assert not rg.describe(recording).of("changed")


def test_a_run_without_samples_of_parameters_says_so(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with rg.record(model, tmp_path / "run"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    record = make_record(tmp_path / "run")
    record.__dict__["looks"] = {}
    [entry] = describing.describe_record(record).of("parameters")
    assert entry.text == "10, 10 of them require a gradient; what became of them was not recorded"
