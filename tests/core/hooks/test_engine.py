"""Which torch is refused, and that all who name the oldest name the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrograd.core.errors import TorchVersionError
from retrograd.core.hooks.engine import OLDEST, TORCH, check_torch, parse_version

ROOT = Path(__file__).parents[3]
OLDEST_TEXT = ".".join(map(str, OLDEST))


@pytest.mark.parametrize("version", ["2.10.1", "2.9", "1.13.1+cpu", "2.8.0a0+git12ab"])
def test_an_older_torch_is_refused(version: str) -> None:
    with pytest.raises(
        TorchVersionError, match=rf"torch {re.escape(version)}, and retrograd needs {OLDEST_TEXT}"
    ) as raised:
        check_torch(version)
    assert isinstance(raised.value, ImportError)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git12ab", "2.15.0+cu132", "3.0", torch.__version__])
def test_a_newer_one_is_not(version: str) -> None:
    check_torch(version)


def test_versions_are_compared_as_numbers() -> None:
    assert parse_version("2.9.1") < parse_version("2.11.0rc1+cpu") < parse_version("10.0")
    assert torch.__version__.startswith("{}.{}.".format(*TORCH))


def test_it_is_refused_at_import_and_errors_can_be_imported_all_the_same() -> None:
    code = """
import torch
torch.__version__ = "2.8.0"
from retrograd import RetrogradError
import retrograd as rg
for name in ("record", "walk", "trace", "rewrite", "take_inventory", "keep_saved", "check_adjoint", "extract"):
    try:
        getattr(rg, name)
    except ImportError as error:
        assert error.slug == "old-torch", name
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_all_name_the_same_oldest_torch() -> None:
    assert f'"torch>={OLDEST_TEXT}"' in (ROOT / "pyproject.toml").read_text()
    assert f"PyTorch {OLDEST_TEXT} or later" in (ROOT / "README.md").read_text()


def test_the_workflow_tests_the_oldest_the_pinned_and_the_newest_that_we_claim() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    oldest, newest = (parse_version(version) for version in re.findall(r'torch: "(.+)"', workflow))
    assert oldest == OLDEST
    claimed = re.search(r"tested with (\S+), (\S+) and (\S+)\)", (ROOT / "README.md").read_text())
    assert claimed is not None
    assert list(map(parse_version, claimed.groups())) == [oldest, parse_version(pinned[1]), newest]
