"""Invented runs: histories filled as a recorder fills them, with numbers that look like training."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from retrograd.core.history.history import History
from retrograd.core.history.sink import Event, Moment, Phase, RowBatch
from retrograd.core.statistics.row import BINS, EXPONENT_BIAS, ROW

ELEMENTS = 4096


@dataclass
class Numbers:
    """What to tell of each site at each step; arrays of shape (sites, steps)."""

    sites: list[str]
    rms: np.ndarray
    mean: np.ndarray | float = 0.0
    reach: np.ndarray | float = 3.0  # largest magnitude over rms
    zero_share: np.ndarray | float = 0.0
    nan: np.ndarray | int = 0
    loss: np.ndarray | None = None
    every: int = 1
    bins: int = 16
    recorded: np.ndarray = field(default_factory=lambda: np.array(True))


def make_history(numbers: Numbers, *, phase: Phase = "train") -> History:
    """A history in memory, one batch of rows a step."""
    history = History()
    history.add_sites(numbers.sites)
    n_steps = numbers.rms.shape[1]
    rows = make_rows(numbers)
    shape = np.array(_bell(numbers.bins) * 2000, dtype=np.int64)
    bins = np.tile(shape, len(numbers.sites)).tobytes() if numbers.bins else b""
    everything = bool(np.all(numbers.recorded))
    kept = np.broadcast_to(numbers.recorded, numbers.rms.shape)
    for step in range(n_steps):
        moment = Moment(step * numbers.every, 0, 0, phase)
        chosen = rows[step] if everything else rows[step][kept[:, step]]
        some = bins if everything else np.tile(shape, len(chosen)).tobytes()
        history.add_rows(RowBatch(moment, chosen.tobytes(), some))
        if numbers.loss is not None:
            history.add_event(Event(moment, "loss", value=float(numbers.loss[step]), time=1.75e9 + 0.06 * step))
    return history


def make_rows(numbers: Numbers) -> np.ndarray:
    """Rows of shape (steps, sites), as the slab would drain them."""
    rms = numbers.rms.T
    rows = np.zeros(rms.shape, ROW)
    mean, reach, zeros, nan = (
        np.broadcast_to(values, numbers.rms.shape).T
        for values in (numbers.mean, numbers.reach, numbers.zero_share, numbers.nan)
    )
    n = ELEMENTS - nan
    rows["row"] = np.arange(len(numbers.sites))
    rows["calls"] = 1
    rows["count"] = ELEMENTS
    rows["nan"] = nan
    rows["zeros"] = np.rint(zeros * ELEMENTS)
    rows["sum"] = mean * n
    rows["m2"] = np.maximum(rms**2 - mean**2, 0) * n
    rows["abs_sum"] = 0.8 * rms * n
    rows["min"] = np.where(zeros > 0, 0.0, -reach * rms)
    rows["max"] = reach * rms
    updates = np.array([site.endswith(".update") for site in numbers.sites])
    rows["reference"] = np.where(updates, n * 0.05**2, 0.0)
    if numbers.bins:
        top = np.log2(np.where(rms > 0, rms, 1.0)).astype(int) + EXPONENT_BIAS + 2
        rows["first_bin"] = np.clip(top - numbers.bins, 0, BINS - numbers.bins)
        rows["bins"] = numbers.bins
    return rows


def _bell(n: int) -> np.ndarray:
    distance = np.arange(n) - 0.72 * n
    return np.exp(-0.5 * (distance / np.where(distance < 0, 0.22 * n, 0.1 * n)) ** 2) if n else np.empty(0)


def name_sites(paths: list[str]) -> list[str]:
    """Sites of modules as a recorder names them: outputs, and weights where the name sounds like it has some."""
    sites = []
    for path in paths:
        sites += [f"{path}:output", f"{path}:output.grad"]
        if any(word in path for word in ("conv", "fc", "head")):
            sites += [f"{path}:weight.grad", f"{path}:weight.update"]
    return sites


def name_resnet(blocks: int = 4) -> list[str]:
    """Modules of a small residual net, in call order."""
    inner = [
        path
        for i in range(blocks)
        for path in (*(f"blocks.{i}.{name}" for name in ("conv1", "bn1", "act1", "conv2", "bn2")), f"blocks.{i}")
    ]
    return ["stem.conv", "stem.bn", "stem.act", *inner, "pool", "head", "self"]


def invent_training(paths: list[str], n_steps: int, *, every: int = 1, bins: int = 16, seed: int = 0) -> Numbers:
    """Gradients shrink with time and grow with depth; activations named act die a little; two sites overflow once."""
    generator = np.random.default_rng(seed)
    sites = name_sites(paths)
    shape = (len(sites), n_steps)
    time = np.linspace(0.0, 1.0, n_steps)
    depth = np.array([paths.index(site.split(":")[0]) for site in sites]) / max(len(paths) - 1, 1)
    is_value = np.array([site.endswith(":output") for site in sites])
    is_update = np.array([site.endswith(".update") for site in sites])
    level = np.where(is_value, 0.9, np.where(is_update, 1.5e-5, 2e-3 * 10 ** (-1.6 * (1 - depth))))
    level = level * np.exp(0.3 * generator.standard_normal(len(sites)))
    drift = np.cumsum(generator.standard_normal(shape, dtype=np.float32) * 0.25 / np.sqrt(n_steps), axis=1)
    noise = generator.standard_normal(shape, dtype=np.float32) * 0.12
    decay = np.where(is_value, -0.2, 1.6)[:, None] * time
    rms = level[:, None] * np.exp(drift + noise - decay)
    dead = np.array(["act" in site for site in sites])[:, None]
    zero_share = np.where(dead, np.clip(0.42 + 0.12 * time + 0.02 * noise, 0, 1), 0.0)
    nan = np.zeros(shape, dtype=np.int64)
    start = int(n_steps * 0.62)
    for row, site in enumerate(sites):
        if site.endswith(":output.grad") and site.split(":")[0] in paths[1:3]:
            nan[row, start : start + max(2, n_steps // 200)] = 17
    loss = 2.3 * np.exp(-3.2 * time) + 0.12 + 0.06 * generator.standard_normal(n_steps) * np.exp(-time)
    return Numbers(
        sites,
        rms,
        0.4 * rms * noise,
        3.0 + generator.random(shape, dtype=np.float32),
        zero_share,
        nan,
        loss,
        every,
        bins,
    )
