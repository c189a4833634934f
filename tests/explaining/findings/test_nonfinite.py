"""Births of numbers that are not finite: from what a recording saw, and from rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retrograd.core.history.facts import NonFinite
from retrograd.core.history.history import History
from retrograd.core.history.sink import Moment
from retrograd.core.launch.live_findings import LiveFindings
from retrograd.core.recording.record import record
from retrograd.core.recording.recorder import Recorder
from retrograd.core.runs.findings import Finding
from retrograd.explaining.facts.sources import SOURCES
from retrograd.explaining.facts.watches import WATCHES
from retrograd.explaining.findings.detectors.nonfinite import NanBackward, NanForward, NanUpdate
from retrograd.explaining.findings.explain import explain, explain_record
from retrograd.explaining.findings.record import Record
from tests.explaining.facts.births import (
    BAD_STEP,
    PROGRAMS,
    MaskedAttention,
    Program,
    Simple,
    masked_gradient,
    mse,
    safe_log,
    train,
)
from tests.explaining.facts.looking import line_of
from tests.explaining.findings.by_hand import ask, make_record

pytestmark = pytest.mark.filterwarnings("ignore:std")


def find(program: Program, sources: Sequence[Any] = SOURCES) -> list[Finding]:
    net = program.model()
    history = History()
    recorder = Recorder(net, history, sources=sources)
    recorder.attach()
    program.train(net)
    recorder.close()
    found = explain_record(Record(history, status="finished"))
    assert not [each for each in found.not_checked if each.reason.startswith("it failed")]
    return list(found)


SAID = {"exp overflow": "exp of a number above 88.7", "half overflow": "in float16"}
"""What the failing step still holds of a reason, where that is less than what is seen as it runs."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_finding_is_the_birth(name: str) -> None:
    program = PROGRAMS[name]
    found = find(program)
    assert [each.severity for each in found[:1]] == ["critical"]
    first = found[0]
    assert first.detector == f"nan-{program.born}"
    assert first.step == BAD_STEP
    assert first.site == program.module
    assert first.line == line_of("# born", program.source)
    if program.born in ("forward", "backward"):
        assert SAID.get(name, program.reason) in first.message
    assert len([each for each in found if each.severity != "note"]) == 1, "it explains all that follows"


@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_alone_tell_step_and_kind(name: str) -> None:
    program = PROGRAMS[name]
    [first] = [each for each in find(program, ()) if each.severity != "note"]
    assert first.step == BAD_STEP
    assert first.detector == ("nan-forward" if program.born == "input" else f"nan-{program.born}")


HEALTHY: dict[str, Any] = {
    "masks of −inf": (MaskedAttention, mse),
    "a log of 0 that nobody uses": (Simple, safe_log),
    "a gradient that is masked": (Simple, masked_gradient),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_what_is_masked(name: str) -> None:
    model, loss_of = HEALTHY[name]
    found = find(Program(model, lambda net: train(net, loss_of), "", "", "", "", None))
    assert not [each for each in found if each.detector.startswith("nan")]


def test_numbers_that_grow_to_infinity_are_the_fault_of_what_made_them_grow() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=30.0)
        for _ in range(60):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(torch.randn(16, 4)), torch.rand(16, 3)).backward()
            optimizer.step()

    class Straight(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    found = find(Program(Straight, run, "", "", "", "", None))
    assert found[0].detector == "learning-rate-too-high"
    assert not [each for each in found if each.detector.startswith("nan") and each.severity != "note"]


def test_an_overflow_that_is_cleared_before_the_update_is_none() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(6):
            for size in (1e3, 1e3, 0.0):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(torch.randn(16, 4) * size), torch.rand(16, 3))
                scaler.scale(loss).backward()
            assert all(bool(each.grad.isfinite().all()) for each in net.parameters() if each.grad is not None)
            scaler.step(optimizer)
            scaler.update()

    found = find(Program(Simple, run, "", "", "", "", None))
    assert not [each for each in found if each.detector.startswith("nan")]


def test_gradients_that_loss_scaling_skips_are_expected() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
        for _ in range(12):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(torch.randn(16, 4) * 1e3), torch.rand(16, 3))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    found = find(Program(Simple, run, "", "", "", "", None))
    assert not [each for each in found if each.detector.startswith("nan")]


