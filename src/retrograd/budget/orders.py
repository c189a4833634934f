"""In which order stretches of memory are moved, each to where, until a budget is kept."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.budget.simulation import Choice, Link, Recording, Stretch

Move = tuple[int, Choice]


def list_orders(recording: Recording, link: Link) -> Iterator[list[Move]]:
    """Orders in which to move stretches, each with where it goes."""
    moves = _all_moves(recording)
    prices = {move: _price(recording.stretches[move[0]], move[1], link) for move in moves}
    by_price = sorted(moves, key=lambda move: prices[move])
    yield _first_of_each(by_price)
    lasting = sorted(moves, key=lambda move: prices[move] / max(1, _freed(recording.stretches[move[0]])))
    yield _first_of_each(lasting)
    yield [move for move in by_price if move[1] == "offload"]
    elsewhere_last = sorted(by_price, key=lambda move: move[1] == "offload")
    yield _first_of_each(elsewhere_last)
    dearness = sorted(_dearness(stretch) for stretch in recording.stretches)
    for least in (0.0, dearness[len(dearness) // 2]):
        yield _first_of_each([*_hidden_offloads(recording, link, least), *elsewhere_last])
    yield from list_steady_orders(recording)


def _hidden_offloads(recording: Recording, link: Link, least: float) -> list[Move]:
    """What can leave while the forward runs, so that it costs nothing: whatever is packed while the link is free.

    Args:
        recording: the pass.
        link: its speed.
        least: seconds a byte below which a stretch is made again instead.
    """
    can_leave = {move[0] for move in _all_moves(recording) if move[1] == "offload"}
    hidden: list[Move] = []
    now = free_at = 0.0
    for (kind, number), seconds in zip(recording.events, recording.seconds, strict=True):
        now += seconds
        stretch = recording.stretches[number]
        if kind == "pack" and number in can_leave and free_at <= now and _dearness(stretch) >= least:
            free_at = now + stretch.nbytes / link.out
            hidden.append((number, "offload"))
    return hidden


def _dearness(stretch: Stretch) -> float:
    """Seconds a byte that making it again takes."""
    return stretch.rerun_seconds / stretch.nbytes if stretch.rerun else float("inf")


def list_steady_orders(recording: Recording) -> Iterator[list[Move]]:
    """Those that depend on no clock, so that the smallest budget found for a pass is found again for the next one."""
    moves = _all_moves(recording)
    by_size = sorted(moves, key=lambda move: -recording.stretches[move[0]].nbytes)
    for first in ("offload", "rerun", "lossless"):
        yield _first_of_each(sorted(by_size, key=lambda move: move[1] != first))
    by_rest = sorted(moves, key=lambda move: _rest(recording.stretches[move[0]], move[1]))
    yield _first_of_each(by_rest)
    yield _first_of_each(sorted(by_rest, key=lambda move: -_freed(recording.stretches[move[0]])))


def _rest(stretch: Stretch, choice: Choice) -> float:
    """What remains in memory, as a share; what is elsewhere is there for a while before and after."""
    if choice == "lossless":
        assert stretch.small_bytes is not None
        return stretch.small_bytes / stretch.nbytes
    return 0.5 if choice == "offload" else 0.75


def _freed(stretch: Stretch) -> int:
    """Bytes and positions that can be freed."""
    return stretch.nbytes * (stretch.needed - max(stretch.left, stretch.packed + 1))


def _all_moves(recording: Recording) -> list[Move]:
    return [move for number, stretch in enumerate(recording.stretches) for move in list_moves(number, stretch)]


def list_moves(number: int, stretch: Stretch) -> Iterator[Move]:
    """What could be done with a stretch that would free memory."""
    if max(stretch.left, stretch.packed + 1) >= stretch.needed:
        return
    yield number, "offload"
    if stretch.small_bytes is not None and stretch.small_bytes < stretch.nbytes:
        yield number, "lossless"
    if stretch.rerun:
        yield number, "rerun"


def _price(stretch: Stretch, choice: Choice, link: Link) -> float:
    """Seconds for each byte that is freed, if nothing ran beside it."""
    if choice == "lossless":
        assert stretch.small_bytes is not None
        seconds, freed = stretch.squeeze_seconds + stretch.expand_seconds, stretch.nbytes - stretch.small_bytes
    elif choice == "rerun":
        seconds, freed = stretch.rerun_seconds, stretch.nbytes
    else:
        seconds = link.price(stretch.nbytes)
        freed = stretch.nbytes
    return seconds / max(1, freed)


def _first_of_each(moves: list[Move]) -> list[Move]:
    seen: set[int] = set()
    return [move for move in moves if not (move[0] in seen or seen.add(move[0]))]  # type: ignore[func-returns-value]


def with_pushes(recording: Recording, order: list[Move]) -> list[Move]:
    """What cannot leave itself, as the last resort: what left before it leaves for good when it follows."""
    moved = {number for number, _ in order}
    return order + [(number, "offload") for number in range(len(recording.stretches)) if number not in moved]
