"""``rg.log``: numbers that the program hands over, for every recording that is open."""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from retrograd.core.errors import ScalarError
from retrograd.core.guesses import USES, names_arguments
from retrograd.core.hooks.engine import is_compiling, uncompiled
from retrograd.core.limits import LIMITS
from retrograd.core.notices import warn

Logged = tuple[dict[str, Any], int | None]


class ScalarTaker(Protocol):
    """Interface of a recorder."""

    def log(self, numbers: Mapping[str, Any], step: int | None) -> None:
        """Take numbers by name, of this step or of the one that it is now."""


_takers: list[ScalarTaker] = []
_early: deque[Logged] = deque()
_expected: list[object] = []
"""Who has said that a recording will begin, or that this process leaves it to others."""
_said: list[str] = []


def expect_recording(who: object) -> None:
    """Keep what is logged until a recording begins, which somebody has said will come."""
    _expected.append(who)


def expect_none(who: object) -> None:
    """Keep nothing for it any more."""
    _expected[:] = [each for each in _expected if each is not who]
    if not _expected:
        _early.clear()


def add_taker(taker: ScalarTaker) -> None:
    """Hand over what is logged from now on, and what was logged while a recording was expected."""
    _takers.append(taker)
    while _early:
        taker.log(*_early.popleft())


def remove_taker(taker: ScalarTaker) -> None:
    """Hand over nothing more."""
    _takers[:] = [each for each in _takers if each is not taker]


@uncompiled
@names_arguments
def log(scalars: Mapping[str, Any] | None = None, /, step: int | None = None, **named: Any) -> None:
    """Record numbers of your own, of which a step has one: ``rg.log(accuracy=0.93)``.

    They are in ``history.scalars`` beside the loss, in exports and mirrors. Of several of one name and step the last
    counts; nested mappings are named as in ``val/accuracy``. A tensor is not waited for: its value is read when the
    step is handed over. Where nothing is recorded, nothing happens, and that is said once.

    Args:
        scalars: numbers by name, for names that are no Python names: ``rg.log({"val/accuracy": 0.93})``.
        step: the step that they are of; when left out the one that was made last, or runs now.
        named: numbers by name. Python numbers and booleans, numpy's, and tensors of one element; NaN is a number.

    Raises:
        ScalarError: for what is not a number; the message names it.
    """
    checked, at = check_scalars(scalars, step, named)
    for taker in tuple(_takers):
        taker.log(checked, at)
    if _takers or is_compiling():
        return
    if _expected:
        _early.append((checked, at))
        if len(_early) > LIMITS.early_scalars:
            _early.popleft()
    elif not _said:
        _said.append("")
        warn("rg.log was called where nothing is recorded: what it was given is not kept.")


def check_scalars(scalars: Mapping[str, Any] | None, step: int | None, named: Mapping[str, Any]) -> Logged:
    """Numbers by name, and their step, as recorders take them.

    Raises:
        ScalarError: for what is not a number, or not a step.
    """
    if not isinstance(scalars, Mapping | None):
        raise ScalarError(f"{scalars!r} has no name.", repair=f"give numbers by name: {USES['log']}.")
    checked = {name: _check(name, value) for name, value in _flatten({**(scalars or {}), **named}, "").items()}
    if step is not None and (isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0):
        raise ScalarError(f"{step!r} is not a step.", repair="give a whole number of at least 0, or leave it out.")
    return checked, None if step is None else int(step)


def _flatten(given: Mapping[str, Any], front: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        found |= _flatten(value, f"{front}{name}/") if isinstance(value, Mapping) else {f"{front}{name}": value}
    return found


def _check(name: str, value: Any) -> Any:
    """A number as a float, or a tensor of one element as it is."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            return value.detach().reshape(())
        raise ScalarError(
            f"{name!r} is a tensor of shape {list(value.shape)} ({value.dtype}), not a number.",
            repair=f"log its mean, say: rg.log({{{name!r}: x.mean()}}).",
        )
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.reshape(-1)[0])
    if isinstance(value, numbers.Real | np.bool_):
        return float(value)
    raise ScalarError(f"{name!r} is {_show(value)}, not a number.", repair="log numbers; leave it out.")


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes | complex | None) else f"of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
