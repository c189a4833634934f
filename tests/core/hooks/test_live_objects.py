"""All objects of a class are found, and nothing is held that another thread is still making."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
from torch import nn
from torch.optim import SGD, Optimizer

from retrograd.core.hooks.live_objects import list_instances


class Lazy:
    """Answers whoever asks for its class."""

    asked = 0

    @property
    def __class__(self) -> type:  # type: ignore[override]
        Lazy.asked += 1
        return nn.Module


@pytest.fixture
def eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_they_are_those_that_the_collector_has_of_these_classes() -> None:
    class Own(nn.Linear):
        pass

    made = [nn.Linear(1, 1), Own(1, 1), nn.Sequential(nn.ReLU()), SGD(nn.Linear(1, 1).parameters()), [Own], (Own, SGD)]
    lazy = Lazy()
    found = list_instances(nn.Module, Optimizer)
    expected = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), (nn.Module, Optimizer))}
    assert {id(thing) for thing in found} == expected >= {id(thing) for thing in made[:4]}
    assert len(found) == len(expected)
    assert not lazy.asked


@pytest.mark.usefixtures("eager_switching")
def test_other_threads_build_their_tuples_meanwhile() -> None:
    """One that somebody else holds cannot be resized, and is half as long while it is made of a generator."""
    errors: list[SystemError] = []
    done = threading.Event()
    modules = [nn.Identity() for _ in range(40)]

    def build() -> None:
        while not done.is_set():
            try:
                assert len(tuple(number * 2 for number in range(300))) == 300
                assert len(tuple(type(module) for module in modules)) == 40
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert len(list_instances(nn.Identity)) >= 40
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
