"""What a fault of ours does to the program: nothing, under whatever filter of warnings."""

from __future__ import annotations

import warnings

import pytest

from retrograd.core.errors import NoGraphError, RetrogradWarning
from retrograd.core.hooks.listeners import never_raise
from retrograd.core.notices import Notices


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
