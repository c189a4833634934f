"""A budget for overhead, by a clock of its own: what each step costs is said here, and nothing is timed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.facts import Gap, read_facts
from retrograd.core.history.sink import Event, Moment
from retrograd.core.ranks.board import Board
from retrograd.core.recording.budget import WINDOW, Budget, DeviceLaps, Lap, ThreadLaps, is_chosen
from retrograd.core.recording.schedule import FULL_STEPS, Overhead, count_recorded, describe_schedule
from retrograd.core.spent import OwnTime, counted, own_time


class Simulation:
    """Steps of which each costs what a function says; what was recorded of each, and the gaps that were noted."""

    def __init__(
        self,
        share: float,
        cost: Callable[[int, bool, bool], float],
        *,
        full_seconds: float = 0.0,
        lag: int = 0,
        ours: float = 0.0,
        written: float = 0.0,
        find_board: Callable[[str], Board | None] = lambda name: None,
    ) -> None:
        self.now, self.cost, self.gaps = 0.0, cost, list[Gap]()
        self.recorded, self.updates, self.spent = list[int](), list[int](), 0.0
        self._waiting, self._lag, self._ours = list[float](), lag, ours
        self._began = None
        wanted = Overhead(share, full_seconds)
        self.budget = Budget(
            wanted, self.gaps.append, lambda: self, lambda: self.now, lambda: written * len(self.recorded), find_board
        )

    def lap(self) -> Iterable[Lap]:
        began, self._began = self._began, self.now
        self._waiting += [] if began is None else [self.now - began]
        while len(self._waiting) > self._lag:
            yield Lap(self._waiting.pop(0), self._ours or math.nan)

    def stop(self) -> None:
        pass

    def run(self, steps: Iterable[int], losses: Callable[[int], float] = lambda step: 1.0) -> Simulation:
        for step in steps:
            is_on = self.budget.begin_step(step)
            with_updates = is_on and self.budget.with_updates
            self.recorded += [step] * is_on
            self.updates += [step] * with_updates
            self.now += self.cost(step, is_on, with_updates)
            self.budget.hear(Event(Moment(step), "loss", value=losses(step)))
        return self

    def list_extra(self, first: int, end: int, steps: Sequence[int]) -> float:
        """What recording took of these steps, over what they take by themselves."""
        bare = sum(self.cost(step, False, False) for step in steps if first <= step < end)
        chosen, updated = set(self.recorded), set(self.updates)
        taken = sum(self.cost(step, step in chosen, step in updated) for step in steps if first <= step < end)
        return taken / bare - 1


def steady(statistics: float, updates: float) -> Callable[[int, bool, bool], float]:
    return lambda step, is_on, with_updates: 1.0 + statistics * is_on + updates * with_updates


@pytest.mark.parametrize(("statistics", "updates"), [(0.2, 0.12), (0.06, 0.0), (0.9, 0.5), (7.0, 4.0), (0.02, 0.03)])
@pytest.mark.parametrize("share", [0.05, 0.1])
def test_the_share_is_kept_and_used(statistics: float, updates: float, share: float) -> None:
    steps = range(5000)
    made = Simulation(share, steady(statistics, updates)).run(steps)
    taken = made.list_extra(1000, 5000, steps)
    assert taken <= share * 1.02
    assert taken >= min(statistics + updates, share) / 3  # the next smaller gap would have been too much
    assert made.recorded[:FULL_STEPS] == made.updates[:FULL_STEPS] == list(range(FULL_STEPS))
    told = made.budget.describe()
    assert told["recorded"] == len(made.recorded)
    assert told["updates"] == len(made.updates)
    assert told["steps"] == 5000
    assert told["measured"] == pytest.approx(made.list_extra(FULL_STEPS, 5000, steps), rel=0.2, abs=0.002)
    assert told["between"] is None  # nobody has measured that, as on a device
    assert describe_schedule({"schedule": "x", "overhead": told}).endswith(" % measured beyond unrecorded steps)")


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_what_stays_between_recorded_steps_is_paid_for_first(share: float) -> None:
    steps, ours = range(5000), 0.03
    made = Simulation(share, steady(0.2, 0.12), ours=ours).run(steps)
    beyond = made.list_extra(1000, 5000, steps)
    assert (1 + beyond) / (1 - ours) - 1 <= share * 1.02  # of a step that we have no part in
    assert beyond > 0.005
    told = made.budget.describe()
    assert told["between"] == pytest.approx(ours / (1 - ours))
    assert told["measured"] == pytest.approx((1 + made.list_extra(FULL_STEPS, 5000, steps)) / (1 - ours) - 1, rel=0.2)
    assert made.gaps[-1].share == pytest.approx((1 + beyond) / (1 - ours) - 1, rel=0.05)
    assert "points of it between recorded steps" in describe_schedule({"schedule": "x", "overhead": told})


def test_recorded_steps_have_a_quarter_of_the_share_where_more_than_all_of_it_stays_between_them() -> None:
    steps = range(9000)
    made = Simulation(0.08, steady(0.4, 0.2), ours=0.2).run(steps)
    beyond = made.list_extra(2000, 9000, steps) / (1 - 0.2)
    assert 0.01 < beyond <= 0.25 * 0.08 * 1.02


def test_own_time_is_that_of_one_thread_and_counts_nested_calls_once() -> None:
    clock, read = [0.0], list[float]()
    own = OwnTime(lambda: clock[0])

    def spend(seconds: float) -> None:
        clock[0] += seconds
        read.append(own.read())

    def call(seconds: float) -> None:
        if own.is_on:
            own.run(spend, seconds)
        else:
            spend(seconds)

    call(5.0)  # not wanted yet
    assert math.isnan(read.pop())
    own.want(True)
    own.run(call, 2.0)
    clock[0] += 100.0
    assert math.isnan(own.read())
    call(3.0)
    with ThreadPoolExecutor() as pool:
        pool.submit(call, 7.0).result()
    call(1.5)
    assert read == [2.0, 5.0, pytest.approx(math.nan, nan_ok=True), 6.5]

    def stop() -> None:
        own.want(False)
        assert own.read() == 6.5

    own.run(stop)
    assert not own.is_on


def test_a_recording_measures_what_is_its_own_and_leaves_no_clock_on() -> None:
    model, seen = make_net(), list[bool]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rg.record(model, schedule=rg.overhead(0.05)) as recording:
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            seen.append(own_time.is_on)
        told = recording._recorder._budget.describe()
        assert told["between"] > 0
    assert any(seen)
    assert not all(seen[FULL_STEPS:])
    assert not own_time.is_on
    calls = list[int]()
    counted(calls.append)(1)
    assert calls == [1]


@pytest.mark.parametrize("gap", [1, 2, 8, 64])
def test_of_each_gap_of_steps_one_is_chosen_and_each_is_one_of_the_smaller_gaps(gap: int) -> None:
    chosen = [step for step in range(256 * gap) if is_chosen(step, gap)]
    assert [step // gap for step in chosen] == list(range(256))
    assert all(is_chosen(step, gap // 2) for step in chosen if gap > 1)
    for turns in (2, 3, 4, 5, 7):  # as of nets that are trained one after the other
        seen = Counter(step % turns for step in chosen)
        assert all(0.6 < seen[turn] / (256 / turns) < 1.4 for turn in range(turns)), turns


@pytest.mark.parametrize("extra", [0.3, 3.0])
def test_nets_that_are_trained_in_turns_are_seen_both(extra: float) -> None:
    made = Simulation(0.05, steady(extra, extra / 2)).run(range(3000))
    assert made.gaps[-1].value >= 4
    for kind in (made.recorded, made.updates):
        late = Counter(step % 2 for step in kind if step >= 500)
        assert min(late[0], late[1]) > 0.25 * late.total()


def test_gaps_are_powers_of_two_on_one_grid_so_that_two_runs_have_steps_in_common() -> None:
    cheap, dear = (
        Simulation(0.05, steady(0.2, 0.1)).run(range(3000)),
        Simulation(0.05, steady(1.0, 0.5)).run(range(3000)),
    )
    for made in (cheap, dear):
        gap, of_updates = int(made.gaps[-1].value), made.gaps[-1].updates
        later = [step for step in made.recorded if step >= 1500]
        assert gap & (gap - 1) == of_updates & (of_updates - 1) == 0
        assert later == [step for step in range(1500, 3000) if is_chosen(step, gap)]
        assert [step for step in made.updates if step >= 1500] == [s for s in later if is_chosen(s, of_updates)]
    assert {step for step in dear.recorded if step >= 1500} < {step for step in cheap.recorded if step >= 1500}


def test_updates_are_recorded_at_fewer_steps_where_that_pays_for_more_of_the_others() -> None:
    made = Simulation(0.05, steady(0.18, 0.12)).run(range(2000))
    assert made.gaps[-1].updates > made.gaps[-1].value


@pytest.mark.parametrize(
    "odd",
    [
        lambda step: 500.0 * (step == 0),  # compilation
        lambda step: 80.0 * (step % 50 == 0),  # an evaluation, or a checkpoint, at steps that are recorded
        lambda step: 80.0 * (step % 51 == 17),
        lambda step: 3.0 * (step % 7 == 0),  # garbage
    ],
)
def test_steps_that_are_longer_than_the_others_fool_nobody(odd: Callable[[int], float]) -> None:
    plain = steady(0.2, 0.1)
    made = Simulation(0.05, lambda *step: plain(*step) + odd(step[0])).run(range(3000))
    quiet = Simulation(0.05, plain).run(range(3000))
    assert (made.gaps[-1].value, made.gaps[-1].updates) == (quiet.gaps[-1].value, quiet.gaps[-1].updates)


def test_a_net_that_becomes_slower_is_followed() -> None:
    plain = steady(0.3, 0.2)
    made = Simulation(0.05, lambda step, *on: plain(step, *on) + (9.0 if step >= 2000 else 0.0)).run(range(6000))
    before = next(gap for gap in reversed(made.gaps) if gap.step < 2000)
    assert made.gaps[-1].value < before.value  # the same cost is a tenth of the share


def test_every_step_is_recorded_for_as_long_as_was_said() -> None:
    made = Simulation(0.05, steady(0.2, 0.1), full_seconds=1000.0).run(range(2000))
    first = next(step for step in range(2000) if step not in set(made.recorded))
    assert sum(made.cost(step, True, True) for step in range(first)) >= 1000
    assert first < 1000
    slow = Simulation(0.05, steady(2.0, 1.0), full_seconds=10.0).run(range(200))
    assert set(range(FULL_STEPS)) <= set(slow.recorded)


def test_what_costs_nearly_nothing_is_recorded_at_every_step_but_a_few_that_are_measured() -> None:
    made = Simulation(0.05, steady(0.01, 0.01)).run(range(10_000))
    assert len(made.recorded) > 0.98 * 10_000
    later = Simulation(0.05, lambda step, *on: steady(*((0.01, 0.01) if step < 3000 else (0.4, 0.2)))(step, *on))
    later.run(range(8000))
    assert later.list_extra(6000, 8000, range(8000)) <= 0.051


@pytest.mark.parametrize("bad", [math.nan, math.inf, 50.0])
def test_a_loss_that_jumps_is_followed_by_a_window_that_is_recorded_in_full(bad: float) -> None:
    made = Simulation(0.05, steady(0.5, 0.3)).run(range(2000), lambda step: bad if step == 1501 else 1.0 + step % 3 / 9)
    assert set(range(1502, 1502 + WINDOW)) <= set(made.updates)
    window, end = [gap for gap in made.gaps if gap.step >= 1501][:2]
    assert (window.step, window.value, window.reason) == (1502, 1, "loss" if bad == 50 else "nonfinite")
    assert end.step == 1502 + WINDOW
    assert end.value > 1


def test_a_loss_that_jumps_far_has_a_window_though_a_smaller_jump_has_had_one() -> None:
    losses = {1000: 2.5, 1070: 9e3, 1140: 8e3}
    made = Simulation(0.05, steady(3.0, 1.0)).run(range(2000), lambda step: losses.get(step, 1.0 + step % 3 / 9))
    assert [gap.step for gap in made.gaps if gap.reason == "loss"] == [1001, 1071]


def test_windows_are_paid_for_like_all_else() -> None:
    steps = range(12_000)
    made = Simulation(0.05, steady(0.5, 0.3)).run(
        steps, lambda step: math.nan if step > 1000 and step % 40 == 0 else 1.0
    )
    assert made.list_extra(2000, 12_000, steps) <= 0.052
    assert sum(gap.reason == "nonfinite" for gap in made.gaps) > 1


def test_a_falling_loss_opens_no_window() -> None:
    made = Simulation(0.05, steady(0.5, 0.3)).run(range(3000), lambda step: math.exp(-step / 500))
    assert {gap.reason for gap in made.gaps} == {"measure", "cost"}


def test_steps_that_somebody_numbers_in_tens_are_recorded_too() -> None:
    made = Simulation(0.05, steady(0.2, 0.1)).run(range(7, 30_007, 10))
    assert made.list_extra(10_000, 30_007, range(7, 30_007, 10)) <= 0.051
    assert len([step for step in made.recorded if step > 10_000]) > 100


def test_what_a_device_tells_later_is_used_later() -> None:
    steps = range(3000)
    made = Simulation(0.05, steady(0.2, 0.1), lag=5).run(steps)
    assert made.list_extra(1000, 3000, steps) <= 0.051


def test_time_between_events_of_a_device_is_read_when_they_have_come() -> None:
    marks = []

    class Mark:
        def __init__(self) -> None:
            marks.append(self)
            self.is_there = False

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.is_there

        def elapsed_time(self, other: Mark) -> float:
            assert other.is_there
            return 1000.0 * (marks.index(other) - marks.index(self))

    laps = DeviceLaps(Mark)
    assert [list(laps.lap()) for _ in range(3)] == [[], [], []]
    for mark in marks:
        mark.is_there = True
    assert [lap.seconds for lap in laps.lap()] == [1.0, 1.0]


# ---- through the public door ----


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The thread's clock."""
    clock = [0.0]
    make = partial(Budget, make_laps=lambda: ThreadLaps(lambda: clock[0], OwnTime(lambda: clock[0])))
    monkeypatch.setattr("retrograd.core.recording.recorder.Budget", make)
    return clock


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(
    model: nn.Module,
    steps: int,
    ticks: list[float] | None = None,
    recording: rg.Recording | None = None,
    micros: int = 1,
) -> list[float]:
    """Losses of each pass. A step takes a second by the clock; a recorded one half of that more."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micros):
            loss = (model(torch.randn(16, 4)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        if ticks is not None and recording is not None:
            ticks[0] += 1.0 + 0.5 * recording._recorder.clock.on
        optimizer.step()
    return losses


@pytest.mark.parametrize("micros", [1, 3])
def test_numbers_of_which_a_step_has_one_are_recorded_at_every_step(ticks: list[float], micros: int) -> None:
    model = make_net()
    with rg.record(model, schedule=rg.overhead(0.05)) as recording:
        losses = train(model, 600, ticks, recording, micros)
    history = recording.history
    plain = make_net()
    assert train(plain, 600, micros=micros) == losses  # observing changes nothing
    assert [event.value for event in history.events if event.kind == "loss"] == losses
    assert [event.moment.micro for event in history.events if event.kind == "loss"] == list(range(micros)) * 600
    assert history.scalars["grad_norm"].steps.tolist() == list(range(600))  # clipping has told it
    assert len(history.scalars["lr"].steps) == 600
    gaps = [fact for fact in read_facts(history.events) if isinstance(fact, Gap)]
    steps = history["2:output"].steps
    assert steps.tolist()[-5:] == [step for step in range(600) if is_chosen(step, int(gaps[-1].value))][-5:]
    told = history.manifest["overhead"]
    assert told["recorded"] == len(steps)
    assert told["updates"] == len(history["2:weight.update"].steps)
    assert told["measured"] <= 0.06
    assert len(history["0:weight.grad"].steps) == len(steps)
    counts = f"{len(steps)} of 600 steps, {told['updates']} with updates"
    assert counts in str(rg.describe(history))


def test_norms_that_nobody_has_clipped_are_those_of_recorded_steps(ticks: list[float]) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rg.record(model, schedule=rg.overhead(0.05)) as recording:
        for _ in range(300):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            ticks[0] += 1.0 + 0.5 * recording._recorder.clock.on
            optimizer.step()
    assert recording.history.scalars["grad_norm"].steps.tolist() == recording.history["2:output"].steps.tolist()


def test_losses_of_a_model_that_is_not_recorded_are_not_taken_for_those_of_one_that_is(ticks: list[float]) -> None:
    model, other = make_net(), make_net()
    with rg.record(model, schedule=rg.overhead(0.05)) as recording:
        for _ in range(300):
            train(model, 1, ticks, recording)
            (other(torch.ones(2, 4)).mean() + 1000).backward()
    losses = [event.value for event in recording.history.events if event.kind == "loss"]
    assert len(losses) == 300
    assert max(losses) < 100


def test_an_evaluation_between_steps_is_no_step(ticks: list[float]) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rg.record(model, schedule=rg.overhead(0.05)) as recording:
        for step in range(400):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            ticks[0] += 1.0 + 0.5 * recording._recorder.clock.on
            optimizer.step()
            if step % 20 == 0:
                with torch.no_grad():
                    for _ in range(5):
                        model.eval()(torch.ones(2, 4))
                        ticks[0] += 30.0
                model.train()
    history = recording.history
    assert len([event for event in history.events if event.kind == "loss"]) == 400
    assert history.manifest["overhead"]["steps"] == 400
    assert history.manifest["overhead"]["measured"] <= 0.06


def test_a_resumed_run_begins_in_full_again_and_on_the_same_grid(ticks: list[float], tmp_path: object) -> None:
    folder = f"{tmp_path}/run"
    for resume in (False, True):
        model = make_net()
        with rg.record(model, folder, schedule=rg.overhead(0.05), resume=resume) as recording:
            train(model, 300, ticks, recording)
    history = rg.open_run(folder).history
    steps = set(history["2:output"].steps.tolist())
    assert set(range(300, 400)) <= steps
    gap = int([fact for fact in read_facts(history.events) if isinstance(fact, Gap)][-1].value)
    assert all(is_chosen(step, gap) for step in steps if step >= 560)
    assert len(history.loss.steps) == 600


def test_a_budget_that_is_none_is_refused() -> None:
    for share in (0, -0.1, 1.5, "5%", True, math.nan):
        with pytest.raises(rg.RetrogradError, match="no schedule of overhead"):
            rg.overhead(share)


def test_writing_is_paid_for_too() -> None:
    steps, written = range(5000), 0.3
    free = Simulation(0.05, steady(0.2, 0.1)).run(steps)
    paid = Simulation(0.05, steady(0.2, 0.1), written=written).run(steps)
    recorded = len([step for step in paid.recorded if step >= 1000])
    assert paid.list_extra(1000, 5000, steps) + written * recorded / 4000 <= 0.05 * 1.02
    assert recorded < len([step for step in free.recorded if step >= 1000])


class Told:
    """A board in one process, of which each rank has a reader of its own."""

    def __init__(self) -> None:
        self.said, self.readers = list[str](), 0

    def __call__(self, name: str) -> Board:
        self.readers += 1
        return Reader(self, self.readers == 1)


class Reader:
    def __init__(self, told: Told, is_led: bool) -> None:
        self._told, self.is_led, self._read = told, is_led, 0

    def post(self, text: str) -> None:
        assert self.is_led
        self._told.said.append(text)

    def read(self) -> Iterable[str]:
        while self._read < len(self._told.said):
            self._read += 1
            yield self._told.said[self._read - 1]


@pytest.mark.parametrize("stride", [1, 10])
@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_record_the_same_steps_whatever_each_of_them_costs_and_sees(ahead: int, stride: int) -> None:
    told = Told()
    ranks = [Simulation(0.05, steady(*costs), find_board=told) for costs in ((0.2, 0.1), (0.9, 0.0), (0.01, 4.0))]
    for number in range(-ahead, 3000):  # the first may be a step ahead of the others
        for rank, made in enumerate(ranks):
            step = stride * (number + ahead * (rank == 0))
            jumps = 9.0 if (number + rank) % 700 == 0 else 1.0
            if 0 <= step < 3000 * stride:
                made.run([step], lambda step, loss=jumps: loss)
    first, *others = ranks
    assert len(told.said) > 3
    assert 150 < len(first.recorded) < 1000
    for other in others:
        assert (other.recorded, other.updates) == (first.recorded, first.updates)
        assert [(gap.moment.step, gap.value) for gap in other.gaps] == [
            (gap.moment.step, gap.value) for gap in first.gaps
        ]
    after = first.list_extra(1000 * stride, 3000 * stride, [stride * number for number in range(3000)])
    assert after <= 0.05 * 1.1


def test_ranks_that_cannot_agree_record_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = Simulation(0.05, steady(0.2, 0.1)).run(range(500))
    assert made.recorded == list(range(500))


def test_an_evaluation_behind_the_last_update_is_no_step(ticks: list[float]) -> None:
    model = make_net()
    with rg.record(model, schedule=rg.overhead(0.05), sites="0:output") as recording:
        train(model, 300, ticks, recording)
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
    history = recording.history
    told = history.manifest["overhead"]
    rows = history["0:output"].select(phase="train").steps
    assert (told["steps"], told["recorded"], told["updates"]) == (300, len(rows), 0)  # of updates there is no site
    text = describe_schedule(history.manifest)
    assert f"({len(rows)} of 300 steps;" in text


@pytest.mark.parametrize(
    ("overhead", "text"),
    [
        (None, "900 steps"),
        ({"share": 0.05, "recorded": 90, "steps": 90, "measured": None}, "900 steps"),
        ({"share": 0.05, "recorded": 122, "steps": 1900, "measured": 0.05}, "122 of 1,900 steps"),
        (
            {"share": 0.05, "recorded": 122, "steps": 900, "measured": 0.391},
            "122 of 900 steps (measured: 39 % of a step's own time, where 5 % were wanted)",
        ),
    ],
)
def test_how_many_steps_were_recorded_in_words(overhead: dict[str, float] | None, text: str) -> None:
    assert count_recorded(overhead, 900) == text
