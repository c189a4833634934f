"""``rg.record`` and ``rg.watch``: what users call."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast, overload

from torch import nn

from retrograd.core.cells import is_notebook
from retrograd.core.drawings import ask_view, drawn_by
from retrograd.core.errors import CallError, RecordingError, SiteSyntaxError
from retrograd.core.frames import find_argument
from retrograd.core.guesses import Guided, names_arguments
from retrograd.core.history.sink import Sink
from retrograd.core.hooks.engine import is_compiling, uncompiled
from retrograd.core.hooks.names import name_models, name_watched_leaves
from retrograd.core.hooks.rewriters import rewrite_watched, watched_rewriters
from retrograd.core.hooks.watched import trace_watched
from retrograd.core.notices import warn_of_fault
from retrograd.core.ranks.processes import ask_rank
from retrograd.core.recording.keep import DEFAULT_BUDGET, Keep
from retrograd.core.recording.logged import check_scalars, expect_none, expect_recording
from retrograd.core.recording.recorder import Recorder, check_models
from retrograd.core.recording.schedule import Schedule
from retrograd.core.recording.settings import Settings, UserStatistic
from retrograd.core.recording.sink_log import EventLog
from retrograd.core.runs.chosen_ranks import Ranks, read_ranks
from retrograd.core.runs.ending import describe_exception, is_failure
from retrograd.core.sites.pattern import Pattern
from retrograd.core.sites.site import check_watch_name

if TYPE_CHECKING:
    from retrograd.core.history.history import History
    from retrograd.core.history.series import Series
    from retrograd.core.runs.reader import Run

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_active: list[Recording] = []

_NOT_GIVEN: Any = object()

_CELL = ("retrograd.core.views.notebook.live", "show_recording")
"""What shows a recording in a notebook."""


class Recording(Guided):
    """A recording that goes on until it is closed; use it in a ``with`` statement, or call ``close()``.

    Attributes:
        path: the run folder, or None for a recording in memory.
    """

    def __init__(self, recorder: Recorder, sink: Sink, path: Path | None) -> None:
        self._recorder = recorder
        self._sink = sink
        self._run: Run | None = None
        self._when_closed: deque[Callable[[], None]] = deque()
        self._is_complete = False
        self.again: Callable[[], Recording] | None = None
        """Makes another one with the same arguments, for a function that is recorded at each call."""
        self.path = path
        if is_notebook():
            ask_view(*_CELL)  # loaded now: later, what another thread may have drawn meanwhile would be drawn again
        recorder.attach()
        _active.append(self)

    @property
    def is_open(self) -> bool:
        """True until it is closed."""
        return self in _active

    @property
    def step(self) -> int:
        """Number of the step that is being recorded, or will be next."""
        return self._recorder.clock.coming

    @property
    def history(self) -> History:
        """The history so far, up to the last complete micro-batch."""
        if (run := self.run) is not None:
            return run.history
        self.flush()
        return cast("History", self._sink)

    def __getitem__(self, site: str) -> Series:
        """One site over time: the same as ``recording.history[site]``."""
        return self.history[site]

    @property
    def run(self) -> Run | None:
        """The run on disk with all that was recorded so far, always the same one; None for a recording in memory."""
        if self.path is None:
            return None
        self.flush()
        if self._run is None:
            from retrograd.core.runs.reader import open_run

            self._run = open_run(self.path)
        else:
            self._run.refresh()
        return self._run

    @property
    def models(self) -> dict[str, nn.Module]:
        """The recorded models that are still there, by name; a single one has the empty name."""
        return self._recorder.models

    @property
    def events(self) -> EventLog:
        """Takes what happens once; its ``listener`` hears of that at once."""
        return self._recorder.events

    def flush(self) -> None:
        """Wait until all that is complete can be read."""
        self._recorder.flush()

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint must hold for the recording to go on from there: ``rg.record(…, resume=state)``.

        It writes nothing: call :meth:`flush` before, where a kill must not cost the last seconds before the checkpoint.
        """
        return {"step": self.step}

    def begin_step(self, step: int) -> None:
        """Begin this step, for loops that count by themselves; what comes belongs to it until the next call.

        From the first call on, no update ends a step: an evaluation behind it belongs to it too.

        Args:
            step: its number; that of the running step goes on with it, which is gradient accumulation.
        """
        self._recorder.clock.begin_step(step)

    def add_root(self, module: nn.Module) -> None:
        """Take each call of this part of a model for a forward of its own, for loops that call parts, not the model."""
        self._recorder.add_root(module)

    def watch(self, name: Any, tensor: Any = _NOT_GIVEN) -> None:
        """Record a tensor, or a nest of them, in this recording alone, see :func:`retrograd.watch`."""
        self._recorder.watch(*_read_watched(name, tensor))

    def log(self, scalars: Mapping[str, Any] | None = None, /, step: int | None = None, **named: Any) -> None:
        """Record numbers of a step in this recording alone, see :func:`retrograd.log`."""
        if self.is_open:
            self._recorder.log(*check_scalars(scalars, step, named))

    def call_when_closed(self, call: Callable[[], None]) -> None:
        """Have a function called once the record is complete, at once if it is; what it raises is told as a warning."""
        self._when_closed.append(call)
        if self._is_complete:
            self._call_all()

    def close(self, status: str = "finished") -> None:
        """Take every hook away and complete the record. Calling it twice is harmless."""
        self._close(status)

    def start(self) -> Self:
        """Return the recording, which has begun when it was made; ``stop()`` ends it.

        Raises:
            RecordingError: it has ended.
        """
        return self.__enter__()

    def stop(self) -> None:
        """End it: the same as :meth:`close`."""
        self.close()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Record what a function does, as a decorator: ``@rg.record(model)``.

        It is the body of a ``with`` block: the recording begins with the decorator, ends when the function returns or
        raises, and stands in ``function.recording``. Every later call has a new one with the same arguments, so a run
        folder takes one call, or ``resume=True``.

        Raises:
            CallError: it is no function, or one that only begins when it is called: a generator or a coroutine.
        """
        if not callable(function) or isinstance(function, nn.Module) or _begins_later(function):
            raise CallError(
                f"A recording cannot be called with {type(function).__name__}.",
                repair="decorate a function, @rg.record(model), or put what is recorded into a block: "
                "with rg.record(model) as recording.",
                reason="a generator or coroutine runs after its call has returned.",
            )

        @functools.wraps(function)
        def recorded(*args: P.args, **options: P.kwargs) -> R:
            recording: Recording = vars(recorded)["recording"]
            if not recording.is_open and recording.again is not None:
                recording = vars(recorded)["recording"] = recording.again()
            with recording:
                return function(*args, **options)

        vars(recorded)["recording"] = self
        return recorded

    def _close(self, status: str, error: dict[str, Any] | None = None) -> None:
        if self in _active:
            _active.remove(self)
        try:
            self._recorder.close(status, error)
        finally:
            self._is_complete = True
            self._call_all()

    def _call_all(self) -> None:
        with suppress(IndexError):  # none is left: another thread may take some too
            while True:
                _try(self._when_closed.popleft())

    def is_of_this_thread(self) -> bool:
        """True if the recorded models run in the thread that asks."""
        return self._recorder.is_of_this_thread()

    def __enter__(self) -> Self:
        if self._is_complete:
            raise RecordingError(
                "This recording has ended.",
                repair="call rg.record() again for each block; with a folder, `resume=True` goes on in it.",
                reason="entered again it would record nothing.",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if is_failure(error):
            assert error is not None
            self._close("failed", describe_exception(error, self._recorder.find_path))
        else:
            self._close("finished")

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"to {self.path}"
        return f"<Recording {where}, step {self.step}>"

    _repr_html_ = drawn_by("retrograd.core.views.notebook.live", "draw_recording")

    def _ipython_display_(self) -> None:
        """Show a cell that follows the recording; in a console IPython prints the text."""
        if not is_notebook():
            raise NotImplementedError
        ask_view(*_CELL)(self)


class UnrecordedRank(Recording):
    """The recording of a rank that was not chosen: it hooks nothing, writes nothing, and counts no steps.

    Args:
        rank: the rank.
        path: the folder that other ranks write.
    """

    def __init__(self, rank: int, path: Path | None) -> None:
        from retrograd.core.history.history import History

        self._rank = rank
        expect_recording(self)  # others record: what is logged here is not missed
        self._nothing = History()
        self._events = EventLog(self._nothing)
        self._when_closed = deque()
        self.again = None
        self._is_complete = False
        self.path = path

    @property
    def is_open(self) -> bool:
        return not self._is_complete

    @property
    def step(self) -> int:
        """0: no steps are counted."""
        return 0

    @property
    def models(self) -> dict[str, nn.Module]:
        """None."""
        return {}

    @property
    def history(self) -> History:
        """An empty one."""
        return self._nothing

    @property
    def run(self) -> None:
        """None: what other ranks have recorded, ``rg.open_run(recording.path)`` reads."""

    @property
    def events(self) -> EventLog:
        """Nothing happens."""
        return self._events

    def flush(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Empty: the step is not known here."""
        return {}

    def begin_step(self, step: int) -> None: ...

    def add_root(self, module: nn.Module) -> None: ...

    def watch(self, name: Any, tensor: Any = None) -> None: ...

    def log(self, scalars: Mapping[str, Any] | None = None, /, step: int | None = None, **named: Any) -> None: ...

    def _close(self, status: str, error: dict[str, Any] | None = None) -> None:
        self._is_complete = True
        expect_none(self)
        self._call_all()

    def is_of_this_thread(self) -> bool:
        return False

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Recording of nothing: rank {self._rank} does not record>"


