"""On a GPU: no rule waits for it, not even at its first call, and a memory that was loaded goes there by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from retrograd.rewriting.rules import (
    AdaGC,
    AutoClip,
    ClipNorm,
    EmaClip,
    Grokfast,
    Noise,
    PeakClip,
    Rule,
    SkipStep,
    SpikeClip,
    ZClip,
)

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_rules() -> list[Rule]:
    clips = [ClipNorm(1.0), AutoClip(), AutoClip(50, 4), ZClip(warmup=3), AdaGC(warmup=3), EmaClip(), SkipStep(size=4)]
    return [*clips, PeakClip(), SpikeClip(rest=1), Grokfast(), Noise(0.1)]


@pytest.mark.parametrize("number", range(len(make_rules())))
@pytest.mark.usefixtures("no_waiting")
def test_a_rule_never_waits_for_the_device(number: int) -> None:
    rule = make_rules()[number]
    value = torch.ones(4, 3, device="cuda")
    for _ in range(8):
        rule(value, rule.state_at("site"))


@pytest.mark.parametrize("number", range(len(make_rules())))
def test_decisions_are_those_of_the_cpu_also_after_loading(number: int) -> None:
    on_gpu, on_cpu, generator = make_rules()[number], make_rules()[number], torch.Generator().manual_seed(0)
    if isinstance(on_gpu, Noise):
        return
    for step in range(12):
        if step == 6:
            saved, on_gpu = on_cpu.state_dict(), make_rules()[number]
            on_gpu.load_state_dict(saved)
        value = torch.randn(4, 3, generator=generator) * (100 if step == 9 else 1)
        results = [rule(each, rule.state_at("site")) for rule, each in ((on_gpu, value.cuda()), (on_cpu, value))]
        ours, theirs = (value if each is None else each.cpu() for each in results)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
