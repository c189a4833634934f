"""The rules of the house: who imports whom, and who may touch torch's inside."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache

from tests.sources import trees

PARTS = {
    "core": set(),
    "following": {"core"},
    "explaining": {"core", "following"},
    "memory": {"core", "following"},
    "rewriting": {"core"},
    "compiled": {"core"},
    "tools": {"core", "explaining", "rewriting"},
    "testing": {"core", "explaining", "memory", "rewriting", "tools"},
    "integrations": {"core", "explaining"},
    "__main__": {"core"},
}
"""Part of the house → the parts it may import. The core imports no wing."""

CORE = (
    "errors", "guesses", "limits", "norms", "frames", "identities", "groups", "cells", "amounts", "randomness", "spent",
    "libraries", "drawings", "addresses", "notices", "plugins", "files", "foreign", "trials", "sites", "statistics",
    "history", "hooks", "ranks", "progress", "runs", "recording", "views", "serving", "exports", "launch", "cli",
)  # fmt: skip
"""Rooms of the core: each may import those before it."""

DEFERRED = {
    "retrograd.core.statistics.slab": "Triton takes half a second to load, and only CUDA tensors need it",
    "retrograd": "whatever is asked of us waits for what is loaded here",
    "retrograd.core.cli": "`retrograd run` needs none of the other commands, and a script waits until it has been read",
    "retrograd.explaining.facts.nonfinite_look": "a graph is searched once its loss is not finite, and most never are",
    "retrograd.explaining.facts.zero_gradients": "a pass is followed where gradients are zero, and most never are",
    "retrograd.explaining.launch.commands": "a command needs little of the others, and torch only where it reads a run",
    "retrograd.following.launch.commands": "a command needs little of the others, and torch only where it replays",
    "retrograd.core.cli.commands": "what is not public (``rg.…`` is loaded late) and needs torch, which takes seconds",
    "retrograd.core.launch.bootstrap.sitecustomize": "runs in every interpreter, most of them without torch",
    "retrograd.integrations.pytest_plugin": "every run of pytest loads it, and few are recorded",
    "retrograd.tools.features.dataset": "rich draws from `random` when it is loaded, and only a bar needs it",
    "retrograd.core.launch.chosen_run": "what opens a run loads pyarrow, and a folder is checked without it",
    "retrograd.core.launch.interpreter": "only an interpreter with options is asked whether it finds us",
    "retrograd.memory.launch.inventory": "a script that loads rich itself must be the first: that draws from `random`",
    "retrograd.core.launch.lean": "pyarrow is loaded while pandas is out of the way",
    "retrograd.core.launch.live_findings": "what reads records loads pyarrow: needed where something is critical",
    "retrograd.core.launch.parser": "a script waits until our words are read: a mistake brings what it needs itself",
    "retrograd.core.launch.requests": "every process below a command loads it, and needs few of its options",
    "retrograd.core.launch.session": "a process that trains nothing writes nothing, and need not load pyarrow",
    "retrograd.core.launch.start": "what is asked of a folder that is there, and what a mistake needs",
    "retrograd.following.graph.graph": "a walk writes and reads no file, and need not load pyarrow",
    "retrograd.following.launch.tracing": "a script that loads rich itself must be the first: that draws from `random`",
    "retrograd.core.recording.record": "a folder needs no history in memory, a history no folder; few read either",
    "retrograd.core.recording.settings": "a process that writes nothing need not load pyarrow",
    "retrograd.core.runs.listing": "pyarrow is loaded only where there is a run, and a wrong path is told before",
    "retrograd.core.runs.shards": "few runs are read from an address",
    "retrograd.core.runs.writer": "few runs are recorded to an address",
    "retrograd.core.runs.stored": "torch takes longer to load than findings take to tell; only tensors need it",
    "retrograd.core.views.terminal": "rich draws from `random` when loaded, and neither page nor file needs it",
}
"""Module that imports inside functions → why not at the top."""

TOUCHES = {
    "retrograd.core.statistics.readable": {
        "_C",
        "_functorch",
        "torch._C",
        "torch._C._get_tracing_state",
        "torch._C._set_tracing_state",
    },
}
"""Module outside of ``hooks/`` → what of torch's inside it touches. ``readable`` asks whether a tensor has memory."""