def _begins_later(function: Callable[..., object]) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_one(function) for is_one in kinds)


def _try(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as failure:
        warn_of_fault("close a follower of a recording", failure)


@names_arguments
def record(
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    sites: Pattern | Iterable[Pattern] | None = None,
    schedule: int | Schedule | None = None,
    every: int | None = None,
    tensors: Keep | Pattern | Iterable[Keep | Pattern] | None = None,
    statistics: bool | Iterable[UserStatistic] = True,
    histogram: bool = True,
    tensor_budget: int | str = DEFAULT_BUDGET,
    per_forward: bool = False,
    resume: bool | Mapping[str, Any] = False,
    ranks: Ranks = "all",
) -> Recording:
    """Record the history of activations and of their gradients while a model trains.

    Recording never changes training: losses, gradients and weights are bitwise the same with and without it.

    Args:
        model: a module, or modules by name, whose names then lead the names of their sites. None for code without
            one: tensors that are watched, those that optimizers update, and losses.
        path: the run folder; ``{date}`` in its name is the date and time, so that each recording has a new one, as
            in ``"runs/mine-{date}"``. None keeps the history in memory.
        sites: which sites get statistics: globs over names, compiled regexes, module types, predicates. None is every
            module's output and its gradient, every parameter's gradient and update. ``"*/*"`` is every function that
            modules call.
        schedule: which steps: a number n for every n-th, :func:`every`, :func:`log_schedule`, or a function from
            step to bool. None is every step.
        every: every n-th step: the same as ``schedule=n``.
        tensors: sites whose tensors are kept, as patterns or :class:`Keep` policies.
        statistics: True for the built-in ones, False for none, or functions of one tensor to add to them.
        histogram: count binary exponents too.
        tensor_budget: bytes of kept tensors that are never passed, as a number or as in ``"500MB"``.
        per_forward: forwards without grad have a row each, where they else merge into one a step. ``micro`` is then the
            number of the forward within its step: of ``generate()`` the prompt is 0, and each token that follows is 1
            more.
        resume: go on with the recording in ``path``: True after its last step, or from the state that
            ``Recording.state_dict()`` gave; what was recorded from that step on is replaced.
        ranks: which ranks of a program of several processes record: ``"all"``, ranks as in ``"0,8,16"``,
            ``[0, 8, 16]`` or ``0``, or a share as in ``"1/8"``, which is ranks 0, 8, 16 and so on. Any other rank gets
            a recording that hooks and writes nothing. The rank is that of ``torch.distributed``, once it is
            initialised, or what the launcher says in ``RANK``.

    Returns:
        The recording. It has begun; it ends with the ``with`` block, with ``close()``, or with the function that it
        decorates: ``@rg.record(model)``.

    Raises:
        SiteError: for an invalid pattern, or one that matches nothing (the nearest sites are named).
        CallError: for an argument that there is none of, both ``schedule`` and ``every``, or ``{date}`` in a path that
            several ranks write, or that is to be resumed.
        RecordingError: for a schedule, statistic or policy that cannot be carried out.
        RunError: for a folder that holds another run, or cannot be written.
    """
    _check_path(path)
    settings = Settings(
        sites=sites,
        schedule=choose_schedule(schedule, every),
        tensors=tensors,
        statistics=statistics,
        histogram=histogram,
        tensor_budget=tensor_budget,
        per_forward=per_forward,
    )
    recording = _record(model, path, settings, resume, ranks)
    find_models = _hold_weakly(model)
    recording.again = lambda: _record(find_models(), path, settings, resume, ranks)
    return recording


def choose_schedule(schedule: int | Schedule | None, every: int | None) -> int | Schedule | None:
    """The schedule, by whichever word it was given.

    Raises:
        CallError: by both.
    """
    if every is not None and schedule is not None:
        raise CallError("schedule= and every= are two words for one thing.", repair="give one of them.")
    return schedule if every is None else every


def _hold_weakly(
    model: nn.Module | Mapping[str, nn.Module] | None,
) -> Callable[[], nn.Module | Mapping[str, nn.Module] | None]:
    """Models that a recording does not keep alive; what is returned returns them as long as they are there."""
    if model is None:
        return lambda: None
    held = {name: weakref.ref(each) for name, each in name_models(model).items()}

    def find() -> nn.Module | Mapping[str, nn.Module]:
        found = {name: each for name, reference in held.items() if (each := reference()) is not None}
        if len(found) < len(held):
            raise RecordingError(
                "The model that was recorded is gone.", repair="decorate a function anew: @rg.record(model)."
            )
        return found

    return find


def _record(
    model: nn.Module | Mapping[str, nn.Module] | None,
    path: str | os.PathLike[str] | None,
    settings: Settings,
    resume: bool | Mapping[str, Any],
    ranks: Ranks,
) -> Recording:
    chosen, rank = read_ranks(ranks), ask_rank()
    if path is not None:
        from retrograd.core.runs.ranks import check_dated

        check_dated(path, resume=resume is not False)
    if rank not in chosen:
        from retrograd.core.addresses import open_folder

        return UnrecordedRank(rank, None if path is None else open_folder(path))
    if path is None:
        if resume is not False:
            raise RecordingError("A recording in memory cannot be resumed.", repair="give the run folder as `path`.")
        from retrograd.core.history.history import History

        memory = History(tensor_budget=settings.tensor_budget)
        return Recording(Recorder(model, memory, settings, loose=model is None), memory, None)
    from retrograd.core.runs.writer import RunWriter

    step = _read_step(resume) if isinstance(resume, Mapping) else None
    check_models(model, settings)  # before the folder is made
    writer = RunWriter(path, resume=resume is not False, step=step, chosen=chosen, tensor_budget=settings.tensor_budget)
    return Recording(Recorder(model, writer, settings, step=writer.next_step, loose=model is None), writer, writer.path)


def _check_path(path: object) -> None:
    if path is None or isinstance(path, str | os.PathLike):
        return
    raise CallError(
        f"The second argument of rg.record() is the run folder, not {type(path).__name__}.",
        repair="leave it out: rg.record(model) finds the optimizers and losses of a model by itself.",
    )


def _read_step(state: Mapping[str, Any]) -> int:
    if "step" not in state:
        raise RecordingError(
            "The state to resume from is that of a rank that did not record.",
            repair="save Recording.state_dict() on a rank that records.",
        )
    return int(state["step"])


@overload
def watch(name: str, tensor: T) -> T: ...
@overload
def watch(tensor: T, name: str, /) -> T: ...
@overload
def watch(tensor: T, /) -> T: ...
@uncompiled
def watch(name: Any, tensor: Any = _NOT_GIVEN) -> Any:
    """Record a tensor of your own, under the name ``watch/NAME``; its gradient as ``watch/NAME.grad``.

    When nothing is being recorded or rewritten, it does no more than to name a leaf for :func:`walk` and
    :func:`trace`, so the line may stay in the code. Where a rule acts on
    the value or on its gradient, go on with what is returned: ``logits = rg.watch("logits", logits)``.

    Args:
        name: what to call it; no ``:`` or ``#``. It may also come second. Left out, it is what the call says,
            ``rg.watch(h[0])`` is ``watch/h[0]``, or ``tensor`` where that is not known, as in compiled code.
        tensor: the tensor, or a nest of tensors.

    Returns:
        ``tensor``, the very same object; if a rule acts on it, what the rule has made of it.

    Raises:
        SiteSyntaxError: for a name that cannot be one.
        CallError: for a module.
    """
    if is_compiling():
        if not isinstance(name, str):
            name, tensor = tensor, name
        trace_watched(name if isinstance(name, str) else "tensor", tensor)
        return tensor
    name, tensor = _read_watched(name, tensor)
    if watched_rewriters.all:
        check_watch_name(name)
        tensor = rewrite_watched(name, tensor)
    name_watched_leaves(name, tensor)
    if _active:
        check_watch_name(name)
        for recording in tuple(_active):
            if recording.is_of_this_thread():
                recording.watch(name, tensor)
    return tensor


def _read_watched(name: Any, tensor: Any) -> tuple[str, Any]:
    """A name and a tensor, in either order; without a name, the one that the call says."""
    if not isinstance(name, str):
        name, tensor = tensor, name
    is_whole = isinstance(name, str) and tensor is not _NOT_GIVEN
    return (name if is_whole else _name_watched(name, tensor)), tensor


def _name_watched(given: object, tensor: object) -> str:
    if isinstance(tensor, nn.Module):
        raise CallError(
            "rg.watch() takes a tensor, not a module.",
            repair="with rg.record(model) as recording: records all that a model does.",
        )
    if given is not _NOT_GIVEN or isinstance(tensor, str):
        raise CallError(
            "rg.watch() takes a name and a tensor.", repair='write rg.watch("logits", logits), or rg.watch(logits).'
        )
    name = find_argument().strip("'\"")
    with suppress(SiteSyntaxError):
        check_watch_name(name)
        return name
    return "tensor"
