from __future__ import annotations

import pytest

from retrograd.core.amounts import count_more
from retrograd.core.runs.findings import write_plainly


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("from 1.7e+02 to 6.4e+03.", "from 170 to 6,400."),
        ("2e+05 of 3e+06", "200,000 of 3e+06"),
        ("1e-05, 1.5, x1.7e+02, fc1e+02", "1e-05, 1.5, x1.7e+02, fc1e+02"),
        ("-4.1e+01", "-41"),
    ],
)
def test_numbers_up_to_a_million_have_no_exponent(text: str, plain: str) -> None:
    assert write_plainly(text) == plain


def test_more_of_them() -> None:
    assert [count_more(count, "layer") for count in (1, 3)] == ["1 more layer", "3 more layers"]
