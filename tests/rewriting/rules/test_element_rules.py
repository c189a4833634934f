"""Rules that remember tensors of elements, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd.core.errors import RuleError
from retrograd.rewriting.rules import Grokfast, PeakClip, Rule, SpikeClip
from tests.rewriting.rules import references

elements = st.one_of(st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3), st.sampled_from([math.nan, math.inf, 0.0]))
gradients = st.lists(st.lists(elements, min_size=3, max_size=3).map(np.array), min_size=1, max_size=40)
finite = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3).map(np.array), min_size=1, max_size=40)


def agrees(rule: Rule, given_gradients: list[np.ndarray], expected: list[np.ndarray]) -> None:
    state = rule.state_at("site")
    for gradient, theirs in zip(given_gradients, expected, strict=True):
        value = torch.tensor(gradient)
        ours = rule(value, state)
        np.testing.assert_allclose((value if ours is None else ours).numpy(), theirs, rtol=1e-9, equal_nan=True)


@settings(deadline=None)
@given(gradients, st.sampled_from([2.0, 50.0]), st.sampled_from([None, 12]), st.sampled_from([0, 1, 4]))
def test_spike_clip_is_as_published(
    given_gradients: list[np.ndarray], threshold: float, reset_every: int | None, rest: int
) -> None:
    expected = references.spike_clip(given_gradients, threshold, 0.9, reset_every, rest)
    agrees(SpikeClip(threshold, 0.9, reset_every, rest), given_gradients, expected)


def test_spike_clip_finds_the_spike_and_nothing_else() -> None:
    rule, state = SpikeClip(), SpikeClip().state_at("site")
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        rule(torch.randn(50, generator=generator), state)
    value = torch.randn(50, generator=generator)
    value[7] = -1000.0
    result = rule(value, state)
    assert result is not None
    assert torch.equal(result != value, torch.arange(50) == 7)
    moment = float(state.get("second moment")[7])
    assert -1000 < float(result[7]) < -10
    assert moment < 10


def test_an_element_seen_for_the_first_time_is_not_held_at_zero() -> None:
    rule = SpikeClip(rest=1)
    state = rule.state_at("site")
    for _ in range(30):
        rule(torch.tensor([1.0, 0.0]), state)
    result = rule(torch.tensor([1.0, 0.5]), state)
    assert result is not None
    assert result.tolist() == [1.0, 0.5]


def test_spike_clip_on_complex_gradients_keeps_the_phase() -> None:
    rule = SpikeClip(threshold=4.0, rest=1)
    state = rule.state_at("site")
    for _ in range(30):
        rule(torch.tensor([1 + 0j]), state)
    v = float(state.get("second moment"))
    result = rule(torch.tensor([30 + 40j]), state)
    assert result is not None
    assert complex(result) == pytest.approx((0.6 + 0.8j) * math.sqrt(4 * v), rel=1e-5)


def test_another_shape_is_refused() -> None:
    rule = SpikeClip(rest=0)
    rule(torch.ones(3), rule.state_at("site"))
    with pytest.raises(RuleError, match=r"shape \(3,\) for one of shape \(4,\)"):
        rule(torch.ones(4), rule.state_at("site"))


@settings(deadline=None)
@given(gradients, st.sampled_from([0.5, 0.999]))
def test_peak_clip_is_as_published(given_gradients: list[np.ndarray], theta: float) -> None:
    agrees(PeakClip(theta), given_gradients, references.peak_clip(given_gradients, theta))


@settings(deadline=None)
@given(finite, st.sampled_from([0.0, 0.98]), st.sampled_from([2.0, -0.5]))
def test_grokfast_is_as_published(given_gradients: list[np.ndarray], alpha: float, weight: float) -> None:
    rule = Grokfast(alpha, weight)
    state = rule.state_at("site")
    scale = max(np.abs(gradient).max() for gradient in given_gradients)
    expected = references.grokfast(given_gradients, alpha, weight)
    for gradient, theirs in zip(given_gradients, expected, strict=True):
        np.testing.assert_allclose(rule(torch.tensor(gradient), state).numpy(), theirs, rtol=1e-9, atol=1e-9 * scale)


def test_grokfast_keeps_what_is_not_finite_to_its_element() -> None:
    rule = Grokfast(0.5, 1.0)
    state = rule.state_at("site")
    assert rule(torch.tensor([1.0, math.nan]), state)[0] == 2
    assert rule(torch.tensor([1.0, 4.0]), state).tolist() == [2, 8]
    assert rule(torch.tensor([math.inf, 4.0]), state).tolist() == [math.inf, 8]
    assert rule(torch.tensor([1.0, 4.0]), state).tolist() == [2, 8]