def test_the_norm_of_gradients_that_loss_scaling_skips_is_no_loss() -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60)
        for _ in range(12):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(torch.randn(16, 4) * 1e3), torch.rand(16, 3))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()

    found = find(Program(Simple, run, "", "", "", "", None), (*SOURCES, *WATCHES))
    assert not [each for each in found if each.detector.startswith("nan")]


class Padded(nn.Module):
    """Attention in which rows of padding see nothing: NaN, which the loss ignores and the gradient meets."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.o = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        h = self.e(tokens)
        scores = (h @ h.mT).masked_fill(pad[:, None, :] | pad[:, :, None], -torch.inf)
        return self.o(scores.softmax(-1) @ h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_watched", [True, False])
def test_nan_that_the_loss_ignores_is_not_laid_to_the_update(*, is_watched: bool) -> None:
    def run(net: nn.Module) -> None:
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for step in range(8):
            tokens = torch.randint(0, 12, (4, 6))
            pad = torch.arange(6)[None] >= torch.tensor([6, 6, 6, 6 if step < BAD_STEP else 3])[:, None]
            out = net(tokens, pad)
            loss = F.cross_entropy(out.flatten(0, 1), tokens.masked_fill(pad, -100).flatten())
            optimizer.zero_grad()
            loss.backward()
            assert bool(loss.isfinite()) == (step <= BAD_STEP)
            optimizer.step()

    found = find(Program(Padded, run, "", "", "", "", None), (*SOURCES, *WATCHES) if is_watched else SOURCES)[0]
    assert (found.detector, found.step) == ("nan-backward" if is_watched else "nan-forward", BAD_STEP)
    if is_watched:
        assert "the forward has made NaN in self" in found.message
        assert "softmax over a row that is all −inf" in found.message
        assert "unmasked" in found.repair
    else:
        assert found.message.startswith("NaN is made in o, or before it")


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_parameter_that_no_model_holds_is_not_called_data(*, is_watched: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 3, requires_grad=True)
    x = torch.randn(10, 4)
    x[3] = 0
    history = History()
    recorder = Recorder(None, history, sources=(*SOURCES, *WATCHES) if is_watched else SOURCES)
    recorder.attach()
    for _ in range(4):
        ((x @ w).square().sum(1).sqrt() - 1).square().mean().backward()
        assert w.grad is not None
        assert w.grad.isnan().all()
        with torch.no_grad():
            w -= 0.1 * w.grad
        w.grad = None
    recorder.close()
    [found] = [each for each in explain_record(Record(history)) if each.detector.startswith("nan")]
    assert "data" not in found.message
    assert "in a tensor that requires grad" in found.message
    assert found.repair.startswith("Where it is a parameter, look at its gradient")


class Neighbours(nn.Module):
    """Means over neighbours, of an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, degree: torch.Tensor) -> torch.Tensor:
        total = x * (degree > 0)
        mean = total / degree  # born
        return self.fc(mean)


