"""Random small training programs, and what comes out of them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retrograd.core.errors import BudgetError
from tests.memory.saved import layer_pieces, view_pieces, writing_pieces
from tests.memory.saved.program_events import EVENTS
from tests.memory.saved.program_pieces import WIDTH, Applied, collect_pieces
from tests.memory.saved.program_trial import Trial
from tests.scenarios import bits

PIECES = collect_pieces(layer_pieces, view_pieces, writing_pieces)

Call = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True)
class Step:
    """A piece, and which values it is given: 0 is the one made last, 1 the one before."""

    piece: str
    x: int = 0
    y: int = 0


@dataclass(frozen=True)
class Part:
    """A block of the model: how it is called, and what it consists of."""

    call: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """A model, and what is done with it.

    Attributes:
        parts: the blocks.
        order: which of them are called, in order; a block may be called again.
        events: what is done.
        batch: rows of the first batches.
        seed: of all that is random in it.
    """

    parts: tuple[Part, ...]
    order: tuple[int, ...]
    events: tuple[str, ...]
    batch: int
    seed: int


# ---- how they are drawn ---------------------------------------------------------------------------------------


def draw_program(seed: int) -> Program:
    """One program for each seed. Not by hypothesis, of which a few dozen examples are much alike."""
    dice = random.Random(seed)
    pieces, calls, events = list(PIECES), list(CALLS), ["update"] * 12 + list(EVENTS)  # plans are for what comes again

    def draw_step() -> Step:
        return Step(dice.choice(pieces), dice.choice([0, 0, 0, 1, 2]), dice.choice([0, 1, 1, 2, 3]))

    def draw_part() -> Part:
        return Part(dice.choice(["plainly", *calls]), tuple(draw_step() for _ in range(dice.randint(1, 6))))

    return Program(
        parts=tuple(draw_part() for _ in range(dice.randint(1, 3))),
        order=tuple(dice.randrange(3) for _ in range(dice.randint(1, 4))),
        events=tuple(dice.choice(events) for _ in range(dice.randint(2, 6))),
        batch=dice.choice([1, 2, 3, 2, 3, 2, 3, 600]),
        seed=dice.randrange(4),
    )


# ---- the model ------------------------------------------------------------------------------------------------


def call_plainly(block: nn.Module, x: Tensor) -> Any:
    return block(x)


def call_with_checkpoint(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def call_with_reentrant_checkpoint(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x.clone(), use_reentrant=True)  # to return what it was given is refused, sooner or later


def call_with_autocast(block: nn.Module, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return block(x)


def call_without_graph(block: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        made = block(x.clone())
    return x + made


def call_beside(block: nn.Module, x: Tensor) -> Any:
    return x.tanh() + block(x.clone())


CALLS: dict[str, Call] = {
    each.__name__.removeprefix("call_"): each
    for each in (
        call_plainly,
        call_beside,
        call_with_autocast,
        call_with_checkpoint,
        call_with_reentrant_checkpoint,
        call_without_graph,
    )
}


class Block(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part
        self.pieces = nn.ModuleList([Applied(PIECES[step.piece]) for step in part.steps])

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for step, piece in zip(self.part.steps, self.pieces, strict=True):
            x, y = (values[-1 - place % len(values)] for place in (step.x, step.y))
            values.append(piece(x, y))
        return values[-1].float()


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(part) for part in program.parts])
        self.order = [place % len(self.blocks) for place in program.order]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for place in self.order:
            block: Any = self.blocks[place]
            x = CALLS[block.part.call](block, x)
        return x


# ---- what comes out -------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What is left of a program.

    Attributes:
        events: of each, all that can be seen after it, by name, and in which way it failed.
        stopped: a budget was refused at this event; None where none was.
    """

    events: list[dict[str, object]]
    stopped: str | None = None


def build(program: Program) -> Net:
    torch.manual_seed(program.seed)
    return Net(program)


def run(program: Program, model: Net, within: AbstractContextManager[object] | None = None) -> Outcome:
    """Run it, on a model that :func:`build` made of it; passes that are late end outside of the context."""
    torch.manual_seed(program.seed + 1)
    trial = Trial(model, program.batch)
    outcome = Outcome([])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about checkpoints
        with nullcontext() if within is None else within:
            for name in program.events:
                _note(name, trial, outcome)
        _note("end_late", trial, outcome)
    return outcome


def _note(name: str, trial: Trial, outcome: Outcome) -> None:
    """Run an event, unless a budget was refused before."""
    if outcome.stopped is not None:
        return
    failure = _attempt(name, trial)
    if failure == "BudgetError":
        outcome.stopped = name
    else:
        outcome.events.append(_look(trial, failure))


def _attempt(name: str, trial: Trial) -> str:
    """Run an event; returns how it failed."""
    try:
        EVENTS[name](trial)
    except BudgetError:
        trial.forget()
        return "BudgetError"
    except Exception as error:
        trial.forget()
        return "refused" if isinstance(error, RuntimeError) else type(error).__name__
    return ""


def _look(trial: Trial, failure: str) -> dict[str, object]:
    """All that can be seen of a trial."""
    seen, trial.seen = trial.seen, []
    found: dict[str, object] = {"failure": failure, **dict(bits("seen", seen))}
    for name, parameter in trial.model.named_parameters():
        found |= bits(name, parameter)
        if parameter.grad is not None:
            found |= bits(f"{name}.grad", parameter.grad)
            found[f"{name}.grad.stride"] = parameter.grad.stride()
    for name, buffer in trial.model.named_buffers():
        found |= bits(name, buffer)
    found |= bits("generator", torch.get_rng_state())
    return found


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Where two outcomes differ, up to where one was stopped."""
    return [
        f"{name} after event {number}: {one.get(name) if name == 'failure' else ''}"
        for number, (one, other) in enumerate(zip(found.events, expected.events, strict=found.stopped is None))
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    ]
