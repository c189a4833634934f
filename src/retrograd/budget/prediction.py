"""How long a recorded pass would take under a plan. Nothing is run here."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from retrograd.budget.simulation import Decisions, Link, Recording, Stretch, find_spans
from retrograd.policies.in_flight import UnderWay


def predict_seconds(recording: Recording, decisions: Decisions, departures: Mapping[int, int], link: Link) -> float:
    """How long the pass takes. Copies cost nothing as long as something is computed beside them."""
    clock = _Clock(recording.stretches, decisions, departures, link)
    wanted: dict[int, list[int]] = {}
    for number, position in enumerate(find_spans(recording, decisions.choices).needed):
        wanted.setdefault(position, []).append(number)
    for position, (kind, number) in enumerate(recording.events):
        clock.now += recording.seconds[position]
        if kind == "pack":
            clock.pack(number)
        elif kind == "ask" and position == recording.stretches[number].asked:
            clock.fetch(position)
            for each in wanted.get(position, ()):  # sources first: they were packed before
                clock.bring(each, position)
    return clock.now


class _Clock:
    """Time while a pass is gone through; each direction of the link is busy by itself."""

    def __init__(
        self, stretches: Sequence[Stretch], decisions: Decisions, departures: Mapping[int, int], link: Link
    ) -> None:
        self.now = 0.0
        self._stretches = stretches
        self._decisions = decisions
        self._departures = departures
        self._link = link
        self._out_free = 0.0
        self._back_free = 0.0
        self._written: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self._arriving: deque[int] = deque()
        self._leaving: UnderWay[int] = UnderWay()
        self._wanted_at: dict[int, list[int]] = {}
        for number, position in decisions.fetches.items():
            self._wanted_at.setdefault(position, []).append(number)

    def pack(self, number: int) -> None:
        """A stretch is packed; what is beyond the window is waited for."""
        stretch, choice = self._stretches[number], self._decisions.choices[number]
        if choice == "lossless":
            self.now += stretch.squeeze_seconds
        if choice != "offload":
            return
        self.now += self._link.latency + stretch.nbytes * self._link.work_out
        self._out_free = max(self.now, self._out_free) + stretch.nbytes / self._link.out
        self._written[number] = self._out_free
        for first in self._leaving.add(number, stretch.nbytes, self._decisions.window):
            self.now = max(self.now, self._written[first])

    def fetch(self, position: int) -> None:
        """Others begin to come back."""
        for wanted in self._wanted_at.get(position, ()):
            self._fetch(wanted)

    def bring(self, number: int, position: int) -> None:
        """A stretch has to be there."""
        stretch, choice = self._stretches[number], self._decisions.choices[number]
        if choice == "lossless" and stretch.left < position:
            self.now += stretch.expand_seconds
        elif choice == "rerun" and stretch.left < position:
            self.now += stretch.rerun_seconds
        elif number in self._departures:
            if number not in self._arrived:
                self._fetch_at_once(number)
            self.now = max(self.now, self._arrived[number])
            self.now += self._link.latency + stretch.nbytes * self._link.work_back

    def _fetch(self, number: int) -> None:
        start = max(self.now, self._back_free, self._written[number])
        self._back_free = start + self._stretches[number].nbytes / self._link.back
        self._arrived[number] = self._back_free
        self._arriving.append(number)

    def _fetch_at_once(self, number: int) -> None:
        """Before what was fetched ahead and has not come yet, which comes so much later."""
        start, seconds = max(self.now, self._written[number]), self._stretches[number].nbytes / self._link.back
        self._arrived[number] = start + seconds
        while self._arriving and self._arrived[self._arriving[0]] <= start:
            self._arriving.popleft()
        for ahead in self._arriving:
            self._arrived[ahead] += seconds
        self._back_free = max(self._back_free, start) + seconds