INSIDE = {"hooks", "compiled", "ranks"}
"""Rooms that touch it."""

HOOK_METHODS = {
    "register_hook", "register_prehook", "register_post_accumulate_grad_hook", "register_multi_grad_hook",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_backward_hook",
    "register_full_backward_pre_hook", "register_module_forward_hook", "register_module_forward_pre_hook",
    "register_module_full_backward_hook", "register_module_module_registration_hook",
    "register_optimizer_step_pre_hook", "register_optimizer_step_post_hook", "register_step_pre_hook",
    "register_step_post_hook", "saved_tensors_hooks", "retain_grad",
}  # fmt: skip


def place(name: str) -> tuple[str, str]:
    """``retrograd.core.history.kept`` → part and room, ``("core", "history")``; empty texts where there is none."""
    _, part, room, *_ = [*name.split("."), "", ""]
    return part, room


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names of what an import statement imports: modules where they are ours, else as written."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in trees() or not name.startswith("retrograd") else str(node.module) for name in names]


@cache
def imports(tree: ast.AST) -> list[tuple[str, bool]]:
    """Everything that a file imports, and whether it does so inside a function."""
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(node)
    }
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return [(name, id(node) in inside) for node in nodes for name in targets(node)]


def ours(tree: ast.AST) -> set[str]:
    return {name for name, _ in imports(tree) if name.split(".")[0] == "retrograd"}


def torch_touches(tree: ast.AST) -> Iterator[str]:
    """Hooks that a file sets, and private names or replaced functions of torch."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in HOOK_METHODS:
                yield name
            case ast.Attribute(attr=name) if ast.unparse(node).startswith("torch."):
                if is_private(name) or isinstance(node.ctx, ast.Store):
                    yield ast.unparse(node)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                parts = [part for target in targets(node) for part in target.split(".")]
                yield from (part for part in parts if is_private(part) or part in HOOK_METHODS)
            case ast.Call(func=ast.Name("setattr" | "delattr"), args=[owner, *_]):
                if ast.unparse(owner).split(".")[0] == "torch":
                    yield ast.unparse(node)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_there_is_something_to_look_at() -> None:
    assert len(trees()) > 20


def test_a_part_imports_only_what_the_table_allows() -> None:
    wrong = {
        name
        for name, tree in trees().items()
        for target in ours(tree)
        if place(name)[0] and place(target)[0] not in PARTS[place(name)[0]] | {place(name)[0], ""}
    }
    assert not wrong


def test_the_tables_know_every_part_and_every_room_of_the_core() -> None:
    assert {place(name)[0] for name in trees()} - {""} == set(PARTS)
    assert {room for part, room in map(place, trees()) if part == "core"} - {""} == set(CORE)


def test_parts_and_rooms_have_one_direction() -> None:
    list(graphlib.TopologicalSorter(PARTS).static_order())
    rooms: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for name, tree in trees().items():
        rooms.setdefault(place(name), set()).update({place(target) for target in ours(tree)} - {place(name)})
    list(graphlib.TopologicalSorter(rooms).static_order())


def test_a_room_of_the_core_imports_rooms_before_it() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, tree in trees().items()
        for target in ours(tree)
        if place(name)[0] == place(target)[0] == "core" and CORE.index(place(target)[1]) > CORE.index(place(name)[1])
    ]
    assert not wrong


def test_no_module_imports_itself_round_a_circle() -> None:
    graph = {name: ours(tree) & trees().keys() - {name} for name, tree in trees().items()}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_imports_stand_at_the_top() -> None:
    deferred = {name for name, tree in trees().items() for _, inside in imports(tree) if inside}
    assert deferred == set(DEFERRED)


def test_only_hooks_touch_torchs_inside() -> None:
    touched = {
        name: set(torch_touches(tree))
        for name, tree in trees().items()
        if place(name)[1] not in ("hooks", "ranks") and place(name)[0] != "compiled"
    }
    assert {name: what for name, what in touched.items() if what} == TOUCHES


def test_imports_are_absolute() -> None:
    relative = [
        name
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative
