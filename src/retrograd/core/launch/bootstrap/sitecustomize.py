"""Runs at the start of every Python process below one of our commands that run a program, before the program itself.

It waits until the process has imported torch, and only then loads the package. Every worker of a data loader pays
for this file, so it imports nothing that a bare interpreter has not loaded already. Python knows one
``sitecustomize``; the user's own, which this one hides, is run at the end.

A program may start any other Python too, 2.7 among them: this file is read by all of them, so it is written in what
they share, and an older one than we need does nothing but run the user's own.
"""

import os
import sys

MYPY = False
if MYPY:  # for the type checker alone: typing is slow to import
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_IS_KNOWN = sys.version_info >= (3, 11)  # as in pyproject.toml
_HERE = os.path.dirname(os.path.abspath(__file__))
_SESSIONS = {  # variable with what was asked for -> module and function that begin to do it
    "RETROGRAD_RUN": ("retrograd.core.launch.session", "start_session"),
    "RETROGRAD_TRACE": ("retrograd.following.launch.tracing", "start_tracing_session"),
    "RETROGRAD_INVENTORY": ("retrograd.memory.launch.inventory", "start_inventory_session"),
    "RETROGRAD_DEBUG": ("retrograd.following.launch.prompt", "start_debugging_session"),
}
_SPEAKER = "RETROGRAD_SPEAKER"  # number of the process that says how it went: the first Python process below us
_UNDONE = "RETROGRAD_UNDONE"  # what it says if nobody has done anything, and the folder that is then not there


class _TorchFinder:
    """A finder of modules that finds none, but starts our part when torch has been loaded."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        # type: (str, Any, Any) -> ModuleSpec | None
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not cls and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            cls._follow(spec.loader)
        return spec

    @classmethod
    def _follow(cls, loader):
        # type: (Any) -> None
        execute = loader.exec_module

        def execute_and_start(module):
            # type: (ModuleType) -> None
            del loader.exec_module  # the loader stays torch's own
            execute(module)
            sys.meta_path.remove(cls)
            _start_sessions()

        loader.exec_module = execute_and_start


def _start_sessions():
    # type: () -> None
    """Begin what was asked for, without a collection of all that torch has made meanwhile: that takes 0.1 s."""
    import gc

    is_collecting = gc.isenabled()
    gc.disable()
    try:
        _start_each()
    except Exception as error:  # whatever is wrong here must not keep a script from importing torch
        sys.stderr.write("retrograd: it did not start, and the script runs without it: " + repr(error) + "\n")
    finally:
        if is_collecting:
            gc.enable()


def _start_each():
    # type: () -> None
    from retrograd.core.notices import warnings_kept
    from retrograd.core.randomness import random_kept

    for variable, (module, function) in _SESSIONS.items():
        if variable in os.environ:
            with random_kept(), warnings_kept():
                getattr(__import__(module, fromlist=[function]), function)()


def _say_end():
    # type: () -> None
    if _TorchFinder not in sys.meta_path:
        return
    obstacle = "torch was not imported"
    undone, _, folder = os.environ.get(_UNDONE, "").partition("\n")
    if os.path.isabs(folder) and _is_unused(folder):  # nor has any other process
        if os.environ.get(_SPEAKER) == str(os.getpid()):
            _say(undone + obstacle)
        return
    try:
        from retrograd.core.launch.closing import say_end  # late, since it takes longer than all else here
    except Exception as error:  # the process may have become a Python that has none of our packages
        if os.environ.get(_SPEAKER) == str(os.getpid()):
            _say("what was recorded before this Python took over is not known here: " + repr(error))
        return
    say_end(obstacle)


def _is_unused(folder):
    # type: (str) -> bool
    """Whether there is no folder, or it was made for its date alone: then it is removed."""
    try:
        digits = [len(part) for part in os.path.basename(folder).split("-") if part.isdigit()]
        if 8 not in digits or 6 not in digits:
            return not os.path.exists(folder)
        os.rmdir(folder)
        if os.path.basename(os.path.dirname(folder)) == "runs":  # the default one; others may be the user's
            os.rmdir(os.path.dirname(folder))
    except OSError:  # it holds something
        pass
    return not os.path.exists(folder)


def _say(words):
    # type: (str) -> None
    """Print one line, as ``retrograd.core.notices.say`` does, which takes longer to load than a small script to run."""
    if sys.__stderr__ is None:
        return
    try:
        sys.__stderr__.write("retrograd: " + words + "\n")
        sys.__stderr__.flush()
    except (OSError, ValueError):  # nobody listens, or the script has closed it
        return


def _run_hidden():
    # type: () -> None
    """Run the user's own sitecustomize, with the paths that the program would have without us."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize
    except ImportError as error:
        if getattr(error, "name", __name__) != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


def _is_installed():
    # type: () -> bool
    return any(getattr(finder, "__name__", "") == _TorchFinder.__name__ for finder in sys.meta_path)


if _IS_KNOWN and not _SESSIONS.keys().isdisjoint(os.environ) and not _is_installed():
    import atexit

    sys.meta_path.insert(0, _TorchFinder)
    if os.environ.setdefault(_SPEAKER, str(os.getpid())) == str(os.getpid()):
        atexit.register(_say_end)
if __name__ == "sitecustomize":  # else it is run by the hook file for isolated interpreters
    _run_hidden()
