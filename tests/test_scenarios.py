"""Every way to train, recorded, rewritten, traced and with its saved tensors elsewhere: what hooks by hand find.

Bits of the zoo are compared where each wing has its tests; here are its rows and its rules, and all of the other ways.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

import retrograd as rg
from retrograd.following.tracing.tracer import trace
from retrograd.memory.saved.keeping import keep_saved
from retrograd.rewriting.rewriting import rewrite
from tests.core.recording.collector import collect
from tests.core.recording.oracle import assert_row
from tests.core.recording.test_left_behind import hooks_of, ours_running
from tests.hand import Key, change_gradients, listen, listen_to_optimizers
from tests.memory.saved.test_exactness import Elsewhere
from tests.scenarios import WAYS, ZOO, Trial, build, build_plain, train

Result = list[tuple[str, bytes]]

STEPS = 2

_bare: dict[str, Result] = {}


@pytest.fixture(autouse=True)
def _libraries(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["name"] == "gpt2":
        pytest.importorskip("transformers")


def bare(name: str) -> Result:
    """What comes out without us."""
    if name not in _bare:
        _bare[name] = train(build(name), STEPS)
    return _bare[name]


def differing(found: Result, expected: Result) -> list[str]:
    assert [key for key, _ in found] == [key for key, _ in expected]
    return [key for (key, value), (_, other) in zip(found, expected, strict=True) if value != other]


def all_hooks(run: Trial) -> list[Any]:
    return [hooks_of(model) for model in run.modules.values()]


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# ---- record ---------------------------------------------------------------------------------------------------

LED = "gan"
"""Whose optimizers lead by turns, so that steps and micro-batches are a guess: see the tests of loops."""


ACCUMULATED = ["accumulation_and_clipping", "two_passes_over_one_graph", "a_loss_divided_after_scaling"]

LOSSES = [
    "mlp", "accumulation_and_clipping", "two_passes_over_one_graph", "loss_scaling", "lbfgs", "updates_by_hand",
    "a_closure_that_runs_once",  "a_scale_in_accumulation",
    *(name for name in WAYS if name.startswith(("models_by_turns", "by_hand", "an_optimizer"))),
]  # fmt: skip
"""Whose every pass begins with a loss."""


@pytest.mark.parametrize("name", [name for name in ZOO | WAYS if name != LED])
def test_rows_are_those_of_hooks_by_hand(name: str) -> None:
    """No row is missing and none is left over, each has its step, micro-batch, pass and phase, and its numbers."""
    plain = build_plain(name)
    with listen(plain) as expected:
        train(plain, STEPS)
    run = build(name)
    with collect(run.models) as seen, listen_to_optimizers(run) as gotten:  # a checkpoint adds in another order
        found = train(run, STEPS)
    assert not differing(found, bare(name))
    rows = {Key(row.site, row.phase, row.step, row.micro, row.backward): row for row in seen.rows}
    assert len(rows) == len(seen.rows)
    accumulated = [key for key in rows if key.site.endswith(".accumulated")]
    assert accumulated or name not in ACCUMULATED
    for key in accumulated:
        assert_row(rows.pop(key), gotten[key.site.removesuffix(".accumulated"), key.step])
    assert sorted(rows) == sorted(expected)
    in_parts = run.extra.get("in parts")
    for key, tensors in expected.items():
        if in_parts and key.site.startswith(in_parts) and "output" not in key.site and key.site.endswith(".grad"):
            assert rows[key].sum == pytest.approx(sum(each.double().sum().item() for each in tensors), rel=1e-5)
        elif key.site.endswith(".update"):
            (change,) = map(as_real, tensors)
            assert rows[key].count == change.numel()
            assert rows[key].l2 == pytest.approx(change.double().norm().item(), rel=1e-4)
        else:
            assert_row(rows[key], *tensors)
    assert not seen.facts["faults"]
    updates = {key.step for key in expected if key.site.endswith(".update")}
    assert updates <= {event.moment.step for event in seen.events_of("update")}
    if name in LOSSES:
        passes = {(key.step, key.micro, key.backward) for key in expected if key.site.endswith(".grad")}
        moments = [event.moment for event in seen.events_of("loss")]
        assert [(each.step, each.micro, each.backward) for each in moments] == sorted(passes)


@pytest.mark.parametrize("name", WAYS)
def test_recording_everything_changes_no_bit_and_leaves_nothing(name: str) -> None:
    run = build(name)
    before = all_hooks(run)
    with rg.record(run.models, sites="*"):
        assert not differing(train(run, STEPS), bare(name))
    assert all_hooks(run) == before
    with ours_running() as names:
        run.train_step(STEPS - 1)
    assert names == []


# ---- rewrite --------------------------------------------------------------------------------------------------


def leave(value: Tensor, state: Any) -> None:
    return None


def halve(value: Tensor, state: Any) -> Tensor:
    return value * 0.5


def rewritten(name: str, rules: dict[str, Any]) -> Result:
    run = build(name)
    before = all_hooks(run)
    with rewrite(run.models, rules):
        found = train(run, STEPS)
    assert all_hooks(run) == before
    return found


EVERYWHERE = ("*:outputs", "*:outputs.grad", "*:inputs")
"""A rule on the gradient of an input has a node of its own there, whose sums may be in another order."""

REFUSED = {"views_in_place"}
"""Its module returns a view that is written into, where a rule says that it cannot act."""

OF_LEAVES = {"a_module_that_returns_its_parameter"}
"""A hook by hand stays on the parameter, which a rule does not; see the tests of outputs."""

ELSEWHERE = {"an_input_that_is_optimized", "hooks_of_the_user"}
"""One trains no parameter; in the other a hook of the user's clamps before the rule, and behind a hook by hand."""


