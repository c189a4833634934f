"""What a user may rely on: the names that ``import retrograd as rg`` gives."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import retrograd as rg

PUBLIC = [
    "AdjointCheck",
    "Auxiliary",
    "Card",
    "Comparison",
    "Finding",
    "Findings",
    "Function",
    "GradientReasons",
    "Graph",
    "History",
    "Inventory",
    "Keep",
    "Kinks",
    "LiveLines",
    "Mirror",
    "Mixing",
    "NotFinite",
    "Recording",
    "RetrogradError",
    "RetrogradWarning",
    "Rewriting",
    "Run",
    "Trace",
    "check_adjoint",
    "check_batch",
    "check_causal",
    "compact",
    "compare",
    "describe",
    "draw_graph",
    "every",
    "explain",
    "explain_gradients",
    "export",
    "extract",
    "extract_dataset",
    "find_kinks",
    "find_nan",
    "findings",
    "format_graph",
    "format_heatmap",
    "format_inventory",
    "format_table",
    "format_trace",
    "keep_saved",
    "log",
    "log_schedule",
    "mirror",
    "on_jump",
    "on_nonfinite",
    "open_bundle",
    "open_features",
    "open_run",
    "overhead",
    "per_sample_gradients",
    "plan_recording",
    "print_graph",
    "print_heatmap",
    "print_inventory",
    "print_table",
    "print_trace",
    "record",
    "record_origins",
    "replay",
    "rerun",
    "rewrite",
    "rules",
    "run_from",
    "saved",
    "simulate_rule",
    "statistic",
    "step_through",
    "take_inventory",
    "trace",
    "walk",
    "watch",
    "watch_hangs",
    "write_bundle",
    "write_chrome_trace",
    "write_comparison",
    "write_inventory",
    "write_report",
]

ROOMS = ["findings", "rules", "saved"]
"""Those that are rooms, whose own names are public."""


def test_the_list_is_the_contract() -> None:
    assert rg.__all__ == PUBLIC


@pytest.mark.parametrize("room", ROOMS)
def test_a_public_room_has_classes_and_functions_with_docstrings(room: str) -> None:
    names = [name for name in vars(getattr(rg, room)) if not name.startswith("_")]
    things = [getattr(getattr(rg, room), name) for name in names]
    things = [thing for thing in things if not inspect.ismodule(thing)]
    assert things
    assert [thing for thing in things if not thing.__doc__] == []


@pytest.mark.parametrize("name", sorted({*PUBLIC} - {*ROOMS}))
def test_a_public_name_is_a_class_or_function_with_a_docstring(name: str) -> None:
    thing = getattr(rg, name)
    assert inspect.isclass(thing) or inspect.isfunction(thing)
    assert vars(thing).get("__doc__") or thing.__doc__, f"rg.{name} has no docstring"


def test_each_name_stands_once_and_is_where_a_type_checker_looks() -> None:
    stub = Path(rg.__file__).with_suffix(".pyi").read_text()
    imported = [
        (node.module, alias)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    other = {str(alias.asname) for module, alias in imported if module == "retrograd" or alias.name != alias.asname}
    assert sorted({str(alias.asname) for _, alias in imported} - other) == PUBLIC
    assert other == {"diff", "integrations", "load", "open", "report", "testing"}
    assert len(imported) == len(PUBLIC) + len(other)
    assert {name for name, home in rg._find_homes().items() if home.count(".") == 1} == set(ROOMS)


def test_no_submodule_shares_the_name_of_something_exported() -> None:
    assert not (set(PUBLIC) - set(ROOMS)) & {module.name for module in pkgutil.iter_modules(rg.__path__)}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        rg.recrod  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert rg.__version__ == project["version"]


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, retrograd; assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("verb", "absent"),
    [
        ("rg.walk(net(x).sum())", "pyarrow retrograd.following.graph.origins retrograd.core.hooks.module"),
        (
            "with rg.record(net): net(x).sum().backward()",
            "retrograd.core.runs.writer retrograd.core.runs.reader retrograd.explaining.facts.watches",
        ),
        (
            "with rg.record(net, sys.argv[1]): net(x).sum().backward()",
            "retrograd.core.history.history retrograd.core.runs.reader retrograd.core.runs.upload",
        ),
    ],
)
def test_a_verb_does_not_load_what_it_does_not_use(verb: str, absent: str, tmp_path: Path) -> None:
    code = (
        f"import sys, torch, retrograd as rg\nnet, x = torch.nn.Linear(2, 1), torch.ones(3, 2)\n{verb}\n"
        f"assert not {set(absent.split())!r} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
