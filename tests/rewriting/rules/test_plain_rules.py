"""Rules without a past, against numpy, torch's own functions or the formula written out."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograd.core.errors import RuleError
from retrograd.rewriting.rules import (
    AGC,
    Centralise,
    Clamp,
    ClipNorm,
    ClipValue,
    EmaClip,
    KeepSign,
    Mask,
    Noise,
    Replace,
    Reverse,
    Rule,
    Scale,
    SkipStep,
    SpikeClip,
    ZClip,
    Zero,
)
from retrograd.rewriting.rules.rule import as_rule
from tests.rewriting.rules import references

VALUE = torch.tensor([[-3.0, 0.5, 0.0], [2.0, math.nan, -math.inf]])


def act(rule: Rule, value: Tensor, site: str = "site", step: int = 0) -> Tensor:
    state = rule.state_at(site)
    state.step = step
    result = rule(value, state)
    return value if result is None else result


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Clamp(-1, 1), [[-1, 0.5, 0], [1, math.nan, -1]]),
        (Clamp(low=0), [[0, 0.5, 0], [2, math.nan, 0]]),
        (Clamp(high=0), [[-3, 0, 0], [0, math.nan, -math.inf]]),
        (ClipValue(1), [[-1, 0.5, 0], [1, math.nan, -1]]),
        (Zero(), [[0, 0, 0], [0, 0, 0]]),
        (Mask(torch.tensor([True, False, False])), [[-3, 0, 0], [2, 0, 0]]),
        (Mask(torch.tensor([[True], [False]])), [[-3, 0.5, 0], [0, 0, 0]]),
        (Scale(2), [[-6, 1, 0], [4, math.nan, -math.inf]]),
        (Reverse(0.5), [[1.5, -0.25, 0], [-1, math.nan, math.inf]]),
        (Replace(7), [[7, 7, 7], [7, 7, 7]]),
        (Replace(torch.tensor([1, 2, 3])), [[1, 2, 3], [1, 2, 3]]),
        (KeepSign(), [[0, 0.5, 0], [2, math.nan, 0]]),
        (KeepSign(positive=False), [[-3, 0, 0], [0, math.nan, -math.inf]]),
    ],
    ids=str,
)
def test_what_becomes_of_each_element(rule: Rule, expected: list[list[float]]) -> None:
    torch.testing.assert_close(act(rule, VALUE), torch.tensor(expected, dtype=torch.float32), equal_nan=True)


def test_clipping_values_is_that_of_torch() -> None:
    parameter = nn.Parameter(torch.zeros(50))
    parameter.grad = torch.randn(50)
    expected = parameter.grad.clone()
    nn.utils.clip_grad_value_([parameter], 0.3)
    assert torch.equal(act(ClipValue(0.3), expected), parameter.grad)


def test_centralising_leaves_no_mean_in_any_output() -> None:
    gradient = torch.randn(6, 3, 2, 2, dtype=torch.float64)
    array = gradient.numpy()
    expected = array - array.mean(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(act(Centralise(), gradient).numpy(), expected, rtol=1e-12)
    rule = Centralise()
    assert rule(torch.ones(3), rule.state_at("bias")) is None
    assert rule(torch.ones(()), rule.state_at("scalar")) is None


@pytest.mark.parametrize("shape", [(5, 4), (6,), ()])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0])
def test_agc_is_as_published(shape: tuple[int, ...], scale: float) -> None:
    weight = torch.randn(shape, dtype=torch.float64) * scale
    gradient = torch.randn(shape, dtype=torch.float64) * 0.01
    rule = AGC()
    rule.state_at("site").value = weight
    expected = references.agc(weight.numpy(), gradient.numpy()).reshape(shape)
    np.testing.assert_allclose(act(rule, gradient).numpy(), expected, rtol=1e-12)


def test_agc_says_what_it_needs() -> None:
    assert AGC.needs_value
    with pytest.raises(RuleError, match="needs the parameter"):
        act(AGC(), torch.ones(3))
    rule = AGC()
    rule.state_at("site").value = torch.ones(4)
    with pytest.raises(RuleError, match=r"shape \(4,\) for one of shape \(3,\)"):
        act(rule, torch.ones(3))


def test_keeping_positive_gradients_is_guided_backpropagation() -> None:
    """R = 1[f > 0] · 1[R' > 0] · R', with f the input of the ReLU."""
    f = torch.randn(200, dtype=torch.float64, requires_grad=True)
    above = torch.randn(200, dtype=torch.float64)
    given = act(KeepSign(), above)
    (guided,) = torch.autograd.grad(F.relu(f), f, given)
    np.testing.assert_array_equal(guided.numpy(), (f.detach().numpy() > 0) * (above.numpy() > 0) * above.numpy())


def test_numbers_may_follow_the_step() -> None:
    assert float(act(Scale(lambda step: 10.0 * step), torch.ones(()), step=3)) == 30
    assert float(act(Reverse(lambda step: 10.0 * step), torch.ones(()), step=3)) == -30
    assert float(act(Noise(lambda step: 0.0 if step == 3 else 1.0), torch.ones(()), step=3)) == 1
    assert float(act(Noise(lambda step: 0.0 if step == 3 else 1.0), torch.ones(()), step=4)) != 1


def test_noise_has_the_spread_that_was_asked_for() -> None:
    value = torch.full((20_000,), 5.0)
    added = act(Noise(0.1), value) - value
    assert abs(float(added.mean())) < 0.005
    assert float(added.std()) == pytest.approx(0.1, rel=0.05)
    relative = act(Noise(0.1, relative=True), value) - value
    assert float(relative.std()) == pytest.approx(0.5, rel=0.05)
    spoilt = value.index_fill(0, torch.tensor([0]), math.nan)
    assert float((act(Noise(0.1, relative=True), spoilt) - spoilt)[1:].std()) == pytest.approx(0.5, rel=0.05)
    whole = act(Noise(1.0), torch.zeros(20_000, dtype=torch.complex64))
    assert float(whole.abs().square().mean()) == pytest.approx(1, rel=0.05)
    assert float(act(Noise(0.1, relative=True), torch.zeros(3)).abs().sum()) == 0


def test_noise_leaves_torchs_random_state_alone_and_comes_again() -> None:
    before = torch.random.get_rng_state()
    one, other, third = Noise(1.0), Noise(1.0), Noise(1.0, seed=1)
    value = torch.zeros(8)
    draws = [act(one, value) for _ in range(3)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(draw, act(other, value)) for draw in draws)
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], act(third, value))
    assert not torch.equal(draws[0], act(Noise(1.0), value, site="another"))


def test_a_replacement_is_safe_from_who_writes_into_the_result() -> None:
    for replacement in (torch.ones(3), torch.ones(1)):
        rule = Replace(replacement)
        act(rule, torch.zeros(3)).add_(5)
        assert act(rule, torch.zeros(3)).tolist() == [1, 1, 1]
    with pytest.raises(RuleError, match="shape"):
        act(Replace(torch.ones(2, 3)), torch.zeros(3))
    assert act(Replace(torch.ones(3)), torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.bfloat16


SMOOTH: list[Rule] = [
    Clamp(-0.5, 0.5),
    Scale(3),
    Reverse(),
    KeepSign(),
    Centralise(),
    ClipValue(0.5),
    ClipNorm(1.0),
    AGC(),
]


@pytest.mark.parametrize("rule", SMOOTH, ids=str)
def test_rules_are_differentiable(rule: Rule) -> None:
    value = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    rule.state_at("site").value = torch.ones(3, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda value: act(rule, value), value)
    assert torch.autograd.gradgradcheck(lambda value: act(rule, value), value)


@pytest.mark.parametrize("rule", [Scale(2), Reverse(), ClipValue(0.5), Zero()], ids=str)
def test_sparse_gradients_stay_sparse(rule: Rule) -> None:
    values = torch.tensor([[1.0, -2.0], [0.1, 3.0], [0.25, 0.25]])
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), values, (6, 2), check_invariants=True)
    result = act(rule, sparse)
    assert result.layout is torch.sparse_coo
    torch.testing.assert_close(result.to_dense(), act(rule, sparse.to_dense()))


@pytest.mark.parametrize(
    "rule", [Clamp(0, 1), Mask(torch.tensor(True)), Noise(1), KeepSign(), Centralise(), SpikeClip()], ids=str
)
def test_other_rules_refuse_sparse_gradients(rule: Rule) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (6,), check_invariants=True)
    with pytest.raises(RuleError, match="works on dense tensors"):
        act(rule, sparse)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClipNorm(-1),
        lambda: ClipNorm(math.nan),
        lambda: ClipNorm("1"),
        lambda: ClipNorm(True),
        lambda: ClipValue(-0.1),
        lambda: Clamp(),
        lambda: Clamp(2, 1),
        lambda: Mask([True, False]),
        lambda: Mask(torch.ones(3)),
        lambda: Scale("half"),
        lambda: Noise(-1),
        lambda: Replace(None),
        lambda: ZClip(alpha=1),
        lambda: ZClip(option="median"),
        lambda: ZClip(warmup=0),
        lambda: EmaClip(gamma1=1.0),
        lambda: SkipStep(size=1),
        lambda: SpikeClip(reset_every=0),
        lambda: act(Mask(torch.ones(4, 1, 1).bool()), torch.ones(3, 3)),
        lambda: act(ClipNorm(1), torch.ones(3).long()),
        lambda: as_rule(ClipNorm),
        lambda: as_rule(3),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(RuleError) as raised:
        make()
    assert raised.value.repair


def test_a_function_is_a_rule() -> None:
    def damp(value: Tensor, state: object) -> Tensor:
        return value / 2

    rule = as_rule(damp)
    assert float(act(rule, torch.ones(()))) == 0.5
    assert rule.name.endswith("damp")
    assert as_rule(rule) is rule


def test_how_rules_print() -> None:
    assert repr(ClipNorm(1.0)) == "ClipNorm(max_norm=1.0)"
    assert repr(Mask(torch.ones(2, 3).bool())) == "Mask(mask=tensor of shape (2, 3))"
    assert repr(Scale(math.sqrt)) == "Scale(factor=sqrt)"
