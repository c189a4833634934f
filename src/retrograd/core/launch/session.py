"""The recording of one process, from ``import torch`` to its end.

Loaded by the bootstrap. The writer is loaded when a model is found, before its first step: it takes 0.2 s, and most
processes that import torch train nothing; later there may be neither memory nor a file descriptor left to load it with.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from retrograd.core.addresses import call_at_end
from retrograd.core.amounts import count_of
from retrograd.core.errors import RetrogradError
from retrograd.core.files import SpareFiles
from retrograd.core.history.facts import Call
from retrograd.core.hooks.backward import backward_listeners, join_pass
from retrograd.core.hooks.discovery import construction_watch
from retrograd.core.hooks.distributed import is_rehearsal
from retrograd.core.hooks.engine import without_transforms
from retrograd.core.hooks.names import name_models as check_names
from retrograd.core.hooks.names import walk_modules
from retrograd.core.identities import IdentityDict
from retrograd.core.launch.closing import is_speaker, say_end
from retrograd.core.launch.late_sink import LateSink
from retrograd.core.launch.models import Search, name_models
from retrograd.core.launch.requests import RunRequest
from retrograd.core.launch.tracebacks import hide_our_frames
from retrograd.core.notices import say, warn_apart, warnings_kept
from retrograd.core.randomness import random_kept
from retrograd.core.recording.recorder import Recorder
from retrograd.core.recording.settings import Settings
from retrograd.core.recording.weight_sums import sum_squares
from retrograd.core.runs.attempts import leave
from retrograd.core.runs.ending import describe_exception, describe_exit, find_exception
from retrograd.core.runs.ranks import ask_rank, is_loader_worker
from retrograd.explaining.facts.facts import SOURCES
from retrograd.explaining.facts.source import FactHost, FactSource, MakeSource
from retrograd.explaining.launch.live_findings import LiveFindings, say_critical

if TYPE_CHECKING:
    from retrograd.core.merging.shared_run import SharedRun
    from retrograd.core.runs.writer import RunWriter
    from retrograd.memory.launch.inventory import RunInventory


def start_session() -> None:
    """Record this process as ``retrograd run`` was asked to."""
    session = Session(RunRequest.read(os.environ))
    atexit.register(session.close)
    call_before_exec(session.leave)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=session.start_over)
    warn_apart()
    hide_our_frames()
    session.take_inventory()


def load_writer() -> None:
    """Load what writes a run folder, Arrow among it."""
    with random_kept(), warnings_kept():
        import retrograd.core.recording.record
        import retrograd.core.runs.ending  # noqa: F401


_LEFT = ("SystemExit", "KeyboardInterrupt")
"""Exceptions by which a program is left on purpose."""


_LOSS_ALONE = (
    "only the loss was recorded: no module was called, and no optimizer of torch updates; to record a tensor, call "
    'rg.watch("name", tensor) where it is made'
)


class Session:
    """Finds the models of a process, records them, and says at its end what has become of it."""

    def __init__(self, request: RunRequest) -> None:
        self._request = request
        self._recorder: Recorder | None = None
        self._names: IdentityDict[nn.Module, str] = IdentityDict()
        self._taken: set[str] = set()
        self._said: set[str] = set()
        self._obstacle = "no backward pass was seen"
        self._closed = False
        self._lock = threading.RLock()
        self._exit = ExitNote()
        self._spare = SpareFiles()
        self._inventory: RunInventory | None = None
        self._search = Search(self._record, self._give_up, self._leave_out)
        self._has_given_up = self._has_left_out = False
        self._step: int | None = None
        backward_listeners.add(self)
        construction_watch.hold()
        self._sink = LateSink(self._open_unless_worker, self._make_step, self._give_up)

    def close(self) -> None:
        """End the recording and say so, once."""
        if self._closed:
            return
        self._closed = True
        self._spare.free()
        backward_listeners.remove(self)
        construction_watch.release()
        self._search.close()
        if self._inventory is not None:
            self._inventory.close()
        try:
            if self._recorder is not None:
                error = self._find_error(self._recorder)
                if error is not None and error["kind"] not in _LEFT and self._search.has_optimizers():
                    self._sink.means_to_train()
                self._recorder.close("finished" if error is None else "failed", error)
        except Exception as error:  # the program has ended, and a traceback would be taken for its own
            say(f"the end of the record is lost: {error!r}")
        try:
            if (
                self._sink.steps
                and not self._sink.sites
                and not self._names
                and is_speaker()
                and not self._request.quiet
            ):
                say(_LOSS_ALONE)
            say_end(self._tell_obstacle(), self._tell_done())
        except Exception as error:  # there may be no memory left
            say(f"how the recording has ended cannot be told: {error!r}")
        end_as_interrupted()

    def _has_loss_alone(self) -> bool:
        return bool(self._sink.steps and not self._sink.sites and not self._names)

    def _tell_obstacle(self) -> str:
        """Why nothing was recorded, and of how many steps."""
        steps = self._sink.steps
        return f"{self._obstacle}, at {count_of(steps, 'step')}" if steps else self._obstacle

    def _tell_done(self) -> str:
        """How much was recorded, and what was not; empty where nothing was."""
        sink = self._sink
        if not sink.is_open:
            return ""
        faults = 0 if self._recorder is None else self._recorder.events.faults.total()
        missing = [f"{sink.lost} were lost"] if sink.lost else []
        missing += [f"{count_of(faults, 'fault')} kept something from being recorded"] if faults else []
        done = f"{count_of(self._count_earlier() + sink.steps, 'step')} at {count_of(sink.sites, 'site')}"
        return f"{done}, but {' and '.join(missing)}" if missing else done

    def _count_earlier(self) -> int:
        """How many steps attempts of the same work have recorded (before ``exec``, say) that this one goes on from."""
        return sum(map(self._request.make_schedule(), range(self._step or 0)))

    def _find_error(self, recorder: Recorder) -> dict[str, Any] | None:
        """The exception that ends the process."""
        error = find_exception()
        return self._exit.failure if error is None else describe_exception(error, recorder.find_path)

    def _make_step(self) -> None:
        self._exit.forget()
        self._search.step_made()

    def start_over(self) -> None:
        """Record a forked child for itself: what its parent has seen but not yet written is the parent's."""
        self._lock = threading.RLock()
        self._sink.lose()
        self._step = None
        if self._recorder is not None:
            self._recorder.clock.close_all()
        self._sink.start_over()

    def leave(self) -> None:
        """The process is about to become another program, which may go on with the same work."""
        try:
            if self._sink.is_open and self._recorder is not None:
                attempt = leave(self._recorder.clock.coming, sum_squares(list(self._names)))
                self._sink.describe(attempt=attempt)
                self._recorder.flush()
        except Exception as error:  # a fault of ours must not keep it from that
            say(f"what was recorded last is lost: {error!r}")

    def take_inventory(self) -> None:
        """Take one beside the recording, if that was asked for."""
        if self._request.inventory is None:
            return
        from retrograd.memory.launch.inventory import RunInventory

        self._inventory = RunInventory(self._request, self._sink.add_file)
        self._inventory.follow_process()

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """A backward pass begins. Where no model has been found by the first one, there is one without."""
        if is_rehearsal() or self._has_given_up or is_loader_worker():
            return
        self._sink.means_to_train()
        with self._lock:
            self._begin()
        if self._recorder is not None:
            join_pass(self._recorder)  # where another thread has made it meanwhile

    def _begin(self) -> None:
        try:
            was_called = self._recorder is not None
            self._search.pass_begins()
            if self._recorder is None and not self._has_left_out:
                self._record([], None)
            if not was_called:
                self._tell_blind_call()
        except Exception as error:  # a fault of ours must not end the pass
            self._leave_out(None, error)

    def backward_ends(self, failed: bool) -> None:
        """A pass has ended."""

    def _tell_blind_call(self) -> None:
        """No model was called with gradients switched on; was one called without?"""
        if self._search.blind_call and self._recorder is not None:
            fact = Call(name="forward", line=self._search.blind_call, details={"grad": False})
            self._recorder.events.note(fact.kind, fact.name, text=fact.text)

    def _record(self, models: list[nn.Module], called: nn.Module | None) -> None:
        if is_loader_worker():
            return
        models = [model for model in models if model in self._names or self._can_be_walked(model)]
        named = name_models([model for model in models if model not in self._names], taken=self._taken)
        self._taken.update(named)
        self._names.update((model, name) for name, model in named.items())
        try:
            with without_transforms():
                self._add(models, named)
            if called is not None and self._recorder is not None:
                self._recorder.add_root(called)
        except RetrogradError as error:  # what was asked for cannot be had: better now than after a night of training
            self._obstacle = error.problem
            say(str(error))
            raise SystemExit(2) from None

    def _add(self, models: list[nn.Module], named: dict[str, nn.Module]) -> None:
        if self._recorder is not None:
            for model in models:
                self._recorder.add_model(self._names[model], model)
        elif models or not self._has_left_out:
            recorder = self._make_recorder(named)
            recorder.attach()
            self._recorder = recorder

    def _can_be_walked(self, model: nn.Module) -> bool:
        """Tell whether all of a model can be looked at; one that cannot is left out."""
        try:
            check_names({"": model})
            for entry in walk_modules("", model):
                list(entry.candidates())
        except Exception as error:
            self._leave_out(model, error)
            return False
        return True

    def _make_recorder(self, models: dict[str, nn.Module]) -> Recorder:
        request = self._request
        self._spare.free()
        load_writer()
        with random_kept(), warnings_kept():
            from retrograd.core.runs.first_step import find_first_step
            from retrograd.core.runs.upload import local_folder_of

        self._step = find_first_step(local_folder_of(request.path), partial(sum_squares, models.values()))
        self._spare = SpareFiles()
        step = self._step or 0
        if request.resume:
            writer = self._open_run()
            self._sink.use(writer)
            step = writer.next_step
        settings = Settings(
            sites=request.sites, schedule=request.make_schedule(), tensors=request.tensors, histogram=request.histogram
        )
        recorder = Recorder(models or None, self._sink, settings, step=step, loose=True, sources=self._sources())
        LiveFindings(recorder.events, None if request.quiet else say_critical)
        return recorder

    def _sources(self) -> Sequence[MakeSource]:
        """Sources of facts: more where the program is run to be explained."""
        limit = self._request.limit
        ending = () if limit is None else (partial(StopAfter, limit, lambda: self._sink.steps),)
        if not self._request.watch:
            return (*SOURCES, *ending)
        with random_kept(), warnings_kept():
            from retrograd.explaining.facts.watches import WATCHES

        return (*SOURCES, *WATCHES, *ending)

    def _open_unless_worker(self) -> RunWriter | SharedRun | None:
        return None if is_loader_worker() else self._open_run()

    def _open_run(self) -> RunWriter | SharedRun:
        self._spare.free()
        with random_kept(), warnings_kept():
            from retrograd.core.recording.record import open_run_sink

        request = self._request
        writer = open_run_sink(
            request.path,
            merge_ranks=request.merge_ranks,
            has_tensors=bool(request.tensors),
            resume=request.resume,
            step=self._step,
            join=True,
        )
        call_at_end(self.close, writer.path)  # again: what is registered last runs first, and the writer has its own
        if multiprocessing.parent_process() is not None:  # a child of multiprocessing ends without atexit
            multiprocessing.util.Finalize(None, self.close, exitpriority=0)
        writer.describe(command=self._request.command)
        return writer

    def _give_up(self, error: Exception) -> None:
        """Record nothing new; said at once, since it may be long until the end."""
        self._search.stop()
        self._has_given_up = True
        self._say_obstacle(error, "the recorder failed")

    def _leave_out(self, about: object, error: Exception) -> None:
        """Record this not, and go on with all else."""
        self._has_left_out = True
        self._say_obstacle(error, "the recorder failed" if about is None else f"{type(about).__name__} is not recorded")

    def _say_obstacle(self, error: Exception, what: str) -> None:
        """Say why something is missing, once each."""
        self._obstacle = error.problem if isinstance(error, RetrogradError) else f"{what}: {error!r}"
        if self._obstacle not in self._said:
            self._said.add(self._obstacle)
            say(self._obstacle)