@pytest.mark.parametrize("name", [name for name in ZOO if name not in REFUSED])
def test_rules_that_change_nothing_change_no_bit(name: str) -> None:
    assert not differing(rewritten(name, dict.fromkeys(EVERYWHERE, leave)), bare(name))


@pytest.mark.parametrize("name", [name for name in ZOO | WAYS if name not in REFUSED | OF_LEAVES])
def test_half_the_gradient_of_every_output(name: str) -> None:
    """By a rule, and by a hook on each tensor that a module returns."""
    run = build(name)
    with change_gradients(run, lambda gradient: gradient * 0.5):
        expected = train(run, STEPS)
    assert not differing(rewritten(name, {"*:outputs.grad": halve}), expected)


@pytest.mark.parametrize("name", [name for name in ZOO | WAYS if name not in ELSEWHERE])
def test_half_the_gradient_of_every_parameter(name: str) -> None:
    run = build(name)
    for parameter in {each for model in run.modules.values() for each in model.parameters() if each.requires_grad}:
        parameter.register_hook(lambda gradient: gradient * 0.5)
    expected = train(run, STEPS)
    assert not differing(rewritten(name, {"*:parameters.grad": halve}), expected)


# ---- trace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
def test_a_trace_has_every_node_once_and_changes_no_bit(name: str) -> None:
    """Each leaf that gets a gradient is accumulated into once a pass, and no other node runs twice in one."""
    run = build(name)
    with trace() as seen:
        assert not differing(train(run, STEPS), bare(name))
    nodes = [(event.run, event.number, event.name) for event in seen.events if event.number is not None]
    assert nodes
    assert len(set(nodes)) == len(nodes)


# ---- keep_saved -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
def test_saved_tensors_that_wait_elsewhere_change_no_bit(name: str) -> None:
    run = build(name)
    with ExitStack() as stack:
        for model in run.modules.values():
            stack.enter_context(keep_saved(model, Elsewhere()))
        assert not differing(train(run, STEPS), bare(name))
