"""A ledger is a set of units, in whatever order they come, and told and read again."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.history.sink import Unit
from retrograd.core.runs.ledger import Ledger

UNITS = st.lists(st.builds(lambda rank, number: Unit(rank, number, number, 0), st.integers(0, 2), st.integers(0, 9)))
ALL = [Unit(rank, number, number, 0) for rank in range(4) for number in range(12)]


def read_back(ledger: Ledger) -> Ledger:
    return Ledger.read(json.loads(json.dumps(ledger.tell())))


@given(UNITS, UNITS)
def test_units_are_in_that_were_put_in(one: list[Unit], other: list[Unit]) -> None:
    first, second = Ledger(), Ledger()
    first.add(one)
    before = first.copy()
    for unit in other:
        second.add([unit])
    first.update(read_back(second))
    first.add(one)
    for ledger, units in ((before, one), (second, other), (first, one + other), (read_back(first), one + other)):
        assert [unit for unit in ALL if unit in ledger] == sorted(set(units))


def test_of_late_steps_it_is_known_who_is_in_and_of_no_other() -> None:
    ledger = Ledger()
    for step in range(300):
        ledger.add([Unit(rank, step, step, 0) for rank in range(3) if rank or step % 2])
        known = {at: ranks for at, _, ranks in read_back(ledger.copy()).late_steps}
        assert sorted(known) == list(range(ledger.forgotten + 1, step + 1))
        assert all(ranks == ({0, 1, 2} if at % 2 else {1, 2}) for at, ranks in known.items())
    assert ledger.forgotten > 150