# ---- the end ----


class StopAfter(FactSource):
    """Ends the program as ``sys.exit()`` does, when the forward begins that follows the last step that was asked for.

    Nothing is under way there: what the program does when it is left, it still does.

    Args:
        limit: how many steps.
        count: tells how many have been made.
        host: the recorder.
    """

    def __init__(self, limit: int, count: Callable[[], int], host: FactHost) -> None:
        super().__init__(host)
        self._limit = limit
        self._count = count

    def forward_begins(self, model: nn.Module, arguments: Any) -> None:
        if self._count() >= self._limit:
            if ask_rank() == 0:
                say(f"the program is ended here, after {count_of(self._limit, 'step')}, as --steps asks")
            raise SystemExit(0)


def call_before_exec(call: Callable[[], None]) -> None:
    """Call a function before this process becomes another program, which ends it without a word."""
    for name in ("execv", "execve"):  # what all others of ``os`` come to
        setattr(os, name, _call_first(call, getattr(os, name)))


def _call_first(call: Callable[[], None], execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def call_and_execute(*arguments: Any, **named: Any) -> Any:
        call()
        return execute(*arguments, **named)

    return call_and_execute


class ExitNote:
    """A note of what the last ``sys.exit`` of the main thread was called with, until :meth:`forget`."""

    def __init__(self) -> None:
        self._found: dict[str, Any] | None = None
        self._exit: Callable[..., Any] = sys.exit
        sys.exit = self._note(sys.exit)

    @property
    def failure(self) -> dict[str, Any] | None:
        """The noted exit as an exception; None where there was no exit, or a successful one."""
        return self._found

    def forget(self) -> None:
        """The program has caught it, and goes on."""
        self._found = None

    def _note(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(leave)
        def exit_noted(code: object = None, /) -> Any:
            if threading.current_thread() is threading.main_thread():
                self._found = _describe_code(code)
            leave(code)

        return exit_noted


def end_as_interrupted() -> None:
    """Let Python end the process by SIGINT after all, where Ctrl-C was the end of the program.

    It notes that for the process when a KeyboardInterrupt leaves code that was compiled from text, and forgets it when
    any other such code runs: an import, or a named tuple, while we write the last of the record.
    """
    if isinstance(find_exception(), KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _describe_code(code: object) -> dict[str, Any] | None:
    if code in (None, 0):
        return None
    running = sys.exc_info()[1]
    return describe_exit(code) if running is None else describe_exception(running)
