"""Bytes and counts, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.amounts import count_of, parse_bytes, show_bytes, show_count


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "+999 B"), (1000, "+1 kB"), (-1250, "-1.25 kB"), (999_999, "+1 MB"), (3 * 10**13, "+30 TB")],
)
def test_a_gain_of_bytes(count: int, text: str) -> None:
    assert show_bytes(count, signed=True) == text
    assert show_bytes(count) == text.removeprefix("+")


@pytest.mark.parametrize(("count", "text"), [(0.4, "0 B"), (123_456_789, "123 MB"), (4 * 10**15, "4000 TB")])
def test_bytes(count: float, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("500", 500),
        ("7b", 7),
        ("2kB", 2000),
        ("1.5 MB", 1_500_000),
        (".5g", 5 * 10**8),
        ("2 GiB", 2**31),
        ("1 tb", 10**12),
    ],
)
def test_bytes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "lots", "5 apples", "-3GB", "5i", "1.2.3 MB", "MB", "8 XB"])
def test_other_texts_are_not_sizes(text: str) -> None:
    assert parse_bytes(text) is None


@given(st.integers(0, 10**15))
def test_what_is_written_is_read_to_three_digits(count: int) -> None:
    found = parse_bytes(show_bytes(count))
    assert found == pytest.approx(count, rel=5e-3)


def test_counts() -> None:
    assert [show_count(n) for n in (999, 9999, 12_345, 999_500, 7_094_000, 1_200_000_000)] == [
        "999", "9,999", "12.3k", "1,000k", "7.09M", "1.2B",
    ]  # fmt: skip
    assert [count_of(n, "pass", "passes") for n in (0, 1, 2000)] == ["0 passes", "1 pass", "2,000 passes"]
    assert count_of(1, "node") == "1 node"
