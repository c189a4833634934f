"""What each detector finds in tiny records: in one with its fault, in look-alikes, and where nobody can tell."""

from __future__ import annotations

import re

import pytest

from retrograd.findings.record import CannotTell
from tests.findings import records_of_calls, records_of_statistics
from tests.findings.by_hand import ask, check
from tests.findings.records import Row

ROWS = [*records_of_calls.ROWS, *records_of_statistics.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.slug)
def test_what_is_found(row: Row) -> None:
    if row.unknown:
        with pytest.raises(CannotTell, match=re.escape(row.words[0])):
            check(row.slug, row.make())
        return
    found = ask(row.slug, row.make())
    assert tuple(each.severity for each in found) == row.severities, [each.message for each in found]
    for each in found:
        assert all(text in each.message for text in row.words), each.message
        assert {name: getattr(each, name) for name in row.fields} == row.fields
