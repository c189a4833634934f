"""Policies that round: what comes back, and the error they report; and what losslessly packed memory takes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from retrograd.core.errors import SavedPolicyError
from retrograd.memory.policies.lossless import Lossless, pack_bits, unpack_bits
from retrograd.memory.policies.policy import AsIs, Policy, Saved
from retrograd.memory.policies.precision import MEASURED_EVERY, Bfloat16, EightBit
from retrograd.memory.policies.recompute import Recompute
from retrograd.memory.policies.when import When
from retrograd.memory.saved.gradient_error import measure_gradient_error
from retrograd.memory.saved.keeping import keep_saved
from tests.memory.saved.test_ranges import Noting


def as_saved(values: Tensor, path: str = "layer") -> Saved:
    return Saved(values, values.shape, path, 0)


def there_and_back(policy: Policy, values: Tensor) -> Tensor:
    packed = policy.pack(as_saved(values))
    assert packed is not None
    return packed.restore()


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 600), st.sampled_from([1, 7, 64, 256]), st.floats(-30, 30), st.integers(0, 10**6))
def test_eight_bits_are_within_half_a_step_or_one_where_zero_is_near(
    n: int, group: int, scale: float, seed: int
) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 10**scale
    values[::3] = 0.0
    back = there_and_back(EightBit(group), values)
    padded = torch.nn.functional.pad(values, (0, -n % group)).view(-1, group).double()
    step = (padded.abs().amax(1, keepdim=True) / 127).expand_as(padded).reshape(-1)[:n]
    error = (back.double() - values.double()).abs()
    assert torch.all(error <= torch.where(values.double().abs() < step, step, step / 2) * (1 + 1e-4))
    assert torch.equal(back.sign(), values.sign())


def test_sizes() -> None:
    values = torch.randn(256 * 100)
    assert EightBit().pack(as_saved(values)).resident_bytes == 256 * 100 + 100 * 4  # type: ignore[union-attr]
    assert Bfloat16().pack(as_saved(values)).resident_bytes == values.nbytes // 2  # type: ignore[union-attr]
    assert Bfloat16().pack(as_saved(values.bfloat16())) is None
    assert EightBit().pack(as_saved(values.long())) is None


@pytest.mark.parametrize("policy", [Bfloat16(), EightBit()])
def test_the_error_is_that_of_what_was_measured(policy: Bfloat16 | EightBit) -> None:
    assert math.isnan(policy.error)
    squares = norms = 0.0
    for number in range(2 * MEASURED_EVERY):
        values = torch.randn(5000, generator=torch.Generator().manual_seed(number)) * (number + 1)
        back = there_and_back(policy, values)
        if number % MEASURED_EVERY == 0:
            squares += float((back.double() - values.double()).square().sum())
            norms += float(values.double().square().sum())
    assert policy.error == pytest.approx((squares / norms) ** 0.5, rel=1e-4)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("policy", [Bfloat16(min_bytes=0), EightBit(min_bytes=0)])
def test_the_gradient_error_is_measured_and_changes_nothing(policy: Bfloat16 | EightBit) -> None:
    model, x = Norm(), torch.randn(32, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    report = measure_gradient_error(model, policy, lambda: model(x).square().mean())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())

    def gradients(chosen: Policy) -> dict[str, Tensor]:
        torch.set_rng_state(state)
        model.load_state_dict(before)
        with keep_saved(model, chosen):
            model(x).square().mean().backward()
        found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    exact, coarse = gradients(AsIs()), gradients(policy)
    squares = sum(float((exact[name] - coarse[name]).square().sum()) for name in exact)
    assert report.total == pytest.approx((squares / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)
    assert 0 < report.total < 0.1
    assert {name.replace(":", ".") for name in report.parameters} == set(exact)
    assert list(report.parameters.values()) == sorted(report.parameters.values(), reverse=True)
    assert measure_gradient_error(model, AsIs(), lambda: model(x).square().mean()).total == 0


# ---- lossless -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=100))
def test_bits_come_back(flags: list[bool]) -> None:
    values = torch.tensor(flags, dtype=torch.bool)
    packed = pack_bits(values)
    assert packed.numel() == -(-len(flags) // 8)
    assert torch.equal(unpack_bits(packed, len(flags)), values)


def half_zero() -> Tensor:
    return torch.randn(64_000, generator=torch.Generator().manual_seed(0)).relu_()


@pytest.mark.parametrize(
    ("values", "least", "most"),
    [
        (torch.rand(64_000) < 0.9, 7.9, 8.0),
        (half_zero(), 1.8, 2.0),
        (half_zero().to(torch.bfloat16), 1.7, 1.9),
        (torch.randint(0, 200, (64_000,)), 7.9, 8.0),
        (torch.randint(-30_000, 30_000, (64_000,)), 3.9, 4.0),
    ],
)
def test_memory_with_structure_takes_less(values: Tensor, least: float, most: float) -> None:
    packed = Lossless().pack(as_saved(values))
    assert packed is not None
    assert least <= values.nbytes / packed.resident_bytes <= most
    assert torch.equal(packed.restore(), values)


def test_memory_without_structure_stays() -> None:
    noise = torch.randn(64_000, generator=torch.Generator().manual_seed(0))
    assert Lossless().pack(as_saved(noise)) is None
    assert Lossless().pack(as_saved(torch.randint(-(2**62), 2**62, (64_000,)))) is None


# ---- conditions -----------------------------------------------------------------------------------------------


def test_conditions_choose() -> None:
    large, small = Noting(), Noting()
    policy = When(
        large, min_bytes=400, dtypes=[torch.float32], test=lambda saved: saved.path != "head", otherwise=small
    )
    for values, path in (
        (torch.ones(100), "body"), (torch.ones(99), "body"), (torch.ones(100), "head"),
        (torch.ones(100).double(), "body"),
    ):  # fmt: skip
        policy.pack(as_saved(values, path))
    assert [(nbytes, path) for nbytes, _, _, path, _ in large.seen] == [(400, "body")]
    assert [(nbytes, path) for nbytes, _, _, path, _ in small.seen] == [(396, "body"), (400, "head"), (800, "body")]
    assert policy.min_bytes == 0
    assert When(Bfloat16(), min_bytes=10).min_bytes == 10
    assert When(AsIs(), otherwise=Bfloat16()).is_exact is False


@pytest.mark.parametrize("make", [lambda: When(Recompute()), lambda: When(AsIs(), otherwise=Recompute())])
def test_a_module_cannot_be_run_again_for_some_tensors_only(make: object) -> None:
    with pytest.raises(SavedPolicyError, match="Recompute"):
        make()  # type: ignore[operator]
