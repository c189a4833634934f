"""Two runs of which the script knows what is not the same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograd as rg
from retrograd.core.cli import main
from retrograd.core.errors import CompareError
from retrograd.core.history.fact import Fact
from retrograd.core.history.facts import Buffer, Call, Input, Modes, OptimizerMade, Parameter
from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, EventKind, Moment
from retrograd.core.limits import LIMITS
from retrograd.explaining.comparing.differences import find_differences, knows_inputs
from retrograd.explaining.findings.record import Record


@dataclass
class Script:
    """A small training run; each field is one way in which it can be another."""

    seed: int = 0
    data: int = 1
    steps: int = 12
    lr: float = 0.1
    dropout: float = 0.1
    activation: type[nn.Module] = nn.ReLU
    smoothing: float = 0.0
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    is_half: bool = False
    perturb: float = 0.0
    batch: int = 16
    at_step: dict[int, Callable[[nn.Module, torch.optim.Optimizer], Any]] = field(default_factory=dict)
    before_update: dict[int, Callable[[nn.Module], Any]] = field(default_factory=dict)
    micros: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    compiled: bool = False
    redraw: int | None = None

    def run(self, output: Path | None = None) -> History:
        torch.manual_seed(self.seed)
        net = nn.Sequential(
            nn.Linear(6, 16),
            self.activation(),
            nn.Dropout(self.dropout),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 3),
        )
        if self.perturb:
            with torch.no_grad():
                weight = net[3].weight
                assert isinstance(weight, Tensor)
                weight.mul_(1 + self.perturb * torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))
        optimizer = self.optimizer(net.parameters(), lr=self.lr, **self.options)  # type: ignore[call-arg]
        model = torch.compile(net, backend="eager") if self.compiled else net
        generator = torch.Generator().manual_seed(self.data)
        if self.redraw is not None:
            torch.manual_seed(self.redraw)
        with rg.record(model, output) as recording:
            for step in range(self.steps):
                if step in self.at_step:
                    self.at_step[step](net, optimizer)
                optimizer.zero_grad()
                for _ in range(self.micros):
                    x = torch.randn(self.batch, 6, generator=generator)
                    y = x[:, :3].argmax(1)
                    with torch.autocast("cpu", torch.bfloat16, enabled=self.is_half):
                        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=self.smoothing)
                    (loss / self.micros if self.micros > 1 else loss).backward()
                if step in self.before_update:
                    self.before_update[step](net)
                optimizer.step()
        return recording.history


@pytest.fixture(scope="module")
def first() -> History:
    return Script().run()


def slugs(comparison: rg.Comparison) -> list[str]:
    return [each.detector for each in comparison.findings if each.severity != "note"]


def place(comparison: rg.Comparison) -> tuple[str, int]:
    assert comparison.parting is not None
    return comparison.parting.site, comparison.parting.step


def test_the_same_seed_is_identical(first: History) -> None:
    comparison = rg.compare(first, Script().run())
    assert comparison.verdict == "identical"
    assert comparison
    assert comparison.first is comparison.parting is None
    assert not comparison.findings
    assert "0 differ" in comparison.about


def test_another_seed_begins_with_other_parameters(first: History) -> None:
    comparison = rg.compare(first, Script(seed=1).run())
    assert comparison.verdict == "different"
    assert not comparison
    assert slugs(comparison)[0] == "initial-parameters"
    assert place(comparison) == ("0:output", 0)


def test_a_rate_under_a_scheduler_is_one_difference() -> None:
    def schedule(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    comparison = rg.compare(*(Script(lr=rate, steps=3, at_step={0: schedule}).run() for rate in (0.1, 0.05)))
    assert slugs(comparison) == ["learning-rate"]


@pytest.mark.parametrize(
    "script",
    [
        Script(lr=0.05, steps=8),
        Script(optimizer=torch.optim.Adam, smoothing=0.1),
        Script(activation=nn.Tanh, batch=8, at_step={3: lambda net, optimizer: net.eval()}),
        Script(is_half=True, at_step={2: lambda net, optimizer: optimizer.zero_grad()}),
    ],
)
def test_a_third_run_is_never_called_by_the_letter_of_the_second(first: History, script: Script) -> None:
    other = script.run()
    second, third = rg.compare(first, other), rg.compare(first, other, letter="C")
    assert re.search(r"\bB\b", str(second))
    for one, by_letter in ((str(second), str(third)), (second.as_json_lines(), third.as_json_lines())):
        assert re.sub(r"\bB\b", "C", one) == by_letter


def test_other_data(first: History) -> None:
    comparison = rg.compare(first, Script(data=2).run())
    assert slugs(comparison) == ["inputs"]
    assert place(comparison) == ("0:output", 0)


def test_another_learning_rate_shows_in_the_first_update(first: History) -> None:
    comparison = rg.compare(first, Script(lr=0.05).run())
    assert slugs(comparison) == ["learning-rate"]
    assert place(comparison) == ("0:weight.update", 0)
    (finding,) = comparison.findings
    assert "lr is 0.1 in A and 0.05 in B" in finding.message
    (follows,) = finding.causes
    assert follows.detector == "update"


def test_a_learning_rate_that_is_changed_later(first: History) -> None:
    def change(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 1.01

    comparison = rg.compare(first, Script(at_step={7: change}).run())
    assert slugs(comparison) == ["learning-rate"]
    assert place(comparison) == ("0:weight.update", 7)


def test_another_optimizer(first: History) -> None:
    comparison = rg.compare(first, Script(optimizer=torch.optim.Adam).run())
    assert slugs(comparison)[0] == "hyper-parameters"
    assert "A is updated by SGD, B by Adam" in str(comparison)


def test_momentum_shows_in_the_second_update(first: History) -> None:
    comparison = rg.compare(first, Script(options={"momentum": 0.9}).run())
    assert slugs(comparison) == ["hyper-parameters"]
    assert place(comparison) == ("0:weight.update", 1)


def test_another_dropout(first: History) -> None:
    comparison = rg.compare(first, Script(dropout=0.2).run())
    assert slugs(comparison) == ["operations"]
    assert place(comparison) == ("2:output", 0)
    assert "p=0.1 in A and p=0.2 in B" in str(comparison)


def test_another_random_state(first: History) -> None:
    comparison = rg.compare(first, Script(redraw=99).run())
    assert slugs(comparison) == ["random-state"]
    assert place(comparison) == ("2:output", 0)


def test_another_activation(first: History) -> None:
    comparison = rg.compare(first, Script(activation=nn.GELU).run())
    assert slugs(comparison) == ["modules"]
    assert place(comparison) == ("1:output", 0)
    assert "1 is a ReLU in A and a GELU in B" in str(comparison)


def test_another_loss(first: History) -> None:
    comparison = rg.compare(first, Script(smoothing=0.1).run())
    assert slugs(comparison) == ["operations"]
    assert place(comparison) == ("5:output.grad", 0)
    assert comparison.findings[0].causes[0].detector == "loss"


def test_parameters_that_are_written_to(first: History) -> None:
    def poke(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            next(iter(net.parameters())).mul_(1.01)

    comparison = rg.compare(first, Script(at_step={5: poke}).run())
    assert slugs(comparison) == ["parameters"]
    assert place(comparison) == ("0:output", 5)
    assert "0:weight" in str(comparison)


def test_what_the_optimizer_is_given_for_several_passes() -> None:
    def scale(net: nn.Module) -> None:
        gradient = net[3].weight.grad  # type: ignore[index, union-attr]
        gradient.mul_(1.1)

    first = Script(micros=3).run()
    comparison = rg.compare(first, Script(micros=3, before_update={4: scale}).run())
    assert place(comparison) == ("3:weight.accumulated", 4)
    assert slugs(comparison) == ["update"]
    assert "given for 3:weight differs at step 4, though the gradients of all passes agree" in str(comparison)


def test_a_module_that_computes_otherwise(first: History) -> None:
    def scale(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net[4].register_forward_hook(lambda module, args, output: output * 1.001)  # type: ignore[index]

    comparison = rg.compare(first, Script(at_step={6: scale}).run())
    assert place(comparison)[1] == 6
    assert place(comparison)[0] in ("4:output", "5:output")
    assert slugs(comparison)[0] in ("forward", "operations")


def test_a_backward_that_differs(first: History) -> None:
    def scale(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net[3].register_full_backward_hook(lambda module, into, out: (into[0] * 1.1,))  # type: ignore[index]

    comparison = rg.compare(first, Script(at_step={4: scale}).run())
    assert place(comparison) == ("2:output.grad", 4)
    assert slugs(comparison)[-1] == "backward" or comparison.findings[0].causes


def test_half_precision_is_the_same_within_its_precision(first: History) -> None:
    comparison = rg.compare(first, Script(is_half=True).run())
    assert comparison.verdict == "same within noise"
    assert "rounding of bfloat16" in comparison.noise
    (finding,) = comparison.findings
    assert finding.detector == "precision"
    assert "float32 in A and in bfloat16 in B" in finding.message
    assert comparison.largest > 1e-3


def test_half_precision_does_not_hide_another_seed(first: History) -> None:
    comparison = rg.compare(first, Script(is_half=True, seed=1).run())
    assert comparison.verdict == "different"
    assert "initial-parameters" in slugs(comparison)


def test_a_perturbation_of_rounding_is_noise_and_measured_noise_tells_it(first: History) -> None:
    perturbed = Script(perturb=1e-7).run()
    comparison = rg.compare(first, perturbed)
    assert comparison.verdict == "same within noise"
    assert comparison.first is not None
    assert comparison.first.step == 0
    assert comparison.first.site in ("3:output", "4:output", "5:output")
    exact = rg.compare(first, perturbed, noise=[Script().run()])
    assert exact.verdict == "different"
    assert exact.noise == "noise measured by repeated runs"
    wide = rg.compare(first, perturbed, noise=[Script(perturb=3e-7).run()])
    assert wide.verdict == "same within noise"


def test_noise_that_is_measured_does_not_hide_a_rate(first: History) -> None:
    comparison = rg.compare(first, Script(lr=0.11).run(), noise=[Script(perturb=1e-6).run()])
    assert place(comparison) == ("0:weight.update", 0)


def test_other_lengths(first: History) -> None:
    comparison = rg.compare(first, Script(steps=5).run())
    assert comparison.verdict == "identical"
    assert "A was recorded up to step 11, B up to step 4" in str(comparison)


def test_a_longer_run_is_said_to_be_longer_once() -> None:
    """What clears gradients behind the last update begins a step that the longer run goes on with."""

    def train(steps: int) -> History:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with rg.record(net) as recording:
            for _ in range(steps):
                net(torch.ones(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return recording.history

    [finding] = rg.compare(train(3), train(5)).findings
    assert finding.message == "A was recorded up to step 2, B up to step 4."


def test_runs_of_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Of two ranks the first recorded alone."""
    one, other = Script(), Script(batch=32)
    one.run(tmp_path / "a")
    other.run(tmp_path / "b")
    for name, ranks in (("a", [0]), ("b", [0, 1])):
        path = tmp_path / name / "manifest.json"
        told = json.loads(path.read_text())
        only = {"every": 0, "listed": [0]} if len(ranks) > 1 else None
        path.write_text(json.dumps({**told, "processes": len(ranks), "ranks": only}))
    comparison = rg.compare(tmp_path / "a", tmp_path / "b")
    assert comparison.findings[0].message == (
        "A has 1 rank and B has 2: steps are given other batches, unless all ranks share one."
    )
    assert "agree" not in str(comparison)


