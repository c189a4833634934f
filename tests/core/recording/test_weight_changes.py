"""Values that change between two updates: single bits, writes by hand, and what must not be taken for either."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.history.facts import read_facts
from retrograd.core.history.weights_facts import Changed
from retrograd.core.statistics.slab import NativeSlab, sum_bits

pytestmark = pytest.mark.skipif(NativeSlab is None, reason="the kernel reads the bits")

STEPS, WHEN, ELEMENT = 12, 7, 5


def flip_by_ctypes(tensor: Tensor, bit: int) -> None:
    ctypes.cast(tensor.data_ptr() + 4 * ELEMENT, ctypes.POINTER(ctypes.c_uint32))[0] ^= 1 << bit


def flip_by_numpy(tensor: Tensor, bit: int) -> None:
    tensor.detach().numpy().reshape(-1).view(np.uint32)[ELEMENT] ^= np.uint32(1 << bit)


def flip_by_view(tensor: Tensor, bit: int) -> None:
    tensor.detach().view(-1).view(torch.int32)[ELEMENT] ^= 1 << bit


class Training:
    """A small training, with something that is done behind each update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def run(self, after: Callable[[int], None], *, every: int = 1) -> list[Changed]:
        """Train, and return what was seen to change."""
        with rg.record(self.net, schedule=every) as recording:
            for step in range(STEPS):
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.net(torch.randn(8, 6)), torch.zeros(8, 3)).backward()
                self.optimizer.step()
                after(step)
        return [fact for fact in read_facts(recording.history.few_events) if isinstance(fact, Changed)]


PLACES: dict[str, Callable[[Training], Tensor]] = {
    "weight": lambda training: training.net[3].weight,
    "exp_avg": lambda training: training.optimizer.state[training.net[0].weight]["exp_avg"],
    "exp_avg_sq": lambda training: training.optimizer.state[training.net[3].weight]["exp_avg_sq"],
    "running_var": lambda training: training.net[1].running_var,
}
NAMES = {"weight": ("3:weight", "parameter"), "exp_avg": ("0:weight", "exp_avg"),
         "exp_avg_sq": ("3:weight", "exp_avg_sq"), "running_var": ("1:running_var", "buffer")}  # fmt: skip


@pytest.mark.parametrize("bit", [0, 22, 30])
@pytest.mark.parametrize("flip", [flip_by_ctypes, flip_by_numpy, flip_by_view])
@pytest.mark.parametrize("place", PLACES)
def test_one_bit_is_told_with_its_place(place: str, flip: Callable[[Tensor, int], None], bit: int) -> None:
    training = Training()
    found = training.run(lambda step: flip(PLACES[place](training), bit) if step == WHEN else None)
    flips = [each for each in found if each.bit >= 0]
    assert [(each.name, each.of) for each in flips] == [NAMES[place]]
    assert flips[0].bit == 32 * (ELEMENT % 2) + bit
    assert (flips[0].since, flips[0].step) == (WHEN, WHEN + 1)


def test_nothing_is_told_where_nothing_changes() -> None:
    assert not Training().run(lambda step: None)


def test_between_steps_that_are_not_recorded_nothing_is_told() -> None:
    training = Training()
    assert not training.run(lambda step: flip_by_view(training.net[3].weight, 22) if step == WHEN else None, every=3)


def test_clamping_by_hand_is_no_flipped_bit() -> None:
    training = Training()

    def clamp(step: int) -> None:
        for parameter in training.net.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    found = training.run(clamp)
    assert found
    assert {each.bit for each in found} == {-1}


def test_the_sum_of_bits_is_that_of_numpy() -> None:
    torch.manual_seed(3)
    tensors = [
        torch.randn(7),
        torch.randn(3, 4, dtype=torch.float64),
        torch.randn(5, 3).bfloat16(),
        torch.randn(6, 4).t(),
    ]
    for tensor, found in zip(tensors, sum_bits(tensors), strict=True):
        memory = (tensor.t() if not tensor.is_contiguous() else tensor).contiguous().view(torch.uint8).numpy().tobytes()
        padded = memory + bytes(-len(memory) % 8)
        assert found == sum(int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)) % 2**64
    assert sum_bits([torch.randn(3).to_sparse()]) == [None]
