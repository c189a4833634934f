"""However a tensor is split into calls, micro-batches and ranks, what is read is what numpy says of all of it.

The same values are read from parts in memory, from a folder, from one that is read window by window, and from its
compacted copies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from retrograd.core.history.copies import Copies, join_groups
from retrograd.core.history.events import Events
from retrograd.core.history.history import History
from retrograd.core.history.names import SiteNames
from retrograd.core.history.rows import decode_batches
from retrograd.core.history.sink import Moment, RowBatch
from retrograd.core.limits import LIMITS
from retrograd.core.runs.compaction import compact
from retrograd.core.runs.reader import open_run
from retrograd.core.runs.writer import RunWriter
from tests.core.history.made import count_exponents, make_batch

NAMES = ["fc:output", "fc#2:output", "fc#3:output", "fc:weight.grad", "fc:weight.update"]
SITES = {"fc:output": NAMES[:3], "fc:weight.grad": NAMES[3:4], "fc:weight.update": NAMES[4:5]}
OWN = {"low": "min", "high": "max", "total": "sum", "middle": "mean"}
"""Statistics of the user's, and how they merge."""

few = st.integers(1, 3)


@dataclass(repr=False)
class Split:
    """A run of some ranks, and by site and step all elements, and all values of the user's statistics."""

    batches: list[list[tuple[RowBatch, bool]]]
    """Of each rank, each with whether it is written at once."""
    holders: dict[str, list[list[int]]]
    """For each site, and for each rank, all ranks that hold the same."""
    elements: dict[tuple[str, int], list[np.ndarray]] = field(default_factory=dict)
    own: dict[tuple[str, int], list[float]] = field(default_factory=dict)


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Of each site ranks hold parts, or groups of them hold copies of one."""
    ranks, random = draw(few), np.random.default_rng(draw(st.integers(0, 1 << 16)))
    holders = {}
    for name in NAMES:
        group_of = [draw(st.integers(0, ranks - 1)) for _ in range(ranks)]
        holders[name] = [[other for other in range(ranks) if group_of[other] == group] for group in group_of]
    split = Split([[] for _ in range(ranks)], holders)
    for step, micros in enumerate(draw(st.lists(few, min_size=1, max_size=3))):
        for micro in range(micros):
            scale = draw(st.sampled_from([1.0, 1024.0]))
            drawn: dict[tuple[str, int], tuple[np.ndarray, float | None]] = {}
            for rank in range(ranks):
                held = {}
                for name in NAMES:
                    part = name, holders[name][rank][0]
                    if part not in drawn:
                        drawn[part] = _draw_elements(random), random.choice([None, *np.arange(-9.0, 9.0)])
                        key = next(site for site, names in SITES.items() if name in names), step
                        split.elements.setdefault(key, []).append(drawn[part][0])
                        split.own.setdefault(key, []).extend(v for v in drawn[part][1:] if v is not None)
                    held[name] = drawn[part]
                split.batches[rank].append((_make(Moment(step, micro, 0), held, scale), draw(st.booleans())))
    return split


def _draw_elements(random: np.random.Generator) -> np.ndarray:
    """Up to five numbers of any size, some of them zero or not finite."""
    x = random.standard_normal(random.integers(0, 6)) * 10.0 ** random.integers(-30, 5)
    odd = random.random(len(x)) < 0.3
    x[odd] = random.choice([0.0, -0.0, np.nan, np.inf, -np.inf], odd.sum())
    return x.astype(np.float32).astype(np.float64)


def _make(moment: Moment, held: dict[str, tuple[np.ndarray, float | None]], scale: float) -> RowBatch:
    factors = {name: scale if name.endswith(".grad") else 1.0 for name in held}
    elements = {NAMES.index(name): values * factors[name] for name, (values, _) in held.items()}
    given = {NAMES.index(name): value for name, (_, value) in held.items() if value is not None}
    own = {name: (list(given), list(given.values())) for name in OWN} if given else {}
    return make_batch(moment, elements, scale=scale, custom=own)


def hold(split: Split) -> History:
    """All of it in memory."""
    names = SiteNames()
    names.add_rows(NAMES)
    parts = [
        decode_batches([batch for batch, _ in batches], names.gradients, rank)
        for rank, batches in enumerate(split.batches)
    ]
    groups = {code: join_groups(split.holders[name]) for code, name in enumerate(NAMES)}
    history = History()
    history.describe(statistics=OWN)
    history.load(names, parts, Events(), lambda site: [], Copies(groups, dict(enumerate(NAMES))))
    return history


def write(split: Split, path: Path, patch: pytest.MonkeyPatch) -> Path:
    for rank, batches in enumerate(split.batches):
        patch.setenv("RANK", str(rank))
        writer = RunWriter(path, join=True, flush_seconds=1e6)
        writer.add_sites(NAMES)
        holds = {name: {"holds": "copy", "ranks": ranks[rank]} for name, ranks in split.holders.items()}
        writer.describe(placements={"stages": {}, "sites": holds}, statistics=OWN)
        for batch, is_written in batches:
            writer.add_rows(batch)
            if is_written:
                writer.flush()
        writer.close()
    return path


def read_everywhere(split: Split) -> Iterator[tuple[str, History]]:
    yield "memory", hold(split)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = write(split, Path(folder) / "run", patch)
        yield "folder", open_run(run).history
        with pytest.MonkeyPatch.context() as small:
            small.setattr(LIMITS, "held_rows", 0)
            yield "in one window", open_run(run).history
            small.setattr(LIMITS, "merged_cells", 4)
            small.setattr(LIMITS, "cells_at_once", 4)
            small.setattr(LIMITS, "histograms_at_once", 2)
            yield "in windows", open_run(run).history
        patch.setattr(LIMITS, "compacted_cells", 8)
        compact(run, keep_ranks=True)
        yield "compacted, ranks apart", open_run(run).history
        compact(run)
        yield "compacted", open_run(run).history


@settings(
    deadline=None, max_examples=10, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(splits())
def test_any_split_merges_to_what_numpy_says(split: Split) -> None:
    for where, history in read_everywhere(split):
        for site in SITES:
            series = history[site]
            steps = sorted(step for name, step in split.elements if name == site)
            assert series.steps.tolist() == steps, where
            _, bins = series.exponents
            [together] = history.add_exponents([site], "train", lambda steps: steps % 2, 2)
            matrix = {name: history.matrix(name, [site]).values[0] for name in ("mean", "count", "rms")}
            told = {name: series.statistic(name) for name in (*DESCRIBED, *(OWN if any(split.own.values()) else ()))}
            expected_bins = np.zeros((2, 255), np.int64)
            for at, step in enumerate(steps):
                x = np.concatenate(split.elements[site, step])
                for name, (value, tolerance) in describe(x).items():
                    np.testing.assert_allclose(
                        told[name][at], value, rtol=1e-9, atol=tolerance, err_msg=f"{where}: {name}"
                    )
                    if name in matrix:
                        np.testing.assert_allclose(matrix[name][at], value, rtol=1e-9, atol=tolerance, err_msg=where)
                np.testing.assert_array_equal(bins[at], count_exponents(x), err_msg=where)
                expected_bins[step % 2] += count_exponents(x)
                for name, how in OWN.items() if "low" in told else ():
                    values = np.array(split.own[site, step] or [np.nan])
                    expected = getattr(np, how)(values)
                    np.testing.assert_allclose(told[name][at], expected, rtol=1e-12, err_msg=f"{where}: {name}")
            np.testing.assert_array_equal(together, expected_bins, err_msg=where)
        assert history.disagreements == [], where


DESCRIBED = (
    "count", "nan", "pos_inf", "neg_inf", "zeros", "nonfinite",
    "mean", "std", "rms", "l1", "l2", "min", "max", "abs_max",
)  # fmt: skip


def describe(x: np.ndarray) -> dict[str, tuple[float, float]]:
    """Each statistic of all elements, and how far off it may be."""
    finite = x[np.isfinite(x)]
    size = float(np.abs(finite).max(initial=0.0))
    counts = {
        "count": len(x),
        "nan": np.isnan(x).sum(),
        "pos_inf": np.isposinf(x).sum(),
        "neg_inf": np.isneginf(x).sum(),
        "zeros": (x == 0).sum(),
        "nonfinite": len(x) - len(finite),
        "l1": np.abs(finite).sum(),
        "l2": np.linalg.norm(finite) if len(finite) else 0.0,
    }
    some: dict[str, float] = dict.fromkeys(("mean", "std", "rms", "min", "max", "abs_max"), np.nan)
    if len(finite):
        some = {
            "mean": finite.mean(),
            "std": finite.std(),
            "rms": np.sqrt((finite**2).mean()),
            "min": finite.min(),
            "max": finite.max(),
            "abs_max": size,
        }
    return {name: (value, 1e-7 * size if name == "std" else 1e-12 * size) for name, value in {**counts, **some}.items()}
