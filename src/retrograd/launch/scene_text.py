"""The place where a backward pass has stopped, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrograd.launch.scene import Scene
from retrograd.launch.stop_text import (
    describe_gradient,
    describe_line,
    describe_lines,
    describe_place,
    describe_source,
    describe_value,
)
from retrograd.stepping.stop import Stop

_LONGEST_LIST = 60


def describe_scene(scene: Scene, *, brief: bool = False) -> Iterator[str]:
    """The node, its source line and gradients, and what was raised; if not brief, the loss and the call as well."""
    stop = scene.stop
    node = scene.graph[stop.index]
    state = {"before": "about to run", "after": "just ran", "past": "raised"}[stop.moment]
    yield f"Backward pass {scene.number} {'raised' if scene.error else 'stopped'}: {scene.why}"
    yield f"  node {stop.position + 1} of {len(scene.graph)}, {state}: {describe_place(node)}"
    for line in describe_source(node):
        yield f"  {line}"
    yield from describe_gradients(stop)
    if scene.raised_in is not None:
        inner, number = scene.raised_in
        yield f"  raised at {describe_line(inner.f_code.co_filename, number, inner.f_code.co_name)}"
        for line in describe_lines(inner.f_code.co_filename, number):
            yield f"  {line}"
    if brief:
        return
    yield f"  loss {', '.join(describe_value(root, short=True) for root in scene.loss)}"
    if scene.frame is not None:
        code = scene.frame.f_code
        yield f"  backward() called at {describe_line(code.co_filename, scene.frame.f_lineno, code.co_name)}"


def describe_gradients(stop: Stop) -> Iterator[str]:
    """Describe what comes into a node, and what goes out of it once it has run."""
    for name, gradients in (("incoming", stop.incoming), ("outgoing", stop.outgoing or ())):
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                yield f"  {name}[{slot}] {describe_gradient(gradient)}"


def describe_nodes(scene: Scene, indices: Sequence[int]) -> Iterator[str]:
    """A line a node: where the pass is, which ones ran, and where they were made."""
    ran = set(scene.ran)
    for index in indices[:_LONGEST_LIST]:
        mark = "->" if index == scene.stop.index else "  "
        state = "ran" if index in ran else ""
        yield f"{mark} {state:<4}{describe_place(scene.graph[index])}"
    if len(indices) > _LONGEST_LIST:
        yield f"   … and {len(indices) - _LONGEST_LIST} more"
