"""Assertions on runs, for tests; and contract tests that parts written by users can run too, a file each."""

from retrograd.testing.assertions import assert_healthy as assert_healthy
from retrograd.testing.assertions import assert_same as assert_same
