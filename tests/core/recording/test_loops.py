"""Training loops of every kind: what a step is, and that gradients lie where their activations do."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from retrograd.core.recording.recorder import Recorder
from tests.core.recording.collector import Collector, collect
from tests.core.recording.oracle import assert_row, listen


def make_net(inputs: int = 3, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs))


def steps_of(seen: Collector, site: str) -> list[tuple[int, int]]:
    return [(row.step, row.micro) for row in seen.all(site)]


def write_past_autograd(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.data.sub_(gradient.data * 0.01)


def write_without_grad(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= gradient * 0.01


@pytest.mark.parametrize("write", [write_past_autograd, write_without_grad])
def test_updates_by_hand_with_accumulation(write: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    net = make_net()
    with collect(net, schedule=2) as seen:
        for _ in range(4):
            for _ in range(2):
                net(torch.randn(4, 3)).square().sum().backward()
            for parameter in net.parameters():
                write(parameter, parameter.grad)  # type: ignore[arg-type]
            net.zero_grad()
    assert steps_of(seen, "0:output.grad") == [(0, 0), (0, 1), (2, 0), (2, 1)]


def try_out(net: nn.Sequential) -> None:
    net(torch.randn(4, 3)).sum().backward()
    net.zero_grad()


def attack(net: nn.Sequential) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    for _ in range(6):
        net(x).sum().backward()
        net.zero_grad()


def climb(net: nn.Sequential) -> None:
    """As SAM does; what it adds to the weights is taken back when the gradient has come."""
    net(torch.randn(4, 3)).square().sum().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 1.0
    net.zero_grad()


def do_nothing(net: nn.Sequential) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "behind"),
    [(try_out, do_nothing), (attack, do_nothing), (climb, lambda net: write_ones(net, -1.0))],
    ids=["trial", "attack", "SAM"],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_comes_before_the_first_update_of_an_optimizer_is_no_update_by_hand(
    before: Callable[[nn.Sequential], None], behind: Callable[[nn.Sequential], None], is_late: bool
) -> None:
    net = make_net()
    optimizer = None if is_late else torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net) as seen:
        optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            before(net)
            net(torch.randn(4, 3)).square().sum().backward()
            behind(net)
            optimizer.step()
            optimizer.zero_grad()
    assert {row.step for row in seen.all("0:output.grad")} == {0, 1, 2, 3}
    assert [event.moment.step for event in seen.events_of("update")] == [0, 1, 2, 3]
    micros = {step: {row.micro for row in seen.all("0:weight.grad", step=step)} for step in range(4)}
    assert micros[0] == micros[1] == micros[2] == micros[3]


def write_ones(net: nn.Sequential, factor: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += factor


def test_updates_by_hand_beside_an_optimizer_of_something_else() -> None:
    net, other = make_net(), make_net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with collect(net) as seen:
        for _ in range(3):
            net(torch.randn(4, 3)).square().sum().backward()
            write_ones(net, 0.01)
            net.zero_grad()
    assert steps_of(seen, "0:output.grad") == [(0, 0), (1, 0), (2, 0)]
    assert optimizer.param_groups


def test_updates_by_hand_beside_an_optimizer_that_never_updates() -> None:
    """The first few writes may be moves that are taken back; behind them each makes a step."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net) as seen:
        for _ in range(20):
            net(torch.randn(4, 3)).square().sum().backward()
            write_ones(net, 0.01)
            optimizer.zero_grad()
    steps = [step for step, _ in steps_of(seen, "0:output.grad")]
    assert steps == [0] * 5 + list(range(1, 16))


