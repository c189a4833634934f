import numpy as np
import pytest

from retrograd.core.history import histograms
from retrograd.core.history.histograms import Histograms


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_histograms_are_added_some_at_a_time(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(histograms, "_HISTOGRAMS_AT_ONCE", at_once)
    random = np.random.default_rng(0)
    sites, columns, n = 2, 3, 20
    lengths, first = random.integers(0, 6, n).astype(np.int32), random.integers(100, 140, n).astype(np.int16)
    cells, counts = random.integers(0, sites * columns, n), random.integers(1, 99, lengths.sum())
    expected = np.zeros((sites, columns, 255), np.int64)
    taken = iter(counts.tolist())
    for cell, begin, length in zip(cells, first, lengths, strict=True):
        for each in range(begin, begin + length):
            expected[cell // columns, cell % columns, each] += next(taken)
    found = Histograms(sites, columns)
    found.add({"bin_count": lengths, "first_bin": first, "bins": counts}, cells)
    for site in range(sites):
        np.testing.assert_array_equal(found.of_site(site), expected[site])
