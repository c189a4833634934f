"""Warnings that torch gives from C name the line of the program, and are given once, whoever sees the operation."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.hooks.function_mode import FunctionMode
from retrograd.core.hooks.program_watch import ProgramWatch
from retrograd.core.hooks.writes import WriteNotes
from retrograd.explaining.facts.operation_notes import OperationNotes


def fail(error: Exception) -> None:
    raise error


@contextmanager
def between(begin: Callable[[], Any], end: Callable[[], Any]) -> Iterator[None]:
    begin()
    try:
        yield
    finally:
        end()


def noted() -> AbstractContextManager[None]:
    notes = OperationNotes(lambda module: None, 100, fail)
    return between(notes.begin, notes.end)


def watched() -> AbstractContextManager[None]:
    watch = ProgramWatch(lambda module: None, fail)
    return between(watch.begin, watch.end)


def timed() -> AbstractContextManager[Any]:
    return rg.take_inventory(nn.Linear(1, 1), timed=True)


def written() -> AbstractContextManager[None]:
    mode = FunctionMode(WriteNotes())
    return between(mode.put_on, mode.leave)


def traced() -> AbstractContextManager[Any]:
    return rg.record_origins(nn.Linear(1, 1))


@contextmanager
def stacked() -> Iterator[None]:
    with noted(), watched():
        yield


@pytest.fixture(autouse=True)
def warn_always() -> Iterator[None]:
    """Let torch give every warning each time; what Python has given before, it does not give again."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


SEERS = {each.__name__: each for each in (noted, watched, timed, written, traced, stacked)}


@pytest.mark.parametrize("seer", SEERS)
def test_a_warning_names_the_program(seer: str) -> None:
    complex_numbers = torch.ones(2, dtype=torch.complex64)
    with warnings.catch_warnings(record=True) as given, SEERS[seer]():
        warnings.simplefilter("default")
        for _ in range(3):
            complex_numbers.to(torch.float32)
    [warning] = [each for each in given if "discards the imaginary part" in str(each.message)]
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "complex_numbers.to(torch.float32)"
