"""Rows are put together by site and moment, and distances are those of numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import retrograd as rg
from retrograd.core.history.history import History
from retrograd.explaining.comparing.distance import FORMATS, UNKNOWN, Distances, Formats, Meter
from retrograd.explaining.comparing.pairs import Pairing, Pairs, plain_name, plain_names

NUMBERS = ("step", "micro", "backward", "phase", "sum", "m2", "abs_sum", "min", "max", "count")


def record(seed: int, steps: int = 4, dtype: torch.dtype = torch.float32, sites: str | None = None) -> History:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with rg.record(net, sites=sites) as recording:
        for step in range(steps):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            if step % 2 == 0:
                net(x).square().mean().backward()  # a second micro-batch
            optimizer.step()
            with torch.no_grad():
                net(x)
                net(x)
    return recording.history


def pair(a: History, b: History) -> Pairs:
    [pairs] = Pairing(a, b).in_spans()
    return pairs


def measure(pairs: Pairs) -> Distances:
    return Meter(pairs.names).measure(pairs)


def name_formats(history: History) -> dict[str, int]:
    pairs = pair(history, history)
    formats = Formats(pairs.names)
    formats.add(pairs)
    return dict(zip(pairs.names, formats.find((frozenset(), frozenset()))[0].tolist(), strict=True))


def test_each_row_has_its_partner_and_training_its_order() -> None:
    a, b = record(0), record(1)
    pairs = pair(a, b)
    assert len(pairs) == a.rows.count == b.rows.count
    for name in ("step", "micro", "backward", "phase"):
        one, other = pairs.columns(name)
        assert (one == other).all()
    for which, history in enumerate((a, b)):  # the numbers are those of the rows of that site and moment
        rows = history.rows
        told = zip(rows["site"].tolist(), *(rows[name].tolist() for name in NUMBERS), strict=True)
        found = zip(pairs.site.tolist(), *(pairs.column(name, which).tolist() for name in NUMBERS), strict=True)
        expected = Counter((history.site_names[code], *numbers) for code, *numbers in told)
        assert Counter((pairs.names[site], *numbers) for site, *numbers in found) == expected
    names = [pairs.names[site] for site in pairs.site]
    steps = pairs.of_a("step")
    assert (np.diff(steps) >= 0).all()
    first = [
        name for name, step, phase in zip(names, steps, pairs.of_a("phase"), strict=True) if step == 0 and phase == 0
    ]
    assert (
        first.index("0:output") < first.index("2:output") < first.index("2:output.grad") < first.index("0:output.grad")
    )
    assert first.index("0:weight.grad") < first.index("0:weight.update")


def test_only_what_both_have_is_paired() -> None:
    a, b = record(0, steps=4), record(0, steps=2, sites="0:*")
    pairs = pair(a, b)
    assert set(pairs.names) == set(a.sites) & set(b.sites)
    assert {"0:output", "0:weight.update"} <= set(pairs.names)
    shared = np.isin([b.site_names[code] for code in b.rows["site"]], pairs.names)
    assert len(pairs) == shared.sum()
    assert measure(pairs).is_same.all()
    assert pairs.missing_a == 0


def test_distances_are_those_of_numpy() -> None:
    a, b = record(0), record(1)
    pairs = pair(a, b)
    distances = measure(pairs)
    place = next(
        at for at in range(len(pairs)) if pairs.names[pairs.site[at]] == "0:output" and pairs.of_a("micro")[at] == 0
    )
    rows = [{name: float(pairs.column(name, which)[place]) for name in NUMBERS} for which in (0, 1)]
    means = [each["sum"] / each["count"] for each in rows]
    roots = [np.sqrt(each["m2"] / each["count"] + mean**2) for each, mean in zip(rows, means, strict=True)]
    sizes = [each["abs_sum"] / each["count"] for each in rows]
    ends = max(abs(rows[0][name] - rows[1][name]) for name in ("min", "max"))
    largest = max(abs(each[name]) for each in rows for name in ("min", "max"))
    wanted = max(*(abs(one - other) / max(roots) for one, other in (means, roots, sizes)), ends / largest)
    assert distances.own[place] == pytest.approx(wanted, rel=1e-12)
    assert distances.usual[place] <= distances.own[place]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_formats_are_told_by_the_numbers(dtype: torch.dtype) -> None:
    formats = name_formats(record(0, dtype=dtype)).items()
    found = {FORMATS[number].name for name, number in formats if name.endswith((":output", ":weight.grad"))}
    assert found == {str(dtype).removeprefix("torch.")}


def test_the_largest_so_far_is_that_of_numpy() -> None:
    pairs = pair(record(0), record(1))
    random = np.random.default_rng(0)
    before = random.random(len(pairs.names))
    values = random.random(len(pairs)) * random.choice([0.1, 1.0, 2.0], len(pairs))
    values[5] = np.nan
    found, after = values.copy(), before.copy()
    pairs.raise_by_site(found, after)
    for site in range(len(pairs.names)):
        of_site = pairs.site == site
        expected = np.maximum.accumulate(np.concatenate(([before[site]], values[of_site])))
        np.testing.assert_array_equal(found[of_site], expected[1:])
        np.testing.assert_array_equal(after[site], expected[-1])


def test_plain_numbers_tell_no_format() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU6())
    with rg.record(net) as recording:
        for _ in range(4):
            net(torch.full((1, 2), 1e4) * torch.tensor([1.0, -1.0])).sum().backward()
    formats = name_formats(recording.history)
    assert formats["1:output"] == UNKNOWN
    assert FORMATS[formats["0:output"]].name == "float32"


def test_names_of_compiled_models_and_of_first_calls() -> None:
    assert plain_name("_orig_mod.fc#1:output") == "fc:output"
    assert plain_name("cell#2:output") == "cell#2:output"
    assert plain_name("fc#12:output") == "fc#12:output"
    assert plain_names(["_orig_mod.fc:output", "a:output", "fc:output"]) == [
        "_orig_mod.fc:output",
        "a:output",
        "fc:output",
    ]
    assert plain_names(["_orig_mod.fc:output", "_orig_mod.a:output"]) == ["fc:output", "a:output"]


def test_a_rank_is_paired_with_itself_where_the_other_run_has_it() -> None:
    """A run with two ranks against one of which only the second has left rows."""
    one, other = record(0), record(1)

    def make(*ranks: History) -> History:
        joined = History(rank=1)
        parts = [
            {**{name: each.rows[name] for name in each.rows}, "rank": each.rows["rank"] * 0 + (each is other)}
            for each in ranks
        ]
        joined.load(one._names, parts, one.all_events, lambda site: [])
        return joined

    for pairs in (pair(make(one, other), make(other)), pair(make(other), make(one, other))):
        assert len(pairs) == other.rows.count
        assert measure(pairs).is_same.all()
    pairs = pair(make(one), make(other))  # two of a single rank each, whatever these are
    assert len(pairs) == one.rows.count
    assert not measure(pairs).is_same.all()
