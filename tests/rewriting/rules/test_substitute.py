from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import retrograd as rg
from retrograd.core.errors import RuleError
from retrograd.core.history.kept import Kept
from retrograd.core.history.sink import Moment, Phase
from retrograd.rewriting.rules import Substitute


def act(rule: Substitute, value: Tensor, site: str = "site:output.grad", step: int = 0) -> Tensor:
    state = rule.state_at(site)
    state.step = step
    result = rule(value, state)
    return value if result is None else result


def test_from_the_past_of_the_site() -> None:
    rule, values = Substitute(2), [torch.full((2,), float(number)) for number in range(5)]
    results = [act(rule, value) for value in values]
    assert [float(result[0]) for result in results] == [0, 1, 0, 1, 2]
    results[-1].add_(100)
    values[3].add_(100)  # what was seen is copied: a parameter's gradient is added to
    assert float(act(rule, torch.zeros(2))[0]) == 3


def test_from_another_site() -> None:
    rule = Substitute("a:output")
    assert act(rule, torch.ones(2), "b:output").tolist() == [1, 1]
    source = torch.tensor([5.0, 6.0], requires_grad=True) * 1
    assert act(rule, source, "a:output") is source
    result = act(rule, torch.ones(2, dtype=torch.bfloat16), "b:output")
    assert (result.tolist(), result.dtype, result.requires_grad) == ([5, 6], torch.bfloat16, False)
    with pytest.raises(RuleError, match="shape"):
        act(rule, torch.ones(3), "b:output")


def test_from_a_list() -> None:
    given = [torch.full((2,), float(number)) for number in range(2)]
    rule = Substitute(given)
    with pytest.warns(rg.RetrogradWarning, match="The list has 2 tensors"):
        assert [float(act(rule, torch.full((2,), 9.0))[0]) for _ in range(3)] == [0, 1, 9]
    assert float(act(rule, torch.full((2,), 9.0), "another")[0]) == 0
    assert repr(rule) == "Substitute(source=list of 2)"


@pytest.mark.parametrize("stored", [True, False])
def test_from_a_recording_at_the_same_step(tmp_path: Path, stored: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    keep = rg.Keep("0:output.grad", copy=True)
    with rg.record(model, tmp_path / "run" if stored else None, sites="0:output.grad", tensors=keep) as recording:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):  # micro-batches
                output = model(torch.randn(5, 3))
                output.register_hook(lambda gradient: seen.append(gradient.clone()))
                output.square().sum().backward()
            optimizer.step()
    history = rg.open_run(tmp_path / "run").history if stored else recording.history
    rule = Substitute(history["0:output.grad"])
    value = torch.full((5, 2), 9.0)
    for step in (1, 3):  # steps may be left out
        for micro in range(2):
            assert torch.equal(act(rule, value, step=step), seen[2 * step + micro])
    with pytest.warns(rg.RetrogradWarning, match="step 3, .* call 3 of the kind in this step, and the recording has 2"):
        assert act(rule, value, step=3) is value  # a third call that was not recorded
    assert act(rule, value, step=17) is value  # which is not said again
    several = Substitute(list(history["0:output.grad"].tensors)[:2])
    assert torch.equal(act(several, value, step=0), seen[0])
    with pytest.warns(rg.RetrogradWarning, match="in step 1, .* has tensors of step 0, none of them for this step"):
        assert act(several, value, step=1) is value
    assert torch.equal(act(rule.without_memory(), value, "another:output.grad", step=3), seen[6])
    assert "Series" in repr(rule)


def kept_tensors(*phases: Phase) -> list[Kept]:
    """A tensor for each phase, of its number."""
    return [
        Kept(Moment(0, phase=phase), "a:output", lambda number=number: torch.full((2,), float(number)))
        for number, phase in enumerate(phases)
    ]


def results_of(rule: Substitute, modes: list[bool]) -> list[float]:
    """What the rule gives for calls in training mode or not; 9 where it leaves the value alone."""
    results = []
    for training in modes:
        rule.state_at("a:output").training = training
        results.append(float(act(rule, torch.full((2,), 9.0), "a:output")[0]))
    return results


