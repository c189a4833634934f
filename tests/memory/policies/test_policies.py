"""The contract, for every policy of the package, and what each of them promises beyond it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from retrograd.memory.policies.cpu import Cpu
from retrograd.memory.policies.disk import Disk
from retrograd.memory.policies.lossless import Lossless
from retrograd.memory.policies.policy import AsIs, Packed, Policy, Saved
from retrograd.memory.policies.precision import Bfloat16, EightBit
from retrograd.memory.policies.when import When
from retrograd.testing.policy_tests import PolicyTests


class TestKeep(PolicyTests):
    def make_policy(self) -> Policy:
        return AsIs()


class TestCpu(PolicyTests):
    def make_policy(self) -> Policy:
        return Cpu()


@pytest.mark.gpu
class TestCpuOnDevice(PolicyTests):
    device = torch.device("cuda")

    def make_policy(self) -> Policy:
        return Cpu(window=1 << 20, min_bytes=1 << 10)


@pytest.mark.gpu
class TestDiskOnDevice(PolicyTests):
    device = torch.device("cuda")

    def make_policy(self) -> Policy:
        return Disk(min_bytes=1 << 10)


class Written(Disk):
    """Each tensor is on the disk before it is asked for."""

    def pack(self, saved: Saved) -> Packed | None:
        packed = super().pack(saved)
        self.flush()
        return packed


class TestDisk(PolicyTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_policy(self) -> Policy:
        return Written(self.folder, min_bytes=1 << 10)


class TestLossless(PolicyTests):
    def make_policy(self) -> Policy:
        return Lossless(min_bytes=1 << 10)


class TestBfloat16(PolicyTests):
    largest_error = 0.02

    def make_policy(self) -> Policy:
        return Bfloat16()


class TestEightBit(PolicyTests):
    largest_error = 0.15

    def make_policy(self) -> Policy:
        return EightBit()


class TestWhen(PolicyTests):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_policy(self) -> Policy:
        return When(Disk(self.folder), dtypes=[torch.float32], otherwise=Lossless())