def test_inputs_of_a_merged_run_are_known_where_those_of_all_its_ranks_are() -> None:
    def make(*known: int) -> Record:
        history = History()
        history.manifest = {"compacted": {"ranks": [0, 1]}}
        fact = Input(name="self:input.x", shape=(8, 3), dtype="float32", digest="aa", moment=Moment(0))
        event = Event(Moment(0), "input", fact.name, text=fact.text)
        return Record(history, events={rank: [event] for rank in known})

    assert knows_inputs(make(0, 1), make(0, 1))
    assert not knows_inputs(make(0, 1), make(0))
    assert not knows_inputs(make(), make(0, 1))


def make_ranks(events: dict[int, list[Event]]) -> Record:
    history = History()
    history.manifest = {"processes": 2}
    return Record(history, events=events)


def make_event(kind: EventKind, fact: Fact, step: int) -> Event:
    return Event(Moment(step), kind, fact.name, text=fact.text)


def make_inputs(digests: dict[int, str]) -> list[Event]:
    """What a model was called with, at some steps."""
    return [
        make_event("input", Input(name="self:input.x", digest=digest), step)  # each rank samples its own steps
        for step, digest in digests.items()
    ]


def test_a_batch_is_compared_with_that_of_the_same_rank() -> None:
    """One run was killed so that a rank of it lacks its last batches: that of the other rank is no substitute."""
    whole = make_ranks({0: make_inputs({0: "a0", 5: "a5"}), 1: make_inputs({0: "b0", 5: "b5"})})
    killed = make_ranks({0: make_inputs({0: "a0"}), 1: make_inputs({0: "b0", 5: "b5"})})
    other = make_ranks({0: make_inputs({0: "a0"}), 1: make_inputs({0: "b0", 5: "c5"})})
    assert not find_differences(whole, killed, "B")
    assert not find_differences(killed, whole, "B")
    [found] = find_differences(whole, other, "B")
    assert (found.detector, found.step) == ("inputs", 5)