def test_an_evaluation_within_training_gets_none_of_its_tensors() -> None:
    with pytest.warns(rg.RetrogradWarning, match="eval mode, and what was recorded is of training alone"):
        assert results_of(Substitute(kept_tensors("train", "train")), [True, False, True]) == [0, 9, 1]


def test_evaluations_get_what_was_recorded_of_evaluations() -> None:
    assert results_of(Substitute(kept_tensors("train", "no_grad")), [True, False, False]) == [0, 1, 1]
    rule = Substitute(kept_tensors("eval", "inference", "failed"))
    assert results_of(rule, [False, False]) == [0, 1]
    with pytest.warns(rg.RetrogradWarning, match="nothing to put"):
        assert results_of(rule, [False]) == [9]


@pytest.mark.parametrize("reads", ["backward", "no_grad", "forward"])
@pytest.mark.parametrize("training", [True, False])
def test_an_activation_takes_the_place_of_another(reads: str, training: bool) -> None:
    """Activation patching: an output of one input in the forward of another one."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).train(training)
    clean, corrupt = torch.randn(1, 4), torch.randn(1, 4)
    with rg.record(net, tensors="1:output") as recording, torch.set_grad_enabled(reads != "no_grad"):
        found = net(clean)
        if reads == "backward":
            found.sum().backward()
    with rg.rewrite(net, {"1:output": Substitute(recording.history["1:output"])}):
        for _ in range(3):  # one forward was recorded: it serves each, in both modes
            assert torch.equal(net(corrupt), found)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_of_another_size_is_one_error_with_one_repair(training: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8)).train(training)
    with rg.record(net, tensors="0:output") as recording, torch.no_grad():
        net(torch.randn(2, 4))
    rule = Substitute(recording.history["0:output"])
    with rg.rewrite(net, {"0:output": rule}), pytest.raises(RuleError) as caught:
        net(torch.randn(3, 4))
    said = str(caught.value)
    assert said.startswith("Substitute has a tensor of shape (2, 8) for one of shape (3, 8), at 0:output.")
    assert (said.count("Try:"), said.count("[bad-rule]")) == (1, 1)
    assert caught.value.__cause__ is None
    assert "Choice(" not in repr(rule)


def test_a_list_that_is_through_is_said() -> None:
    rule = Substitute([torch.ones(2)])
    assert act(rule, torch.zeros(2)).tolist() == [1, 1]
    with pytest.warns(rg.RetrogradWarning, match="The list has 1 tensor"):
        assert act(rule, torch.zeros(2)).tolist() == [0, 0]


def test_a_tensor_that_was_lost_is_told() -> None:
    rule = Substitute([Kept(Moment(0), "a:output", lambda: None)])
    with pytest.raises(RuleError, match="changed in place"):
        act(rule, torch.ones(2))


def test_a_recording_without_tensors_is_refused() -> None:
    model = torch.nn.Linear(3, 2)
    with rg.record(model) as recording:
        model(torch.randn(5, 3)).sum().backward()
    with pytest.raises(RuleError, match="no tensors"):
        Substitute(recording.history["self:output.grad"])


def test_in_a_training_run() -> None:
    """The gradient of one branch in place of that of the other."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "b": torch.nn.Linear(3, 2)})
    x = torch.randn(5, 3)
    swap = Substitute("b:output.grad")
    with rg.rewrite(model, {"b:output.grad": swap, "a:output.grad": swap}):
        a = model["a"](x)
        b = model["b"](x)
        ((b * 3).sum() + (a * 5).sum()).backward()
    torch.testing.assert_close(model["b"].bias.grad, torch.full((2,), 15.0))
    torch.testing.assert_close(model["a"].bias.grad, torch.full((2,), 15.0))


@pytest.mark.parametrize("source", [0, -1, None, 1.5, torch.ones(3), [], [None]])
def test_what_is_no_source_is_refused(source: object) -> None:
    with pytest.raises(RuleError):
        Substitute(source)  # type: ignore[arg-type]
