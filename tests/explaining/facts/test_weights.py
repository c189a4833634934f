"""What is read and loaded, as facts; expectations are counted by hand."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.facts import read_facts
from retrograd.core.history.weights_facts import CountedOn, Load, StateRead
from retrograd.core.hooks.loads import load_watch, log

Do = Callable[[int], object]


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Training:
    """A small training, with something done before some steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = make_net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)

    def run(self, before: Do, first: int = 0, steps: int = 6) -> list[object]:
        """Train, and return the facts."""
        with rg.record(self.net) as recording:
            for step in range(first, first + steps):
                before(step)
                self.optimizer.zero_grad()
                self.net(torch.randn(8, 4)).square().mean().backward()
                self.optimizer.step()
        return list(read_facts(recording.history.few_events))


def loads_of(facts: list[object]) -> list[Load]:
    return [fact for fact in facts if isinstance(fact, Load)]


def test_a_prefix_is_found_with_what_it_costs() -> None:
    training = Training()
    given = {f"module.{key}": value.clone() for key, value in make_net().state_dict().items()}
    [load] = loads_of(
        training.run(lambda step: training.net.load_state_dict(given, strict=False) if not step else None)
    )
    assert (load.value, load.missing, load.unexpected, load.strict) == (0, 4, 4, False)
    assert (load.prefix, load.matching, load.changed, load.name) == ("module.", 4, False, "self")
    assert load.unexpected_keys == ("module.0.weight", "module.0.bias", "module.2.weight")
    assert load.line.startswith(__file__)


def test_keys_of_other_shapes_match_nothing() -> None:
    training = Training()
    given = {
        f"module.{key}": value.repeat(2, *[1] * (value.ndim - 1)) for key, value in make_net().state_dict().items()
    }
    [load] = loads_of(
        training.run(lambda step: training.net.load_state_dict(given, strict=False) if not step else None)
    )
    assert (load.prefix, load.matching) == ("", 0)


def test_a_state_that_is_no_copy_is_the_same_memory() -> None:
    training, kept = Training(), dict[int, object]()

    def act(step: int) -> None:
        if step == 2:
            kept["live"], kept["copy"] = training.net.state_dict(), copy.deepcopy(training.net.state_dict())
        if step == 4:
            training.net.load_state_dict(kept["live"])
            training.net.load_state_dict(kept["copy"])

    live, copied = loads_of(training.run(act))
    assert (live.same, live.changed, live.taken, live.step) == (4, False, 2, 4)
    assert (copied.same, copied.changed, copied.taken) == (0, True, -1)


def test_weights_that_are_put_back_do_not_stay() -> None:
    training = Training()
    other = make_net().state_dict()

    def swap(step: int) -> None:
        if step in (2, 4):
            before = copy.deepcopy(training.net.state_dict())
            training.net.load_state_dict(other)
            with torch.no_grad():
                training.net(torch.randn(2, 4))
            if step == 4:
                training.net.load_state_dict(before)

    kept, swapped, back = loads_of(training.run(swap))
    assert (kept.changed, kept.stays, kept.evaluated) == (True, True, True)
    assert (swapped.changed, swapped.stays, swapped.evaluated) == (True, False, True)
    assert back.evaluated is False


def test_a_file_is_told_and_who_counts_on_from_it() -> None:
    first, file = Training(), io.BytesIO()
    first.run(lambda step: None, steps=5)
    torch.save({"a": {"net": first.net.state_dict()}, "optimizer": first.optimizer.state_dict(), "step": 7}, file)
    file.seek(0)
    second = Training()

    def restore(step: int) -> None:
        if step == 7:
            saved = torch.load(file)
            second.net.load_state_dict(saved["a"]["net"])
            second.optimizer.load_state_dict(saved["optimizer"])

    facts = second.run(restore, first=7)
    [read] = [fact for fact in facts if isinstance(fact, StateRead)]
    assert [(part["path"], part["kind"]) for part in read.parts] == [("a.net", "weights"), ("optimizer", "optimizer")]
    assert (read.value, read.parts[1]["step"], read.parts[1]["groups"][0]["parameters"]) == (4, 5, 4)
    assert read.counters == {"optimizer.step": 5, "step": 7}
    module, optimizer = loads_of(facts)
    assert (module.file, module.changed, module.missing) == (1, True, 0)
    assert (optimizer.of, optimizer.name, optimizer.value, optimizer.count) == ("optimizer", "Adam", 4, 5)
    [counted] = [fact for fact in facts if isinstance(fact, CountedOn)]
    assert (counted.name, counted.value, counted.counter) == ("step", 7, "step")


@pytest.mark.parametrize(
    ("reads", "strips", "prefix"),
    [(2, False, "module."), (2, True, ""), (1, False, ""), (1, True, "")],
    ids=["just read", "loaded by now", "trained since", "both"],
)
def test_a_file_is_blamed_only_where_it_was_just_read_and_nothing_of_it_loaded(
    reads: int, strips: bool, prefix: str
) -> None:
    training, file = Training(), io.BytesIO()
    torch.save({f"module.{key}": value for key, value in make_net().state_dict().items()}, file)

    def act(step: int) -> None:
        if step == reads:
            file.seek(0)
            saved = torch.load(file)
            if strips:
                training.net.load_state_dict({key.removeprefix("module."): each for key, each in saved.items()})
        if step == 2:
            training.net.load_state_dict(training.net.state_dict())

    own = loads_of(training.run(act))[-1]
    assert (own.same, own.prefix, own.matching) == (4, prefix, 4 if prefix else 0)


def test_nothing_that_is_loaded_is_kept() -> None:
    load_watch.hold()
    try:
        net, state = make_net(), make_net().state_dict()
        net.load_state_dict(state)
        gone = [weakref.ref(net), weakref.ref(state["0.weight"])]
        del net, state
        gc.collect()
        assert [find() for find in gone] == [None, None]
        assert log.count == 1
    finally:
        load_watch.release()
    assert not log.notes
    assert "load_state_dict" in vars(nn.Module)
    assert torch.load.__module__ == "torch.serialization"