def test_what_ranks_have_of_their_own_is_compared_with_the_same_rank() -> None:
    """Each rank has parameters, buffers, an optimizer, modes and calls of its own; one run lacks those of rank 0."""

    def make(rank: int) -> list[Event]:
        made = OptimizerMade(name="SGD", groups=({"lr": 0.1 * (rank + 1), "parameters": ["w"]},))
        return [
            make_event("parameter", Parameter(name="0:weight", digest=f"w{rank}"), 0),
            make_event("buffer", Buffer(name="0:mean", digest=f"m{rank}"), 0),
            make_event("modes", Modes(name="self", training=(f"part{rank}",)), 0),
            make_event("optimizer", made, 0),
            make_event("call", Call(name="forward", about=f"part{rank}"), 0),
            *([make_event("call", Call(name="backward"), 0)] * rank),
        ]

    both = make_ranks({0: make(0), 1: make(1)})
    assert not find_differences(both, make_ranks({0: make(0), 1: make(1)}), "B")
    assert not find_differences(both, make_ranks({0: [], 1: make(1)}), "B")
    assert not find_differences(make_ranks({0: [], 1: make(1)}), both, "B")
    assert {each.detector for each in find_differences(both, make_ranks({0: make(1), 1: make(1)}), "B")} == {
        "initial-parameters", "initial-buffers", "modes", "learning-rate", "calls",
    }  # fmt: skip


