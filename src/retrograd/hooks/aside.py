"""Run a node while a backward pass runs, as if none did."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from retrograd.hooks.engine import current_graph_task
from retrograd.hooks.surroundings import Surroundings

T = TypeVar("T")


def run_aside(function: Callable[[], T]) -> T:
    """Call a function outside of the backward pass that this thread may be in, and wait for it.

    Torch tells by the thread which pass something belongs to, and some things go by that: a checkpoint, for one, lets
    each pass have what it recomputed only once. So inside of a pass the function runs in a thread of its own.
    """
    if current_graph_task() == -1:
        return function()
    surroundings, context = Surroundings(), contextvars.copy_context()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            surroundings.enter()
            results.append(context.run(function))
        except BaseException as error:  # raised where somebody waits for it
            errors.append(error)

    thread = threading.Thread(target=run, name="retrograd-aside", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()
