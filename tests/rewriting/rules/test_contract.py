"""Every rule of ours keeps the contract that users' own rules are tested for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from retrograd.rewriting import rules
from retrograd.rewriting.rules import (
    AGC,
    AdaGC,
    AutoClip,
    Centralise,
    Clamp,
    ClipNorm,
    ClipValue,
    EmaClip,
    Grokfast,
    KeepSign,
    Mask,
    Noise,
    NormRule,
    PassRule,
    PeakClip,
    Replace,
    Reverse,
    Rule,
    Scale,
    SkipStep,
    SpikeClip,
    Substitute,
    ZClip,
    Zero,
)
from retrograd.testing.rule_tests import RuleTests

MAKERS: dict[str, Callable[[], Rule]] = {
    "AGC": AGC,
    "AdaGC": lambda: AdaGC(warmup=5),
    "AutoClip": AutoClip,
    "AutoClip of a window": lambda: AutoClip(50, 4),
    "Centralise": Centralise,
    "Clamp": lambda: Clamp(-0.5, 0.5),
    "ClipNorm": lambda: ClipNorm(1.0),
    "ClipValue": lambda: ClipValue(0.5),
    "EmaClip": EmaClip,
    "Grokfast": Grokfast,
    "KeepSign": KeepSign,
    "Mask": lambda: Mask(torch.tensor([True, False, True])),
    "Noise": lambda: Noise(0.1),
    "Noise, relative": lambda: Noise(0.1, relative=True),
    "PeakClip": lambda: PeakClip(0.9),
    "Replace": lambda: Replace(torch.arange(3.0)),
    "Reverse": lambda: Reverse(0.5),
    "Scale": lambda: Scale(lambda step: 1 / (1 + step)),
    "SkipStep": lambda: SkipStep(1.0, 4),
    "SpikeClip": lambda: SpikeClip(2.0, 0.9, reset_every=16, rest=3),
    "Substitute": lambda: Substitute(3),
    "ZClip": lambda: ZClip(warmup=5),
    "Zero": Zero,
}


@pytest.mark.parametrize("name", MAKERS)
class TestOurRules(RuleTests):
    @pytest.fixture(autouse=True)
    def choose(self, name: str) -> None:
        self.make_rule = MAKERS[name]
        self.reads_numbers = name.startswith(("Noise", "Mask", "Replace"))  # a generator; tensors that have data
        self.recovers_after = 7 if name == "Substitute" else 1


def test_no_rule_is_left_out() -> None:
    ours = {thing.__name__ for thing in vars(rules).values() if isinstance(thing, type) and issubclass(thing, Rule)}
    assert ours - {Rule.__name__, NormRule.__name__, PassRule.__name__, "PCGrad"} == {
        name.split()[0].strip(",") for name in MAKERS
    }


@pytest.mark.parametrize("name", MAKERS)
def test_a_rule_prints_in_one_short_line(name: str) -> None:
    assert len(repr(MAKERS[name]())) < 120
    assert "\n" not in repr(MAKERS[name]())


@pytest.mark.parametrize("name", MAKERS)
def test_a_rule_says_where_it_is_from(name: str) -> None:
    assert type(MAKERS[name]()).__doc__


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("Noise", "Substitute")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3, 3)])
def test_other_types_and_shapes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The same form comes back, and the same numbers as in double precision to the rounding of the type."""
    rule, exact = MAKERS[name](), MAKERS[name]()
    if name in ("Replace", "Mask") and shape == ():
        return
    wide = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        value = (torch.randn(shape, dtype=wide, generator=generator) * (1 + step)).to(dtype)
        states = (rule.state_at("site"), exact.state_at("site"))
        for state in states:
            state.step, state.value = step, torch.ones(shape, dtype=wide)
        if dtype.is_complex and name in ("Clamp", "ClipValue", "KeepSign"):
            with pytest.raises(rules.rule.RuleError, match="no order"):
                rule(value, states[0])
            continue
        result, expected = rule(value, states[0]), exact(value.to(wide), states[1])
        assert (result is None) == (expected is None)
        if result is not None and expected is not None:
            assert (result.dtype, result.shape) == (dtype, value.shape)
            if name != "Noise, relative":
                rtol = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 1e-5)
                torch.testing.assert_close(result.to(wide), expected, rtol=rtol, atol=rtol)