def test_a_compiled_model_has_the_same_sites(first: History) -> None:
    comparison = rg.compare(first, Script(compiled=True).run())
    assert comparison.verdict != "different"
    assert not slugs(comparison)


def test_another_batch_size(first: History) -> None:
    comparison = rg.compare(first, Script(batch=8).run())
    assert comparison.verdict == "different"
    assert place(comparison) == ("0:output", 0)
    assert "inputs" in slugs(comparison)
    assert str(comparison).startswith(
        "different: they diverge at 0:output at step 0 in the number of elements, 256 in A and 128 in B\n"
    )


def test_nan_in_one_of_them(first: History) -> None:
    def break_(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        next(net.parameters()).data.fill_(math.nan)

    comparison = rg.compare(first, Script(at_step={3: break_}).run())
    assert place(comparison) == ("0:output", 3)
    told, _, _ = str(comparison).partition("\n")
    assert told == "different: they diverge at 0:output at step 3 in the number of elements that are NaN or infinite"


def test_runs_that_share_nothing_cannot_be_compared(first: History) -> None:
    with pytest.raises(CompareError, match="nothing in common"):
        rg.compare(first, History())


def test_folders_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, script in {"a": Script(), "b": Script(), "lr": Script(lr=0.2)}.items():
        script.run(tmp_path / name)
    a, b, lr = (str(tmp_path / name) for name in ("a", "b", "lr"))
    assert main(["compare", a, b]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["A", "B"]  # first the losses, and the settings that differ
    assert said[1].split()[0] == "loss"
    assert said[3] == "identical"
    assert main(["compare", a, lr, "--noise", b]) == 1
    assert "lr is 0.1 in A and 0.2 in B" in capsys.readouterr().out
    assert main(["compare", a, lr, "--json"]) == 1
    head, *findings = map(json.loads, capsys.readouterr().out.splitlines())
    assert (head["verdict"], head["site"], head["step"]) == ("different", "0:weight.update", 0)
    assert findings[0]["detector"] == "learning-rate"
    losses = [rg.open_run(run).history.loss.values for run in (a, lr)]
    assert (head["scalars"]["lr"], head["settings"]) == ([0.1, 0.2], {"lr": [0.1, 0.2]})
    assert head["scalars"]["loss"] == [each[-1] for each in losses]
    assert head["final"] == [each[-1:].mean() for each in losses]  # one in twenty of twelve steps is the last
    assert main(["compare", a, str(tmp_path / "none")]) == 2


def test_a_comparison_is_the_same_both_ways(first: History) -> None:
    other = Script(lr=0.05).run()
    there, back = rg.compare(first, other), rg.compare(other, first)
    assert there.largest == back.largest
    assert place(there) == place(back)


def test_a_mode(first: History) -> None:
    comparison = rg.compare(first, Script(at_step={4: lambda net, optimizer: net.eval()}).run())
    assert slugs(comparison) == ["modes"]
    assert place(comparison) == ("2:output", 4)


def test_parameters_that_are_written_to_before_an_update(first: History) -> None:
    """As where one rank does what the others do not: between the backward pass and the update."""

    class Poking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(1.1)
            return super().step(closure)

    comparison = rg.compare(first, Script(optimizer=Poking).run())
    assert comparison.verdict == "different"
    assert place(comparison)[1] <= 1


def test_single_ranks_are_compared_as_what_they_are(first: History) -> None:
    """Two histories of one rank each, of different numbers."""
    other = History(rank=3)
    again = Script().run()
    rows = again.rows
    other.load(
        again._names,
        [{**{name: rows[name] for name in rows}, "rank": rows["rank"] + 3}],
        again.all_events,
        lambda site: [],
    )
    assert rg.compare(first, other).verdict == "identical"


def test_what_a_second_model_is_given_follows_from_the_first() -> None:
    """A net that judges what another one makes: other inputs of the second are no cause."""

    def train(scale: float) -> History:
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*maker.parameters(), *judge.parameters()], lr=0.1)
        x = torch.randn(8, 4)
        with rg.record({"maker": maker, "judge": judge}) as recording:
            for step in range(4):
                with torch.no_grad():
                    maker.bias.add_(scale * (step == 2))
                optimizer.zero_grad()
                judge(maker(x)).square().mean().backward()
                optimizer.step()
        return recording.history

    comparison = rg.compare(train(0.0), train(0.1))
    assert place(comparison) == ("maker:output", 2)
    assert slugs(comparison) == ["parameters"]
    assert "inputs" in [each.detector for each in comparison.findings]


