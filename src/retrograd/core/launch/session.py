"""The recording of one process, from ``import torch`` to its end.

Loaded by the bootstrap. The writer is loaded when a model is found, before its first step: it takes 0.2 s, and most
processes that import torch train nothing; later there may be neither memory nor a file descriptor left to load it with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from retrograd.core.addresses import call_at_end
from retrograd.core.amounts import count_of
from retrograd.core.errors import RetrogradError
from retrograd.core.files import SpareFiles
from retrograd.core.history.facts import Call
from retrograd.core.hooks.backward import backward_listeners, join_pass
from retrograd.core.hooks.discovery import construction_watch
from retrograd.core.hooks.engine import without_transforms
from retrograd.core.hooks.loads import load_watch
from retrograd.core.hooks.names import name_models, walk_modules
from retrograd.core.identities import IdentityDict
from retrograd.core.launch.closing import is_reporting_process, say_end
from retrograd.core.launch.late_sink import LateSink
from retrograd.core.launch.live_findings import LiveFindings, say_critical
from retrograd.core.launch.models import Search, choose_names
from retrograd.core.launch.process import (
    ExitNote,
    call_before_exec,
    close_with_child,
    end_as_interrupted,
    follow_process,
)
from retrograd.core.launch.requests import RunRequest
from retrograd.core.notices import say, warnings_kept
from retrograd.core.plugins import find_provided
from retrograd.core.randomness import random_kept
from retrograd.core.ranks.processes import ask_rank, find_rank, is_loader_worker
from retrograd.core.ranks.stages import is_rehearsal
from retrograd.core.recording.fact_source import FactHost, FactSource, MakeSource
from retrograd.core.recording.logged import expect_none, expect_recording
from retrograd.core.recording.recorder import Recorder, list_sources
from retrograd.core.recording.schedule import count_recorded
from retrograd.core.recording.settings import Settings
from retrograd.core.recording.weight_sums import sum_squares
from retrograd.core.runs.attempts import leave
from retrograd.core.runs.chosen_ranks import read_ranks
from retrograd.core.runs.ending import describe_exception, find_exception

if TYPE_CHECKING:
    from retrograd.core.runs.writer import RunWriter


def start_session() -> None:
    """Record this process as ``retrograd run`` was asked to."""
    request = RunRequest.read(os.environ)
    if find_rank() is not None and ask_rank() not in read_ranks(request.ranks):
        if is_reporting_process() and not request.quiet:
            say(f"{request.undone}{_tell_unchosen(request)}")
        return
    session = Session(request)
    session.follow_process()
    session.take_inventory()


def load_writer() -> None:
    """Load what writes a run folder, Arrow among it."""
    with random_kept(), warnings_kept():
        import retrograd.core.recording.record
        import retrograd.core.runs.ending
        import retrograd.core.runs.writer  # noqa: F401

        list_sources()


_LEFT = ("SystemExit", "KeyboardInterrupt")
"""Exceptions by which a program is left on purpose."""


_LOSS_ALONE = (
    "only the loss was recorded: no module was called, and no optimizer of torch updates; to record a tensor, call "
    'rg.watch("name", tensor) where it is made'
)


def _tell_unchosen(request: RunRequest) -> str:
    return f"rank {ask_rank()} is not among --ranks {request.ranks}"


class Session:
    """Finds the models of a program, and records them; of a process it says at the end what has become of it.

    Args:
        request: what is recorded, and where.
        earlier: modules and optimizers that were there before, which are left alone unless they are used.
    """

    def __init__(self, request: RunRequest, earlier: Iterable[nn.Module | Optimizer] = ()) -> None:
        self._request = request
        self._chosen = read_ranks(request.ranks)
        self._recorder: Recorder | None = None
        self._names: IdentityDict[nn.Module, str] = IdentityDict()
        self._taken: set[str] = set()
        self._said: set[str] = set()
        self._obstacle = "no backward pass was seen"
        self._closed = False
        self._lock = threading.RLock()
        self._exit: ExitNote | None = None
        self._spare = SpareFiles()
        self._inventory: Any = None
        self._search = Search(self._record, self._see_optimizer, self._give_up, self._leave_out, earlier)
        self._has_given_up = self._has_left_out = self._is_unchosen = False
        self._step: int | None = None
        backward_listeners.add(self)
        expect_recording(self)
        construction_watch.hold()
        load_watch.hold()
        self._sink = self._make_sink()

    def _make_sink(self) -> LateSink:
        return LateSink(self._open_unless_apart, self._make_step, self._give_up)

    def follow_process(self) -> None:
        """Record until the process ends."""
        self._exit = ExitNote()
        follow_process(self.close, self.start_over)
        call_before_exec(self.leave)

    def close(self) -> None:
        """End the recording with the process and say so, once."""
        if self._closed:
            return
        self.end(find_exception())
        try:
            has_loss_alone = self._sink.steps and not self._sink.sites and not self._names
            if has_loss_alone and is_reporting_process() and not self._request.quiet:
                say(_LOSS_ALONE)
            say_end(self._tell_obstacle(), self._tell_done())
        except Exception as error:  # there may be no memory left
            say(f"how the recording ended is not known: {error!r}")
        end_as_interrupted()

    def end(self, raised: BaseException | None = None) -> None:
        """End the recording, once; ``raised`` has ended the program."""
        if self._closed:
            return
        self._closed = True
        self._spare.free()
        backward_listeners.remove(self)
        expect_none(self)
        construction_watch.release()
        load_watch.release()
        self._search.close()
        if self._inventory is not None:
            self._inventory.close()
        try:
            if self._recorder is not None:
                error = self._describe_error(self._recorder, raised)
                if error is not None and error["kind"] not in _LEFT and self._search.has_optimizers():
                    self._sink.mean_to_train()
                self._recorder.close("finished" if error is None else "failed", error)
        except Exception as error:  # the program has ended, and a traceback would be taken for its own
            say(f"the end of the record is lost: {error!r}")

    def _tell_obstacle(self) -> str:
        """Why nothing was recorded, and of how many steps."""
        steps = self._sink.steps
        is_of_steps = steps and not self._is_unchosen
        return f"{self._obstacle}, at {count_of(steps, 'step')}" if is_of_steps else self._obstacle

    def _tell_done(self) -> str:
        """How much was recorded, and what was not; empty where nothing was."""
        sink = self._sink
        if not sink.is_open:
            return ""
        faults = 0 if self._recorder is None else self._recorder.events.faults.total()
        missing = [f"{sink.lost} were lost"] if sink.lost else []
        missing += [f"{count_of(faults, 'fault')} kept something from being recorded"] if faults else []
        overhead = None if self._recorder is None else self._recorder.overhead
        steps = count_recorded(overhead, self._count_earlier() + sink.steps)
        done = f"{steps} at {count_of(sink.sites, 'site')}"
        return f"{done}, but {' and '.join(missing)}" if missing else done

    def _count_earlier(self) -> int:
        """How many steps attempts of the same work have recorded (before ``exec``, say) that this one goes on from."""
        return sum(map(self._request.make_schedule(), range(self._step or 0)))

    def _describe_error(self, recorder: Recorder, raised: BaseException | None) -> dict[str, Any] | None:
        """The exception, or the exit, that has ended the program."""
        if raised is not None:
            return describe_exception(raised, recorder.find_path)
        return None if self._exit is None else self._exit.failure

    def _make_step(self) -> None:
        if self._exit is not None:
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
        self._inventory = find_provided("run_inventory")(self._request, self._add_file)
        self._inventory.follow_process()

    def _add_file(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        self._sink.add_file(name, write)

    def backward_begins(self, roots: tuple[Tensor, ...]) -> None:
        """A backward pass begins. Where no model has been found by the first one, there is one without."""
        if is_rehearsal() or self._has_given_up or self._is_apart():
            return
        self._sink.mean_to_train()
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
        if is_loader_worker() or (find_rank() is not None and self._is_apart()):
            return
        models = [model for model in models if model in self._names or self._can_be_walked(model)]
        if models:
            models = [*self._take_back_name(), *models]
        named = choose_names([model for model in models if model not in self._names], taken=self._taken)
        self._taken.update(named)
        self._names.update((model, name) for name, model in named.items())
        try:
            with without_transforms():
                self._add(models, named)
            if called is not None and self._recorder is not None:
                self._recorder.add_root(called)
        except RetrogradError as error:  # what was asked for cannot be had: better now than after a night of training
            if self._exit is None:
                self._give_up(error)
                return
            self._obstacle = error.problem
            say(str(error))
            raise SystemExit(2) from None

    def _see_optimizer(self) -> None:
        if len(self._names) > 1:
            with self._lock:
                called = self._take_back_name()
                if called:
                    self._record(called, None)

    def _take_back_name(self) -> list[nn.Module]:
        """Begin again, before the first backward pass, where no optimizer holds the model that has no name.

        Returns:
            The models that have been called so far, which have no names any more.
        """
        recorder, called = self._recorder, list(self._names)
        first = next((model for model in called if self._names[model] == ""), None)
        is_late = self._sink.is_open or self._sink.means_to_train or (recorder and recorder.clock.outermost)
        if recorder is None or first is None or is_late or not self._search.passes_over(first):
            return []
        self._recorder = None
        self._sink.lose()
        recorder.close("stopped")
        self._sink = self._make_sink()
        self._names.clear()
        self._taken.clear()
        return called

    def _add(self, models: list[nn.Module], named: dict[str, nn.Module]) -> None:
        if self._recorder is not None:
            for model in models:
                self._recorder.add_model(self._names[model], model)
        elif models or not self._has_left_out:
            recorder = self._make_recorder(named)
            recorder.attach()
            self._recorder = recorder

    def _can_be_walked(self, model: nn.Module) -> bool:
        """Return whether all of a model can be looked at; one that cannot is left out."""
        try:
            name_models({"": model})
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
        schedule = request.make_schedule()
        settings = Settings(
            sites=request.sites, schedule=schedule, tensors=request.tensors, histogram=request.histogram
        )
        recorder = Recorder(models or None, self._sink, settings, step=step, loose=True, sources=self._sources())
        LiveFindings(recorder.events, None if request.quiet else say_critical)
        return recorder

    def _sources(self) -> Sequence[MakeSource]:
        """Sources of facts: more where the program is run to be explained."""
        limit = self._request.limit
        ending = () if limit is None else (partial(StopAfter, limit, lambda: self._sink.steps),)
        if not self._request.watch:
            return (*list_sources(), *ending)
        with random_kept(), warnings_kept():
            watches = find_provided("watches")
        return (*list_sources(), *(watches or ()), *ending)

    def _is_apart(self) -> bool:
        """Return whether this process records nothing: a worker of a data loader, or a rank that was not chosen.

        Processes that the program starts by itself know their rank only once they have found each other: before the
        first backward pass, where they are to train together.
        """
        if self._chosen.are_all or ask_rank() in self._chosen:
            return is_loader_worker()
        self._obstacle = _tell_unchosen(self._request)
        self._search.stop()
        self._has_given_up = self._is_unchosen = True
        return True

    def _open_unless_apart(self) -> RunWriter | None:
        return None if self._is_apart() else self._open_run()

    def _open_run(self) -> RunWriter:
        self._spare.free()
        with random_kept(), warnings_kept():
            from retrograd.core.runs.writer import RunWriter

        request = self._request
        writer = RunWriter(request.path, resume=request.resume, step=self._step, join=True, chosen=self._chosen)
        if self._exit is not None:  # again: what is registered last runs first, and the writer has its own
            call_at_end(self.close, writer.path)
        close_with_child(self.close)
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
        """Report why something is missing, once each."""
        self._obstacle = error.problem if isinstance(error, RetrogradError) else f"{what}: {error!r}"
        if self._obstacle not in self._said:
            self._said.add(self._obstacle)
            say(self._obstacle)


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
