"""For every test: nothing of ours stays in torch or runs on, and the quick tests come first."""

from __future__ import annotations

import copyreg
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

pytest_plugins = ["tests.commands", *(["tests.browser"] if find_spec("playwright") else [])]

GRACE_SECONDS = 2.0
"""How long a thread may take to end after the test that started it."""

WEIGHTS = {"slow": 100, "browser": 30}
"""How long tests with these marks take, beside one without: about."""

COMPILER = (
    ("torch._dynamo.eval_frame", "_maybe_set_eval_frame"),
    ("torch._dynamo.guards", "GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT"),
    ("torch._dynamo.symbolic_convert", "InstructionTranslator._return"),
    ("torch._dynamo.variables.nn_module", "UnspecializedNNModuleVariable.call_function"),
)
"""Rooms of the compiler's, which load slowly, and what is replaced in them while there are taps."""

settings.register_profile("any machine", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("any machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it runs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else programs of tests would inherit that
torch.set_num_threads(1)  # the tensors of tests are small, and two threads only wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run sweeps in full, where a sample of each kind is usual")


@pytest.fixture
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether a sweep is to be run in full."""
    return bool(pytestconfig.getoption("--thorough"))


@pytest.fixture(autouse=True, scope="session")
def what_is_temporary_goes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bundles and keys lie where pytest keeps three sessions, killed ones too; no key of a user is touched."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))
    from tests.commands import ENVIRONMENT

    os.environ["XDG_DATA_HOME"] = ENVIRONMENT["XDG_DATA_HOME"] = str(tmp_path_factory.mktemp("keys"))


@pytest.fixture(autouse=True, scope="module")
def collections_are_short() -> None:
    """The collector looks at what the tests of a file make, and not at all that is loaded, which takes it a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Torch's global state is the same after each test as before it, and no thread of ours is alive."""
    before, earlier = torch_state(), set(threading.enumerate())
    yield
    if torch_state() != before:
        torch.compiler.reset()  # hooks in compiled code stay for as long as the model, and are kept out of pickles
        gc.collect()
    after = torch_state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"left behind in torch (before, after): {changed}"
    deadline = time.monotonic() + GRACE_SECONDS
    while (running := our_threads() - earlier) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running, f"still running: {running}"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Torch has compiled nothing when a test begins, has counted nothing, and does not warn of itself."""
    torch._dynamo.reset()  # loads slowly, so not before it is needed
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()
    gc.collect()  # hooks stay on modules that compiled code knows


def torch_state() -> dict[str, Any]:
    """Everything global in torch through which a recording could act, by name."""
    state = {
        f"{owner.__name__}.{name}": list(value.items())
        for owner in (modules, optimizers)
        for name, value in vars(owner).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    state |= {
        f"{owner.__name__}.{name}": getattr(owner, name)
        for owner, names in (
            (torch.autograd, ("backward", "grad", "_engine_run_backward")),
            (torch.Tensor, ("backward", "register_hook")),
            (torch.jit._recursive, ("create_script_module",)),
            (torch.nn.Module, ("__call__", "__setattr__", "_call_impl", "zero_grad")),
            (torch.optim.Optimizer, ("step", "zero_grad")),
            (threading.Thread, ("_bootstrap_inner",)),
            (torch.amp.GradScaler, ("scale", "step", "unscale_", "update")),
        )
        for name in names
    }
    state |= {
        f"{room}.{place}": attrgetter(place)(sys.modules[room]) for room, place in COMPILER if room in sys.modules
    }
    state["finders"] = [finder for finder in sys.meta_path if type(finder).__module__.startswith("retrograd")]
    state["pickling"] = copyreg.dispatch_table.get(OrderedDict)
    state["default saved-tensor hooks"] = torch._C._autograd._top_saved_tensors_default_hooks(False)
    state["saved-tensor hooks allowed"] = torch._C._autograd._saved_tensors_hooks_is_enabled()
    state["function modes"] = torch._C._len_torch_function_stack()
    state["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    state["grad mode"] = torch.is_grad_enabled()
    return state


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("retrograd")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is not asked for or this machine cannot run, with the reason, and put slow tests behind quick ones.

    Of several processes each is given a file at a time: there the longest files come first, so that none ends last.
    """
    chromium = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    for item in items:
        if item.get_closest_marker("thorough") and not item.config.getoption("--thorough"):
            item.add_marker(pytest.mark.skip(reason="runs with --thorough"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("browser") and not chromium:
            item.add_marker(pytest.mark.skip(reason="needs Chromium"))
    if hasattr(config, "workerinput"):
        put_long_files_first(items)
    else:
        items.sort(key=lambda item: (bool(item.get_closest_marker("browser")), bool(item.get_closest_marker("slow"))))


def put_long_files_first(items: list[pytest.Item]) -> None:
    weights = Counter[Path]()
    for item in items:
        if not item.get_closest_marker("skip"):
            weights[item.path] += next((weight for mark, weight in WEIGHTS.items() if item.get_closest_marker(mark)), 1)
    items.sort(key=lambda item: (-weights[item.path], item.path))