@pytest.mark.parametrize("rows", [1, 70, 1 << 17], ids=["a step at a time", "some steps", "all"])
@pytest.mark.parametrize(
    ("other", "noise"),
    [
        (Script(), ()),
        (Script(lr=0.2), ()),
        (Script(steps=7), ()),
        (Script(is_half=True), ()),
        (Script(perturb=1e-6), (Script(perturb=1e-7), Script(perturb=2e-7, steps=9))),
        (Script(lr=0.2), (Script(), Script(perturb=1e-7))),
        (Script(at_step={4: lambda net, _: net[3].reset_parameters()}), ()),
    ],
)
def test_records_longer_than_memory_are_compared_as_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Script, noise: tuple[Script, ...], rows: int
) -> None:
    folders = [tmp_path / str(number) for number in range(2 + len(noise))]
    for script, folder in zip((Script(), other, *noise), folders, strict=True):
        script.run(folder)
    expected = rg.compare(folders[0], folders[1], noise=folders[2:])
    monkeypatch.setattr(LIMITS, "held_rows", 0)
    monkeypatch.setattr(LIMITS, "rows_at_once", rows)
    a, b = rg.open_run(folders[0]), rg.open_run(folders[1])
    found = rg.compare(a, b, noise=folders[2:])
    assert (str(found), found.as_json_lines()) == (str(expected), expected.as_json_lines())
    assert (found.first, found.parting, found.largest) == (expected.first, expected.parting, expected.largest)
    assert not a.history.rows._loaded
    assert not b.history.rows._loaded
