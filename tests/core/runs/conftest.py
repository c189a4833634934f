from collections.abc import Iterator

import pytest

from tests.core.runs.written import opened


@pytest.fixture(autouse=True)
def no_writer_is_left_open() -> Iterator[None]:
    """A test that fails half-way does not disturb those after it."""
    yield
    while opened:
        opened.pop().close()
