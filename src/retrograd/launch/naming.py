"""Names for several models: those by which the program calls them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

from torch import nn

from retrograd.launch.family import unwrap

_KEPT_BY_FRAME_ALONE = 3
"""References to such a dict where nobody but the frame, and the function that counts them, has it."""

_OURS = f"{Path(__file__).parents[1]}/"


def name_models(models: Sequence[nn.Module], taken: Collection[str] = ()) -> dict[str, nn.Module]:
    """A name for each model: none for a single one, else the variable or attribute that holds it, else its class.

    The variables are those of the code that runs now, from the outermost frame inwards, so that ``generator`` of the
    main program comes before the ``model`` of a function that trains any model.

    Args:
        models: models that have no name yet.
        taken: names that others have.
    """
    if len(models) == 1 and not taken:
        return {"": models[0]}
    variables = _name_by_variables(models)
    named: dict[str, nn.Module] = {}
    for model in models:
        wish = variables.get(id(model)) or _name_by_class(model)
        named[_make_unique(wish, {*taken, *named})] = model
    return named


def _name_by_variables(models: Sequence[nn.Module]) -> dict[int, str]:
    wanted = {id(model) for model in models}
    names: dict[int, str] = {}
    for name, value in _variables():
        if isinstance(value, nn.Module) and id(unwrap(value)) in wanted:
            names.setdefault(id(unwrap(value)), name)
    return names


def _variables() -> Iterator[tuple[str, object]]:
    """Variables of all frames, the outermost first, and the attributes of each ``self`` (a trainer's models)."""
    for frame in reversed(list(_frames())):
        local = _read_locals(frame)
        owner = local.get("self")
        yield from ((name, value) for name, value in local.items() if name != "self")
        if owner is not None and not isinstance(owner, nn.Module):
            yield from getattr(owner, "__dict__", {}).items()


def _frames() -> Iterator[FrameType]:
    """The frames of the program, from the inside; without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _read_locals(frame: FrameType) -> dict[str, object]:
    """The variables of a frame; it holds no more of them than before.

    Up to Python 3.12 a function's frame that is asked for its variables keeps a dict of them until it ends, and with
    it models that the program drops meanwhile. That dict is emptied, unless the program has got it from ``locals()``.
    """
    seen = frame.f_locals
    local = dict(seen)
    is_of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_of_function and type(seen) is dict and sys.getrefcount(seen) <= _KEPT_BY_FRAME_ALONE:
        seen.clear()
    return local


def _name_by_class(model: nn.Module) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(model).__name__).lower()


def _make_unique(wish: str, taken: Collection[str]) -> str:
    name, number = wish, 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    return name
