"""What a plan moves: a file, and a device whose copies come late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from retrograd.saved.carriers import DiskCarrier, HostCarrier
from retrograd.saved.link_speed import measure_link
from retrograd.saved.policy import Saved
from tests.saved.test_offloading import LateEngine

CPU = torch.device("cpu")


def as_saved(values: torch.Tensor) -> Saved:
    return Saved(values, values.shape, "", 0)


@pytest.mark.parametrize("is_fetched", [False, True])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_file_gives_back_what_it_was_given(is_written: bool, is_fetched: bool, tmp_path: Path) -> None:
    carrier = DiskCarrier(tmp_path, 1 << 20)
    values = torch.randn(10_000)
    load = carrier.carry_out(as_saved(values.clone()))
    assert load is not None
    if is_written:
        carrier.finish()
    load.leave()
    if is_fetched:
        load.fetch()
    load.want()
    assert torch.equal(load.take(), values)
    assert torch.equal(load.take(), values)  # a graph that is retained asks again
    carrier.close()
    assert torch.equal(load.take(), values)


def test_passes_end_so_that_the_order_does_not_grow(tmp_path: Path) -> None:
    carrier = DiskCarrier(tmp_path, 1 << 20)
    first = carrier.carry_out(as_saved(torch.randn(5000)))
    assert first is not None
    first.want()
    second = carrier.carry_out(as_saved(torch.randn(5000)))
    assert first._spilled.position.of is not second._spilled.position.of  # type: ignore[attr-defined, union-attr]
    carrier.close()


@pytest.mark.parametrize("is_fetched", [False, True])
def test_a_device_gives_back_what_it_was_given_however_late_it_copies(is_fetched: bool) -> None:
    carrier = HostCarrier(CPU, LateEngine())
    values = torch.randn(3000)
    load = carrier.carry_out(as_saved(values.clone()))
    other = carrier.carry_out(as_saved(values * 2))
    assert load is not None
    assert other is not None
    load.leave()
    if is_fetched:
        load.fetch()
    load.want()
    assert torch.equal(load.take(), values)
    other.want()
    assert torch.equal(other.take(), values * 2)  # it had not left
    carrier.close()


def test_a_full_disk_leaves_memory_where_it_is(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="stay in memory"):
        carrier = DiskCarrier(tmp_path / "there" / "is" / "none", 1 << 20)
        assert carrier.carry_out(as_saved(torch.randn(5000))) is None
    carrier.close()


def test_the_link_is_measured_and_no_random_number_is_drawn(tmp_path: Path) -> None:
    carrier = DiskCarrier(tmp_path, 1 << 20)
    before = torch.get_rng_state()
    link = measure_link(carrier, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert 1e5 < link.out < 1e12
    assert 1e5 < link.back < 1e12
    assert not any(tmp_path.iterdir())
    carrier.close()
