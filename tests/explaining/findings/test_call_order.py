import torch
from torch import nn

import retrograd as rg
from retrograd.core.runs.findings import Finding
from retrograd.explaining.findings.explain import make_record
from tests.explaining.findings.by_hand import ask
from tests.explaining.findings.programs import make_calls, make_optimizer, make_program


def test_updates_that_loss_scaling_has_skipped() -> None:
    skipped = ("zero_grad", "forward", "backward", "scaler.step", "scaler.update")
    calls = make_calls([skipped] * 30, scaler__step={"about": "SGD"}, scaler__update={"value": 2.0})
    record = make_program([make_optimizer(), *calls])
    assert [update.optimizer for update in record.updates] == ["SGD"] * 30
    assert not ask("optimizer-never-steps", record)
    made = (*skipped[:4], "step", "scaler.update")
    both = make_calls([skipped, made, made], scaler__step={"about": "SGD"}, scaler__update={"value": 2.0})
    assert [update.call.name for update in make_program(both).updates] == ["scaler.step", "step", "step"]


def _adversaries(*, generator_runs: bool) -> list[Finding]:
    """What is said of two networks that are trained in turn, the second perhaps without a backward pass."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    of_first, of_second = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second))
    with rg.record({"first": first, "second": second}) as recording:
        for _ in range(5):
            of_second.zero_grad()
            second(first(torch.randn(4, 3)).detach()).square().mean().backward()
            of_second.step()
            of_first.zero_grad()
            loss = second(first(torch.randn(4, 3))).square().mean()
            if generator_runs:
                loss.backward()
            of_first.step()
    seen = make_record(recording)
    return [*ask("backward-never-called", seen), *ask("step-before-backward", seen)]


def test_one_of_two_that_never_has_a_gradient() -> None:
    [found] = _adversaries(generator_runs=False)
    assert (found.detector, found.severity) == ("backward-never-called", "critical")
    assert "of its parameters has ever had a gradient" in found.message
    assert not _adversaries(generator_runs=True)
