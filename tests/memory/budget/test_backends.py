"""What a plan moves: a file, and a device whose copies come late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from retrograd.memory.budget.offloader import DiskBackend, HostBackend, measure_link
from retrograd.memory.policies.cuda_copies import CudaCopies
from retrograd.memory.policies.policy import Saved
from retrograd.memory.saved.keeping import keep_saved

CPU = torch.device("cpu")


def as_saved(values: torch.Tensor) -> Saved:
    return Saved(values, values.shape, "", 0)


def test_a_full_disk_leaves_memory_where_it_is(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="stay in memory"):
        backend = DiskBackend(tmp_path / "there" / "is" / "none", 1 << 20)
        assert backend.copy_out(as_saved(torch.randn(5000))) is None
    backend.close()


def test_the_link_is_measured_and_no_random_number_is_drawn(tmp_path: Path) -> None:
    backend = DiskBackend(tmp_path, 1 << 20)
    before = torch.get_rng_state()
    link = measure_link(backend, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert 1e5 < link.out < 1e12
    assert 1e5 < link.back < 1e12
    assert not any(tmp_path.iterdir())
    backend.close()


# ---- on a device ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_device_gives_back_what_it_was_given_and_its_link_is_measured() -> None:
    device = torch.device("cuda", 0)
    backend = HostBackend(CudaCopies(device))
    link = measure_link(backend, device)
    assert 1e8 < link.out < 2e12
    assert 1e8 < link.back < 2e12
    expected = [torch.randn(1_000_000, device=device) for _ in range(6)]
    loads = [backend.copy_out(as_saved(values.clone())) for values in expected]
    for load in loads:
        assert load is not None
        load.leave()
    for number in (5, 0, 4, 3):
        loads[number].fetch()  # type: ignore[union-attr]
    for number in (2, 5, 1, 0, 4, 3):  # two of them at once, while others are on their way
        assert torch.equal(loads[number].take(), expected[number])  # type: ignore[union-attr]
    del loads
    backend.close()


@pytest.mark.gpu
def test_a_budget_is_kept_on_a_device_where_nothing_is_waited_for_and_every_bit_is_the_same() -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(512, 512), nn.Tanh())]
    model, batch = nn.Sequential(*layers).cuda(), torch.randn(4096, 512, device="cuda")

    def gradients() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def find_peak() -> int:
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        gradients()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    expected = gradients()
    bare = find_peak()
    with keep_saved(None, budget=0.5) as handle:
        for _ in range(3):
            gradients()
        torch.cuda.set_sync_debug_mode("error")
        try:
            later = [gradients() for _ in range(2)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for found in later:
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        del later, found
        peak = find_peak()
        plan = handle.plan
    assert plan is not None
    assert plan.destination == "host"
    assert plan.kept_peak == 13 * batch.nbytes  # the batch, and what each tanh returns
    assert plan.predicted_peak <= plan.budget
    assert bare - peak > 0.3 * plan.kept_peak