def train_neighbours(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(8):
        degree = torch.ones(6, 1)
        degree[2] = 0.0 if step == BAD_STEP else 1.0
        loss = net(torch.randn(6, 4), degree).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_what_is_made_without_a_graph_of_finite_inputs_does_not_come_in_with_them() -> None:
    [found] = find(Program(Neighbours, train_neighbours, "forward", "div", "", "self", Neighbours))
    assert (found.detector, found.step, found.site) == ("nan-forward", BAD_STEP, "self")
    assert found.line == line_of("# born", Neighbours)


def train_with_rewards(net: nn.Module, make: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(8):
        count = 1 if step == BAD_STEP else 5
        reward = make(torch.arange(count, dtype=torch.float32))
        loss = (net(torch.randn(count, 4)).mean(1) * reward).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_what_comes_in_beside_the_inputs_is_not_said_to_be_the_data() -> None:
    def normalise(reward: torch.Tensor) -> torch.Tensor:
        return (reward - reward.mean()) / reward.std()

    [found] = find(Program(Simple, lambda net: train_with_rewards(net, normalise), "input", "mul", "", "", None))
    assert (found.step, found.detector) == (BAD_STEP, "nan-input")
    assert "beside the model's inputs, which are finite, at step 5, in what `mul` takes" in found.message
    assert "standard deviation of one element" in found.repair


def test_an_update_that_the_next_forward_shows() -> None:
    """Rows tell that the update of step 0 made it; it was seen being made of that, a step after."""
    seen = NonFinite(name="0", born="forward", operation="linear", moment=Moment(1, phase="forward"))
    updates = {0: np.array([np.nan, 1.0]), 1: np.array([np.nan, np.nan])}
    made = make_record(
        range(2), lambda step: {"0:weight.grad": np.ones(2), "0:weight.update": updates[step]}, [0.7, np.nan],
        facts=[seen],
    )  # fmt: skip
    assert [each.step for each in ask(NanUpdate, made)] == [0]
    assert not ask(NanForward, made)


@pytest.mark.parametrize("micros", [1, 3])
def test_a_gradient_that_a_hand_spoils_behind_backward_is_one_fault_at_one_step(micros: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    history, told = History(), list[Finding]()
    recorder = Recorder(net, history, sources=SOURCES)
    LiveFindings(recorder.events, told.append)
    recorder.attach()
    try:
        for step in range(5):
            optimizer.zero_grad()
            for _ in range(micros):
                (net(torch.randn(6, 4)).square().mean() / micros).backward()
            if step == 2:
                assert net.weight.grad is not None
                net.weight.grad[0, 0] = float("nan")
            optimizer.step()
    finally:
        recorder.close()
    [found] = explain_record(Record(history))
    assert [(each.detector, each.site, each.step) for each in (*told, found)] == [("nan-update", "self:weight", 2)] * 2
    if micros == 1:
        assert "by `SGD.step`, or by what is written by hand" in found.message
    else:  # what the passes gave is known to be finite, and what the optimizer was given is not
        assert "its .grad is not finite before the update" in found.message
        assert "SGD.step" not in found.message
    assert ".grad behind backward" in found.repair


@pytest.mark.parametrize("beside", ["norm", "std", "log"])
def test_a_root_that_is_taken_between_two_looks_is_laid_to_nothing_else(beside: str) -> None:
    """``norm`` and ``std`` have a derivative of 0 where they are 0; what was noted before may not be what runs now."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    take = {"norm": lambda y: y.norm(dim=-1), "std": lambda y: y.std(-1), "log": lambda y: (y + 10).log()}[beside]
    with record(net) as recording:
        for step in range(90):
            y = net(torch.randn(8, 4))
            loss = y.square().mean() + 0.01 * take(y).mean()
            if step == 80:
                loss = loss + (y * 0).square().sum(-1).sqrt().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    [found] = explain(recording.history)
    assert (found.detector, found.step) == ("nan-backward", 80)
    assert "between self and the loss" in found.message
    assert "norm" not in found.message
    assert "std" not in found.message
    assert ("by `log` it seems, as operations were at step 0" in found.message) == (beside == "log")


# ---- without an optimizer ----


class Logarithmic(nn.Module):
    """NaN in the loss, and so in all gradients; or a derivative that is NaN under a loss that is not."""

    def __init__(self, *, is_in_backward: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.is_in_backward = is_in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        return (h * 0).abs().sqrt() if self.is_in_backward else torch.log(h - 10) * h


def run_backward(out: torch.Tensor, net: nn.Module) -> None:
    out.sum().backward()


def ask_for_gradients(out: torch.Tensor, net: nn.Module) -> None:
    for each, gradient in zip(net.parameters(), torch.autograd.grad(out.sum(), list(net.parameters())), strict=True):
        each.grad = gradient


def begin_at_many(out: torch.Tensor, net: nn.Module) -> None:
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize("differentiate", [run_backward, ask_for_gradients, begin_at_many])
@pytest.mark.parametrize("is_in_backward", [False, True])
def test_no_optimizer_is_needed(differentiate: Any, *, is_in_backward: bool) -> None:
    torch.manual_seed(0)
    net = Logarithmic(is_in_backward=is_in_backward)
    history, told = History(), list[Finding]()
    recorder = Recorder(net, history, sources=SOURCES)
    LiveFindings(recorder.events, told.append)
    recorder.attach()
    try:
        for _ in range(3):
            net.zero_grad()
            differentiate(net(torch.randn(3, 4)), net)
    finally:
        recorder.close()
    assert all(bool(each.grad.isnan().all()) for each in net.parameters() if each.grad is not None)
    found = [each for each in explain_record(Record(history)) if each.detector.startswith("nan")]
    assert [each.severity for each in found] == ["critical"]
    assert found[0].detector == ("nan-backward" if is_in_backward else "nan-forward")
    assert {each.detector for each in told} <= {found[0].detector}, "what is said at once is said at the end"


def test_without_a_model_the_end_says_what_was_said_at_once() -> None:
    history, told = History(), list[Finding]()
    recorder = Recorder(None, history, sources=SOURCES)
    LiveFindings(recorder.events, told.append)
    recorder.attach()
    try:
        for step in range(12):
            torch.tensor(-1.0 if step == 7 else 1.0, requires_grad=True).sqrt().backward()
    finally:
        recorder.close()
    found = explain_record(Record(history))
    assert [(each.detector, each.severity, each.step) for each in (*told, *found)] == [
        ("nan-forward", "critical", 7)
    ] * 2
    assert found[0].message == told[0].message == "NaN is made, step 7: sqrt of a negative number"


# ---- what comes of it ----


class Rooted(nn.Module):
    """NaN at the roots of 0, which a ReLU before them throws away; or does not."""

    def __init__(self, *, is_masked: bool) -> None:
        super().__init__()
        self.fc, self.head, self.is_masked = nn.Linear(4, 8), nn.Linear(8, 1), is_masked
        self.relu, self.unused, self.tied = nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 8)
        self.tied.weight = self.fc.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        h = self.relu(h) if self.is_masked else self.relu(h) * 1.0 + 0 * h
        return self.head(torch.where(h > 0, h.sqrt(), torch.zeros_like(h)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("sources", [SOURCES, (*SOURCES, *WATCHES)])
def test_a_gradient_that_is_thrown_away_is_none(sources: Sequence[Any], *, is_masked: bool) -> None:
    torch.manual_seed(0)
    net = Rooted(is_masked=is_masked)
    history = History()
    recorder = Recorder(net, history, sources=sources)
    recorder.attach()
    is_bad = False
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        net(torch.randn(16, 4)).square().mean().backward()
        is_bad |= any(bool(each.grad.isnan().any()) for each in net.parameters() if each.grad is not None)
        optimizer.step()
    recorder.close()
    assert is_bad != is_masked
    assert bool(history["relu:output.grad"].nonfinite.any())
    found = [each for each in explain_record(Record(history)) if each.detector.startswith("nan")]
    assert [each.severity for each in found] == ([] if is_masked else ["critical"])
    checked = " ".join(each for finding in found for each in finding.precondition)
    assert ("weight.grad at step 0" in checked) != is_masked


def test_a_gradient_of_which_no_record_tells_where_it_went_is_a_note() -> None:
    torch.manual_seed(0)
    net = Rooted(is_masked=True)
    with record(net, sites="*:output.grad") as recording:
        for _ in range(3):
            net(torch.randn(16, 4)).square().mean().backward()
    [found] = explain(recording).of("nan-backward")
    assert found.severity == "note"
    assert not [each for each in found.precondition if "loss" in each or "weight" in each]


# ---- one place decides ----


class Turning(nn.Module):
    """Another graph in the step that fails than in those before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(4, 4), nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.calls += 1
        h = h / (h.sum() * 0 if self.calls > BAD_STEP else 1.0)  # born
        return self.b(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_was_watched_decides_and_a_graph_unlike_those_before_tells_no_line(*, is_watched: bool) -> None:
    torch.manual_seed(0)
    net = Turning()
    history = History()
    recorder = Recorder(net, history, sources=(*SOURCES, *WATCHES) if is_watched else SOURCES)
    recorder.attach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(9):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    recorder.close()
    found = explain_record(Record(history))[0]
    assert (found.detector, found.step) == ("nan-forward", BAD_STEP)
    assert "division by 0" in found.message
    assert (found.site, found.line) == (("self", line_of("# born", Turning)) if is_watched else ("", ""))
    assert f"each operation of step {BAD_STEP} was watched as it ran" in found.precondition or not is_watched


def test_of_two_facts_the_watched_one_is_said() -> None:
    seen = {"born": "forward", "operation": "div", "reason": "division by 0", "moment": Moment(3, phase="forward")}
    facts = [
        NonFinite(name="b", line="train.py:10", **seen),
        NonFinite(name="a", line="train.py:9", watched=True, **seen),
    ]  # type: ignore[arg-type]
    for listed in (facts, facts[::-1]):
        made = make_record(range(5), lambda step: {"0:output": np.ones(2)}, [1, 1, 1, np.nan, np.nan], facts=listed)
        [found] = ask(NanForward, made)
        assert (found.site, found.line) == ("a", "train.py:9")


def test_a_supposed_derivative_gives_way_to_rows_that_show_an_update() -> None:
    """The graph of step 1 had a root of 0; the gradients were finite, and the update was not."""
    moment = Moment(1, phase="forward")
    supposed = NonFinite(name="0", born="backward", operation="sqrt", reason="infinite", certain=False, moment=moment)
    updates = {0: np.ones(2), 1: np.array([np.nan, 1.0]), 2: np.array([np.nan, np.nan])}
    made = make_record(
        range(3), lambda step: {"0:weight.grad": np.ones(2), "0:weight.update": updates[step]}, [0.7, 0.7, np.nan],
        facts=[supposed],
    )  # fmt: skip
    assert [each.step for each in ask(NanUpdate, made)] == [1]
    assert not ask(NanBackward, made)


# ---- reasons follow from what was taken ----


def hide(out: torch.Tensor, *, is_target: bool) -> torch.Tensor:
    hidden = torch.zeros(out.shape, dtype=torch.bool)
    hidden[2, 1 if is_target else 2] = True
    return out.masked_fill(hidden, -torch.inf)


def masked_logit(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return F.cross_entropy(hide(out, is_target=step == BAD_STEP), torch.ones(6, dtype=torch.long))


def masked_log_probability(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return F.nll_loss(hide(out, is_target=step == BAD_STEP).log_softmax(-1), torch.ones(6, dtype=torch.long))


def too_few_frames(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    target = torch.tensor([[1, 1, 2, 2] if step == BAD_STEP else [1, 2, 1, 2]])
    return F.ctc_loss(out[:5, None].log_softmax(-1), target, (5,), (4,))


def of_nothing(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return (
        hide(out * 1.0, is_target=False)
        .masked_fill(torch.full((6, 3), step == BAD_STEP), -torch.inf)
        .logsumexp(-1)
        .mean()
    )


def too_large(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    return (out * (3e38 if step == BAD_STEP else 1.0) * 100).mean()


def bad_target(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    y = y * (torch.nan if step == BAD_STEP else 1.0)
    return (out - y).square().mean()


REASONS: dict[str, tuple[Any, str, str]] = {
    "a logit of −inf": (masked_logit, "a class whose log-probability is −inf", "−inf"),
    "a log-probability of −inf": (masked_log_probability, "a class whose log-probability is −inf", "−inf"),
    "frames": (too_few_frames, "a target that needs 6 frames, of which there are 5", "6 frames"),
    "logsumexp": (of_nothing, "logsumexp over a row that is all −inf", "all −inf"),
    "overflow": (too_large, "", "overflow of float32"),
    "a target": (
        bad_target,
        "by `sub` between the model's output and the loss, or comes in there",
        "mul with nan",
    ),
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("is_watched", [True, False])
def test_reasons_are_read_off_what_was_taken(name: str, *, is_watched: bool) -> None:
    loss_of, in_graph, watched = REASONS[name]
    program = Program(Simple, lambda net: train(net, loss_of), "", "", "", "", None)
    found = find(program, (*SOURCES, *WATCHES) if is_watched else SOURCES)[0]
    assert found.detector in ("nan-forward", "nan-input")
    assert found.step == BAD_STEP
    assert (watched if is_watched else in_graph) in found.message
    assert ("float32" in found.message) == (name == "overflow" and is_watched)
