"""What the optimizers were told: rates and their schedule, decay, clipping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrograd.core.amounts import count_of, list_names
from retrograd.core.history.facts import OptimizerMade, SettingChanged
from retrograd.core.runs.findings import shorten_line
from retrograd.explaining.card.card import CardEntry
from retrograd.explaining.card.words import name_subtrees, show, show_change
from retrograd.explaining.findings.record import Record
from retrograd.explaining.findings.training import is_number
from retrograd.explaining.findings.updates import CLIPS, Update, by_optimizer

_USUAL = {
    "betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0, "dampening": 0, "nesterov": False, "amsgrad": False,
    "maximize": False, "alpha": 0.99, "centered": False,
}  # fmt: skip
"""Settings that are said where they are not as most optimizers of torch take them."""


Courses = Mapping[tuple[int, str], Sequence[float]]
"""Group and name of a setting that changes → the first number, extremes between, and the last."""


def describe_optimizers(record: Record) -> Iterator[CardEntry]:
    """The optimizers, that with most updates first."""
    updates, every = by_optimizer(record.updates), list(record.last_looks)
    first: dict[str, OptimizerMade] = {}
    for made in record.of(OptimizerMade):
        first.setdefault(made.name, made)
    found = [_describe(record, made, updates.get(name, []), every) for name, made in first.items()]
    yield from sorted(found, key=lambda each: -each.values["updates"])


def _describe(record: Record, made: OptimizerMade, updates: Sequence[Update], every: list[str]) -> CardEntry:
    done = [update for update in updates if update.call.name == "step"]
    skipped, rates = len(updates) - len(done), [list(update.call.details.get("lr") or ()) for update in done]
    courses = {(each.group, each.setting): each.course for each in record.of(SettingChanged) if each.name == made.name}
    groups = [_describe_group(group, place, rates, every, courses) for place, group in enumerate(made.groups)]
    schedulers = Counter((call.about, call.line) for call in record.called("scheduler.step"))
    first = made.groups[0] if made.groups else {}
    settings = {
        name: first[name]
        for name, usual in _USUAL.items()
        if name in first and (show(first[name]) != show(usual) or any(_is_of(name, at) for at in courses))
    }
    of_first = np.array([each[0] for each in rates if each], float)
    shape = describe_shape(of_first) if np.isfinite(of_first).all() else ""
    clipping = _find_clipping(done)
    alone = len(record.optimizers) == 1  # of several, nothing tells whose a scheduler is
    skips = f" and {skipped:,} skipped by loss scaling" if skipped else ""
    by = (
        f"; {', '.join(dict.fromkeys(name for name, _ in schedulers))}"
        if schedulers and (alone or shape != "constant")
        else ""
    )
    told = list(dict.fromkeys(show_change(each["lr"]) for each in groups if each["lr"]))
    said = [
        f"{count_of(len(done), 'update')}{skips}" if updates else "no update",
        f"lr {list_names(told, 2)}{f' ({shape}{by})' if shape else ''}" if told else "",
        _tell_decay(groups),
        *(f"{name} {_show_course(name, value, courses)}" for name, value in settings.items()),
        _tell_clipping(clipping) if updates else "",
    ]
    models = list(dict.fromkeys(record.model_of(name) for name in made.parameters))
    return CardEntry(
        topic="optimizer",
        label=f"{made.name} of {list_names(models, 2)}" if models and len(record.models) > 1 else made.name,
        text=", ".join(filter(None, said)),
        line=made.line,
        details=(
            *(_list_group(each) for each in groups if len(groups) > 1),
            *(f"{name}: stepped {count_of(n, 'time')} ({shorten_line(at)})" for (name, at), n in schedulers.items()),
            *([_list_norms(clipping)] if clipping.get("median") is not None else []),
        ),
        values={
            "name": made.name, "type": made.type, "updates": len(done), "skipped": skipped, "groups": groups,
            "shape": shape, "settings": settings, "clipping": clipping,
            "changing": {name: course for (group, name), course in courses.items() if group == 0},
            "schedulers": [{"name": name, "line": at, "steps": n} for (name, at), n in schedulers.items()],
        },
    )  # fmt: skip


def _describe_group(
    group: Mapping[str, Any], place: int, rates: Sequence[Sequence[float]], every: list[str], courses: Courses
) -> dict[str, Any]:
    """Parameters, the first learning rate, the highest, and the last, and the decay of a group."""
    mine = [each[place] for each in rates if len(each) > place] or ([group["lr"]] if is_number(group.get("lr")) else [])
    ends = [mine[0], max(mine), mine[-1]] if mine else []
    names = list(map(str, group.get("parameters", ())))
    return {
        "tensors": len(names) + int(group.get("unknown", 0)),
        "of": name_subtrees(names, every),
        "lr": [ends[0], ends[2]] if ends and ends[1] == max(ends[0], ends[2]) else ends,
        "weight_decay": group["weight_decay"] if is_number(group.get("weight_decay")) else None,
        "decays": courses.get((place, "weight_decay")) or [group.get("weight_decay")],
    }


def _is_of(name: str, at: tuple[int, str]) -> bool:
    return at[0] == 0 and at[1].partition(".")[0] == name


def _show_course(name: str, value: Any, courses: Courses) -> str:
    """A setting of the first group; how it goes where it changes."""
    if isinstance(value, list | tuple):
        each = (_show_course(f"{name}.{place}", one, courses) for place, one in enumerate(value))
        return f"({', '.join(each)})"
    return show_change(courses[0, name]) if (0, name) in courses else show(value)


def _list_group(group: Mapping[str, Any]) -> str:
    decay = "" if group["weight_decay"] is None else f", weight decay {show_change(group['decays'])}"
    return (
        f"{count_of(group['tensors'], 'tensor')}, lr {show_change(group['lr'])}{decay}: {list_names(group['of'], 12)}"
    )


def _tell_decay(groups: Sequence[Mapping[str, Any]]) -> str:
    known = [each for each in groups if each["weight_decay"] is not None]
    decayed = [each for each in known if any(each["decays"])]
    if not decayed:
        return "no weight decay" if known else ""
    total, held = (sum(each["tensors"] for each in some) for some in (known, decayed))
    which = "" if held == total else f" of {held:,} of {count_of(total, 'tensor')}"
    return f"weight decay {list_names(list(dict.fromkeys(show_change(each['decays']) for each in decayed)))}{which}"


def _find_clipping(updates: Sequence[Update]) -> dict[str, Any]:
    """The clipping before each update; empty where there was none."""
    calls = [clips[-1] for update in updates if (clips := update.named(*CLIPS))]
    if not calls:
        return {}
    limits = np.array([call.details.get("max_norm", call.details.get("clip_value")) for call in calls], float)
    norms = np.array([call.value for call in calls], float)
    finite = norms[np.isfinite(norms)]
    return {
        "function": calls[-1].name, "line": calls[-1].line, "calls": len(calls), "limit": float(limits[-1]),
        "acted": int((norms > limits).sum()) if len(finite) else None,
        "median": float(np.median(finite)) if len(finite) else None,
        "largest": float(finite.max()) if len(finite) else None,
    }  # fmt: skip


def _tell_clipping(clipping: Mapping[str, Any]) -> str:
    if not clipping:
        return "no clipping"
    what = f"clips {'norms' if clipping['function'] == 'clip_grad_norm_' else 'values'} to {show(clipping['limit'])}"
    acted = clipping["acted"]
    return what if acted is None else f"{what}, which acted in {acted:,} of {clipping['calls']:,}"


def _list_norms(clipping: Mapping[str, Any]) -> str:
    norms = f"norms before it: median {show(clipping['median'])}, largest {show(clipping['largest'])}"
    return f"{clipping['function']} ({shorten_line(clipping['line'])}): {norms}"


FloatArray = npt.NDArray[np.float64]

NEAR = 0.01
"""How far a rate may be from a shape, as a share of the range: the figures on a card have so many digits."""

FEWEST = 6
"""Different rates that make a shape; of fewer each is said."""


def describe_shape(rates: FloatArray) -> str:
    """The shape of the learning rates of all updates: ``rises over 20 updates (linear), then falls as a cosine``.

    Args:
        rates: finite, one for each update.
    """
    if len(rates) < 2 or np.ptp(rates) <= 1e-9 * rates.max():
        return "constant"
    top = int(rates.argmax())
    rise = rates[: top + 1]
    if top and (np.diff(rise) < -1e-12).any():
        return f"goes up and down between {show(rates.min())} and {show(rates.max())}"
    said = [f"rises over {count_of(top, 'update')}{_tell_rise(rise)}"] if top else []
    rest = rates[top:]
    if len(rest) > 1:
        said.append(_describe_rest(rest))
    return ", then ".join(said)


def _tell_rise(rise: FloatArray) -> str:
    if len(rise) < FEWEST:
        return ""
    line = np.linspace(rise[0], rise[-1], len(rise))
    return " in a line" if _is_near(rise, line) else ""


def _describe_rest(rates: FloatArray) -> str:
    """The shape of rates that begin with the highest."""
    changes = np.flatnonzero(np.diff(rates)) + 1
    if not len(changes):
        return "constant"
    if (np.diff(rates) > 1e-12).any():
        return f"goes up and down between {show(rates.min())} and {show(rates.max())}"
    starts = np.array([0, *changes])
    gaps, ratios = np.diff(starts), rates[starts[1:]] / rates[starts[:-1]]
    if len(changes) > 1 and gaps[0] > 1 and (gaps == gaps[0]).all() and np.ptp(ratios) <= 1e-6:
        return f"falls by ×{ratios[0]:.4g} every {gaps[0]:,} updates"
    if len(changes) < FEWEST - 1:
        places = ", ".join(f"to {show(rates[place])} after {place:,}" for place in changes[:3])
        return f"falls in {count_of(len(changes), 'step')} ({places}{', …' if len(changes) > 3 else ''})"
    pace = f", every {gaps[0]:,} updates" if gaps[0] > 1 and (gaps == gaps[0]).all() else ""
    return f"falls{_find_fall(starts, rates[starts])}{pace}"


def _find_fall(places: npt.NDArray[np.int64], rates: FloatArray) -> str:
    share = places / places[-1]
    high, low = rates[0], rates[-1]
    fits: list[tuple[str, Callable[[], FloatArray]]] = [
        (" in a line", lambda: high + (low - high) * share),
        (" as a cosine", lambda: low + (high - low) * (1 + np.cos(np.pi * share)) / 2),
        (" as a cosine, not yet at its end", lambda: high * (1 + np.cos(np.arccos(2 * low / high - 1) * share)) / 2),
    ]
    if low > 0:
        factor = (low / high) ** (1 / (len(rates) - 1))
        fits.append((f" by ×{factor:.4g} each time", lambda: high * (low / high) ** share))
        fits.append((" as 1/√step", lambda: 1 / np.sqrt(high**-2 + (low**-2 - high**-2) * share)))
    return next((words for words, curve in fits if _is_near(rates, curve())), "")


def _is_near(rates: FloatArray, curve: FloatArray) -> bool:
    return bool(np.abs(rates - curve).max() <= NEAR * np.ptp(rates))
