"""What launches compiled kernels, with a driver that notes what it is asked, on tensors of the CPU."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import pytest
import torch

_kernel = pytest.importorskip("retrograd.core.statistics._kernel")

ON_CPU = 1
U, P = ctypes.c_uint, ctypes.c_void_p
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, P, U, U, U, U, U, U, U, P, ctypes.POINTER(P), P)
FIND_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))


class Launched(NamedTuple):
    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    pointers: list[int]  # new, old, parts, bins
    n: int
    numbers: list[int]  # line, row, repeats
    scratch: list[int]


class Driver:
    """Stands for CUDA's: notes what is launched, and says which device is current."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.error, self.device, self.stream = 0, 0, 7
        self._callbacks = LAUNCH(self._launch), FIND_DEVICE(self._find_device)
        launch, find = (ctypes.cast(each, P).value for each in self._callbacks)
        self.launcher = _kernel.Launcher(ON_CPU, 0, lambda number: self.stream, launch, find)

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, shared, stream, values, _extra = rest
        words = [ctypes.cast(values[at], ctypes.POINTER(ctypes.c_uint64))[0] for at in (0, 1, 2, 3, 4, 8, 9)]
        numbers = [ctypes.cast(values[at], ctypes.POINTER(ctypes.c_int32))[0] for at in (5, 6, 7)]
        grid, block = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        found = Launched(function, grid, block, shared, stream, words[:4], words[4], numbers, words[5:])
        self.launched.append(found)
        return self.error

    def _find_device(self, number: Any) -> int:
        number[0] = self.device
        return 0


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    for size in (5, 16):
        driver.launcher.learn(torch.zeros(size), None, 100 + size, 128, 64)
        driver.launcher.learn(torch.zeros(size), torch.ones(size), 200 + size, 128, 64)
    return driver


def read(driver: Driver, new: torch.Tensor, old: torch.Tensor | None = None) -> int:
    found: int = driver.launcher.read(new, old, 1 << 40, 1 << 41, 30, 4, 6)
    return found


def test_a_kernel_gets_what_it_asks_for(driver: Driver) -> None:
    x = torch.randn(2, 5000)
    assert read(driver, x) == 3  # of 4,096 elements each
    (launched,) = driver.launched
    at = x.data_ptr()
    assert launched == Launched(
        116, (3, 1, 1), (128, 1, 1), 64, 7, [at, at, 1 << 40, 1 << 41], 10_000, [30, 4, 1], [0, 0]
    )


def test_no_more_programs_run_than_are_allowed(driver: Driver) -> None:
    assert read(driver, torch.zeros(100_000)) == 6


def test_an_update_has_both_sides(driver: Driver) -> None:
    new, old = torch.randn(3, 4), torch.randn(12)
    assert read(driver, new, old) == 1
    assert driver.launched[0].function == 205
    assert driver.launched[0].pointers[:2] == [new.data_ptr(), old.data_ptr()]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(12)[1:],  # not aligned, and no kernel for that is known
        torch.zeros(12, dtype=torch.float64),
        torch.zeros(12)[::2],
        torch.zeros(3, 4)[:, :2],
        torch.zeros(1).expand(5),
        torch.zeros(5, dtype=torch.complex64),
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.complex(torch.zeros(4), torch.ones(4)).conj().imag,
    ],
    ids=["unaligned", "kind", "strided", "gaps", "repeats", "complex", "sparse", "meta", "negative"],
)
def test_what_is_not_plain_is_left_to_others(driver: Driver, tensor: torch.Tensor) -> None:
    assert read(driver, tensor) == -1
    assert not driver.launched


def test_what_others_have_compiled_is_launched_from_then_on(driver: Driver) -> None:
    unaligned = torch.zeros(12)[1:]
    driver.launcher.learn(unaligned, None, 300, 128, 64)
    assert read(driver, unaligned) == 1
    assert read(driver, torch.zeros(12)) == 1
    assert [each.function for each in driver.launched] == [300, 105]


def test_numbers_of_elements_that_sixteen_divides_have_a_kernel_of_their_own(driver: Driver) -> None:
    for size in (32, 33):
        assert read(driver, torch.zeros(size)) == 1
    assert [each.function for each in driver.launched] == [116, 105]


def test_sides_of_different_alignment_are_left_to_others(driver: Driver) -> None:
    assert read(driver, torch.zeros(12)[1:], torch.zeros(11)) == -1
    driver.launcher.learn(torch.zeros(12)[1:], torch.zeros(11), 300, 128, 64)
    assert read(driver, torch.zeros(12)[1:], torch.zeros(11)) == -1


@pytest.mark.parametrize("old", [torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(12)[::2]])
def test_sides_that_do_not_fit_are_left_to_others(driver: Driver, old: torch.Tensor) -> None:
    assert read(driver, torch.zeros(6), old) == -1


def test_dimensions_in_another_order_are_dense_all_the_same(driver: Driver) -> None:
    x = torch.randn(6, 4)
    assert read(driver, x.t()) == 1
    assert driver.launched[0].pointers[0] == x.data_ptr()
    assert read(driver, x.t(), x.t().clone()) == -1  # of an update both would have to be in one order


def test_nothing_is_launched_for_no_elements(driver: Driver) -> None:
    assert read(driver, torch.zeros(0)) == 0
    assert not driver.launched


def test_another_current_device_is_left_to_others(driver: Driver) -> None:
    driver.device = 1
    assert read(driver, torch.zeros(5)) == -1
    assert not driver.launched


def test_a_launch_that_fails_is_left_to_others(driver: Driver) -> None:
    driver.error = 700
    assert read(driver, torch.zeros(5)) == -1


def test_streams_are_remembered_until_they_are_taken(driver: Driver) -> None:
    for driver.stream in (7, 9, 7):
        read(driver, torch.zeros(5))
    assert driver.launcher.take_streams() == [7, 9]
    assert driver.launcher.take_streams() == []
    found = []
    for driver.stream in range(9):
        found.append(read(driver, torch.zeros(5)))
    assert found == [1] * 8 + [-1]  # more than are remembered


def test_what_finds_the_stream_may_fail(driver: Driver) -> None:
    launcher = _kernel.Launcher(ON_CPU, 0, lambda number: 1 / 0, 1, ctypes.cast(driver._callbacks[1], P).value)
    launcher.learn(torch.zeros(5), None, 100, 128, 64)
    with pytest.raises(ZeroDivisionError):
        launcher.read(torch.zeros(5), None, 0, 0, 0, 0, 1)