def test_two_optimizers_that_step_together() -> None:
    net = make_net()
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[2].parameters(), lr=0.1)]
    with collect(net, schedule=2) as seen:
        for _ in range(5):
            net(torch.randn(4, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    for site in ("0:output.grad", "0:weight.update", "2:weight.update"):
        assert steps_of(seen, site) == [(0, 0), (2, 0), (4, 0)]


class Game:
    """A generator and a critic; the generator's output is used again after the critic's update."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = make_net(2, 3), make_net(3, 1)
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        self.of_critic = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.kind = kind

    def round(self) -> None:
        fake = self.generator(torch.randn(4, 2))
        real = self.critic(torch.randn(4, 3))
        if self.kind == "two backwards":
            (-real.mean()).backward()
            self.critic(fake.detach()).mean().backward()
        else:
            (self.critic(fake.detach()).mean() - real.mean()).backward()
        self.of_critic.step()
        self.critic.zero_grad()
        if self.kind == "new noise":
            fake = self.generator(torch.randn(4, 2))
        (-self.critic(fake).mean()).backward()
        self.of_generator.step()
        self.generator.zero_grad()
        self.critic.zero_grad()


@pytest.mark.parametrize("kind", ["one backward", "two backwards", "new noise"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_generator_and_a_critic(kind: str, every: int) -> None:
    game = Game(kind)
    models = nn.ModuleDict({"G": game.generator, "D": game.critic})
    with listen(models) as oracle, collect({"G": game.generator, "D": game.critic}, schedule=every) as seen:
        for _ in range(6):
            game.round()
    # Every gradient of the generator lies with its own activation, and nothing of a recorded step is missing.
    calls = 2 if kind == "new noise" else 1
    for path in ("G.0", "G.1", "G.2"):
        values, gradients = oracle.values[path], oracle.gradients[path]
        rows = seen.all(f"{path}:output", phase="train") + seen.all(f"{path}:output", phase="forward")
        assert len(rows) >= 2
        recorded = 0
        for value, came in zip(values, gradients, strict=True):
            row = next(
                (row for row in rows if row.rms == pytest.approx(value.double().square().mean().sqrt().item())), None
            )
            if row is None:
                continue
            recorded += 1
            found = seen.all(f"{path}:output.grad", step=row.step, micro=row.micro)
            assert len(found) == len(came)
            for item, gradient in zip(found, came, strict=True):
                assert_row(item, gradient)
                assert (item.backward, item.phase) == (0, "train")
        assert recorded == (6 * calls if every == 1 else recorded)
    for path in ("D.0", "D.1", "D.2"):
        grads = [row for row in seen.rows if row.site.startswith(f"{path}") and row.site.endswith("output.grad")]
        assert grads
        for row in grads:
            assert seen.all(row.site.removesuffix(".grad"), step=row.step, micro=row.micro)
    steps = {row.step for row in seen.rows}
    assert steps == set(range(0, 6, every))


def test_an_encoding_that_is_used_for_several_steps() -> None:
    torch.manual_seed(0)
    encoder, head = nn.Linear(3, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with listen(encoder) as oracle, collect({"encoder": encoder, "head": head}) as seen:
        code = encoder(torch.randn(5, 3))
        for _ in range(3):
            head(code).square().sum().backward(retain_graph=True)
            optimizer.step()
    gradients = oracle.gradients["self"][0]
    assert [(row.step, row.micro, row.backward) for row in seen.all("encoder:output.grad")] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
    ]
    for backward, gradient in enumerate(gradients):
        assert_row(seen.one("encoder:output.grad", backward=backward), gradient)
    assert [row.step for row in seen.all("head:output.grad")] == [0, 1, 2]


def test_a_model_that_is_called_by_another_method() -> None:
    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return (self.decoder(self.encoder(x)) - x).square().mean()

    net = Autoencoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with collect(net, schedule=2) as seen:
        for _ in range(4):
            for _ in range(2):
                net.loss(torch.randn(4, 3)).backward()
            optimizer.step()
    for site in ("encoder:output", "encoder:output.grad", "decoder:output.grad"):
        assert steps_of(seen, site) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    reasons = {item["site"]: item["reason"] for item in seen.facts["not_recorded"]}
    assert "never called" in reasons["self:output"]


def test_a_model_that_is_trained_where_another_one_was() -> None:
    """Their parameters may lie at the same addresses."""
    seen = Collector()
    recorder = Recorder({"0": make_net()}, seen)
    recorder.attach()
    for name in range(1, 4):
        net = make_net()
        recorder.add_model(str(name), net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        del net, optimizer
        gc.collect()
    recorder.close()
    assert [event.moment.step for event in seen.events_of("loss")] == list(range(9))


def copy_to(model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None], Callable[[], None]]:
    """An optimizer of copies, what brings them the gradients, and what brings the model the new weights."""
    copies = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]

    def hand_gradients() -> None:
        for other, parameter in zip(copies, model.parameters(), strict=True):
            other.grad = parameter.grad.clone()  # type: ignore[union-attr]
        model.zero_grad()

    @torch.no_grad()
    def hand_weights() -> None:
        for other, parameter in zip(copies, model.parameters(), strict=True):
            parameter.copy_(other)

    return torch.optim.Adam(copies, lr=0.1), hand_gradients, hand_weights


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("micros", [1, 2])
def test_an_optimizer_of_copies(every: int, micros: int) -> None:
    net = make_net()
    optimizer, hand_gradients, hand_weights = copy_to(net)
    with collect(net, schedule=every) as seen:
        for _ in range(6):
            for _ in range(micros):
                net(torch.randn(4, 3)).square().sum().backward()
            hand_gradients()
            optimizer.step()
            hand_weights()
    assert steps_of(seen, "0:output.grad") == [(step, micro) for step in range(0, 6, every) for micro in range(micros)]
    assert [event.moment.step for event in seen.events_of("update")] == list(range(0, 6, every))


def test_a_model_that_was_copied_after_its_optimizer_was_made() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net = copy.deepcopy(net)
    with collect(net) as seen:
        for _ in range(20):
            net(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
    assert steps_of(seen, "0:output.grad") == [(step, 0) for step in range(20)]
