"""Who is told of something, and that nothing stays in its place when nobody is any more."""

from __future__ import annotations

import threading
import types
import warnings
from collections import OrderedDict

import pytest

from retrograd.core.errors import NoGraphError, RetrogradWarning
from retrograd.core.hooks import listeners
from retrograd.core.hooks.listeners import Listeners, Patch, never_raise, replace
from retrograd.core.notices import Notices


class Watcher:
    """Equal to every other one: listeners are told apart by identity."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Watcher)

    def __hash__(self) -> int:
        return 0


def test_the_patch_stands_from_the_first_to_the_last() -> None:
    log: list[str] = []

    def install() -> list[types.FunctionType]:
        log.append("in")
        return [lambda: log.append("out")]  # type: ignore[list-item]

    listeners = Listeners[Watcher](Patch(install))
    first, second = Watcher(), Watcher()
    listeners.add(first)
    listeners.add(second)
    assert [each is want for each, want in zip(listeners, (first, second), strict=True)] == [True, True]
    listeners.remove(first)
    assert log == ["in"]
    assert first not in listeners
    assert second in listeners
    listeners.remove(first)  # is not told any more: nothing happens
    assert log == ["in"]
    listeners.remove(second)
    assert log == ["in", "out"]
    assert not listeners
    listeners.add(first)
    assert log == ["in", "out", "in"]


def test_one_that_was_added_twice_is_removed_whole() -> None:
    log: list[str] = []
    listeners = Listeners[Watcher](Patch(lambda: [lambda: log.append("out")]))
    twice = Watcher()
    listeners.add(twice)
    listeners.add(twice)
    listeners.remove(twice)
    assert log == ["out"]
    assert listeners.all == ()


def test_a_new_one_is_greeted_when_it_is_told_already() -> None:
    greeted: list[bool] = []
    listeners = Listeners[Watcher](greet=lambda new: greeted.append(new in listeners))
    listeners.add(Watcher())
    assert greeted == [True]


def test_what_somebody_else_has_put_there_since_stays() -> None:
    room = types.SimpleNamespace(function=len)
    undo = replace(room, "function", max)
    room.function = min
    undo()
    assert room.function is min
    undo = replace(room, "function", max)
    undo()
    assert room.function is min


def test_two_lists_share_a_patch() -> None:
    log: list[str] = []
    patch = Patch(lambda: [lambda: log.append("out")])
    one, other = Listeners[Watcher](patch), Listeners[Watcher](patch)
    watcher = Watcher()
    one.add(watcher)
    other.add(watcher)
    one.remove(watcher)
    assert log == []
    other.remove(watcher)
    assert log == ["out"]


def test_threads_may_come_and_go() -> None:
    log: list[str] = []

    def install() -> list[types.FunctionType]:
        log.append("in")
        return [lambda: log.append("out")]  # type: ignore[list-item]

    listeners = Listeners[Watcher](Patch(install))

    def come_and_go() -> None:
        for _ in range(300):
            watcher = Watcher()
            listeners.add(watcher)
            listeners.remove(watcher)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert listeners.all == ()
    assert log == ["in", "out"] * (len(log) // 2)


def test_both_orders_of_a_table_are_one() -> None:
    """An OrderedDict has an order of its own above that of the dictionary that it is."""
    table: OrderedDict[int, str] = OrderedDict({1: "a", 2: "b", 3: "c"})
    listeners.move_first(table, 3)
    listeners.move_last(table, 1)
    assert list(table.items()) == list(dict.items(table)) == [(3, "c"), (2, "b"), (1, "a")]


# ---- what a fault of ours does to the program: nothing, under whatever filter of warnings ----


class Seen:
    """Fails as it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.faults: list[tuple[str, Exception]] = []

    def fault(self, where: str, error: Exception) -> None:
        self.faults.append((where, error))

    @never_raise()
    def told(self) -> None:
        raise self.error

    @never_raise("nothing is seen any more")
    def warned(self) -> None:
        raise self.error


def test_the_object_is_told() -> None:
    error = ValueError("x")
    seen = Seen(error)
    seen.told()
    assert seen.faults == [("Seen.told", error)]


def test_or_a_warning_says_what_follows() -> None:
    with pytest.warns(RetrogradWarning, match="nothing is seen any more: ValueError"):
        Seen(ValueError("x")).warned()


def test_a_filter_that_makes_errors_of_warnings_ends_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Seen(ValueError("x")).warned()
    assert "nothing is seen any more" in capsys.readouterr().err


def test_a_root_without_a_graph_is_left_to_torch() -> None:
    seen = Seen(NoGraphError("no graph", repair="make one."))
    seen.told()
    seen.warned()
    assert seen.faults == []


def test_an_interrupt_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        Seen(KeyboardInterrupt()).told()


def test_once_of_each_kind(recwarn: pytest.WarningsRecorder) -> None:
    notices = Notices()
    for kind in ("a", "b", "a"):
        notices.warn_once(kind, f"{kind} happened")
    assert [str(each.message) for each in recwarn] == ["a happened", "b happened"]
