"""The update behind which a loss has jumped: rate, largest part, and first layer, against hooks written by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg

STEPS = 40
NAMES = {
    "rate": "learning rate at step 0",
    "part": "largest part of the update of step 0",
    "first": "first site beyond its range",
}


class Trained:
    """A net of three layers, one of which has a rate that is too high; hooks follow the outputs by hand."""

    def __init__(self, rates: tuple[float, float, float], every: int = 1) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        groups = [{"params": self.net[2 * k].parameters(), "lr": rate} for k, rate in enumerate(rates)]
        optimizer = torch.optim.SGD(groups)
        self.step, self.left = 0, list[tuple[int, str]]()
        self.largest: dict[str, float] = {}
        with rg.record(self.net, schedule=every) as recording:
            for name, module in self.net.named_children():
                module.register_forward_hook(lambda module, args, output, name=name: self.see(name, output))
            for self.step in range(STEPS):
                optimizer.zero_grad()
                x = torch.randn(32, 8)
                (self.net(x) - x.sum(1, keepdim=True)).square().mean().backward()
                if self.step == 0:
                    old = {name: each.detach().clone() for name, each in self.net.named_parameters()}
                optimizer.step()
                if self.step == 0:
                    self.changes = {
                        name: (each - old[name]).norm().item() for name, each in self.net.named_parameters()
                    }
        self.found = rg.explain(recording)

    def see(self, name: str, output: Tensor) -> None:
        size = output.abs().max().item()
        if self.step and not size <= 10 * self.largest[name]:
            self.left.append((self.step, name))
        if not self.step:
            self.largest[name] = size

    def evidence(self, detector: str = "learning-rate-too-high") -> dict[str, object]:
        [found] = self.found.of(detector)
        return {name: each.value for each in found.evidence for name, text in NAMES.items() if each.name == text}


@pytest.mark.parametrize("rates", [(0.01, 0.01, 5.0), (0.5, 0.5, 0.5), (0.01, 50.0, 0.01), (3.0, 3.0, 0.3)])
def test_the_rate_the_largest_part_and_the_first_layer_are_said(rates: tuple[float, float, float]) -> None:
    trained = Trained(rates)
    evidence = trained.evidence()
    assert evidence["rate"] == max(rates)
    name = max(trained.changes, key=lambda name: trained.changes[name])
    whole = math.sqrt(sum(each**2 for each in trained.changes.values()))
    assert evidence["part"] == f"{name.replace('.', ':')}, ‖Δw‖ {trained.changes[name]:.3g} of {whole:.3g} in all"
    step, layer = trained.left[0]
    assert str(evidence["first"]).startswith(f"{layer}:output at step {step}, ")


def test_which_was_first_is_not_said_where_steps_between_were_not_recorded() -> None:
    first = str(Trained((0.5, 0.5, 0.5), every=5).evidence()["first"])
    assert first.startswith("not known: ")
    assert first.endswith(" sites are by step 5, and the step before was not recorded")
