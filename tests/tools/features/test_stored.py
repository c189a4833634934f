from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retrograd.core.errors import FeatureError
from retrograd.tools.features.folder import write_manifest, write_shard
from retrograd.tools.features.stored import open_features

ROWS = 17
WHOLE = torch.randn(ROWS, 2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 rows in files of 5, 1, 0 and 11."""
    path = tmp_path_factory.mktemp("features")
    write_manifest(path, {"asked": {}, "features": {"a": {}, "b": {}}, "complete": True})
    first = 0
    for number, part in enumerate(WHOLE.split([5, 1, 0, 11])):
        write_shard(path, number, [{"a": part, "b": torch.arange(first, first + len(part))}])
        first += len(part)
    return path


integers = st.integers(-ROWS, ROWS - 1)
ends = st.none() | st.integers(-2 * ROWS, 2 * ROWS)
slices = st.builds(slice, ends, ends, st.none() | st.integers(-5, 5).filter(bool))
masks = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array)


@given(index=integers | slices | st.lists(integers) | masks)
def test_rows_are_those_that_numpy_gives(folder: Path, index: Any) -> None:
    feature = open_features(folder)["a"]
    found = feature[index]
    expected = WHOLE.numpy()[np.asarray(index, dtype=int) if isinstance(index, list) else index]
    assert isinstance(found, Tensor)
    assert found.shape == expected.shape
    assert np.array_equal(found.numpy(), expected)


def test_what_else_a_feature_is(folder: Path) -> None:
    features = open_features(folder)
    assert list(features) == ["a", "b"]
    assert features.samples == len(features["a"]) == ROWS
    assert features["a"].shape == WHOLE.shape
    assert features["a"].dtype is torch.float32
    assert torch.equal(torch.stack(list(features["a"])), WHOLE)
    assert np.array_equal(np.asarray(features["a"]), WHOLE.numpy())
    assert torch.equal(features["a"][torch.tensor([3, 1])], WHOLE[[3, 1]])
    assert torch.equal(features["a"][2:9, 1], WHOLE[2:9, 1])
    assert torch.equal(features["a"][7, 1, 2], WHOLE[7, 1, 2])
    batches = list(torch.utils.data.DataLoader(features["a"], batch_size=4))
    assert torch.equal(torch.cat(batches), WHOLE)
    assert "a: [17, 2, 3] torch.float32" in repr(features)


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, [0, ROWS], np.ones(3, bool)])
def test_rows_that_are_not_there(folder: Path, index: Any) -> None:
    with pytest.raises(IndexError):
        open_features(folder)["a"][index]


@pytest.mark.parametrize("index", ["a", 1.5, [1.5], [[1]], None])
def test_what_is_no_row(folder: Path, index: Any) -> None:
    with pytest.raises(TypeError):
        open_features(folder)["a"][index]


def test_only_the_rows_asked_for_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feature = open_features(folder)["a"]
    read: list[tuple[int, int]] = []
    kind = type(feature._shards[0])
    original = kind.read
    monkeypatch.setattr(kind, "read", lambda self, site, a, b: (read.append((a, b)), original(self, site, a, b))[1])
    feature[4:8]
    assert read == [(4, 5), (0, 1), (0, 2)]


def test_folders_that_hold_no_features(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FeatureError, match="holds no features"):
            open_features(path)


def test_damaged_folders(tmp_path: Path) -> None:
    def write() -> None:
        write_manifest(tmp_path, {"asked": {}, "features": {"a": {}}})
        for number in (0, 1, 2):
            write_shard(tmp_path, number, [{"a": torch.ones(2)}])

    write()
    (tmp_path / "batch-00000001.safetensors").unlink()
    with pytest.raises(FeatureError, match="from 1 to 1 are missing"):
        open_features(tmp_path)
    write()
    shard = tmp_path / "batch-00000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(FeatureError, match=r"batch-00000001\.safetensors. cannot be read"):
        open_features(tmp_path)
    write()
    features = open_features(tmp_path)
    shard.unlink()
    with pytest.raises(FeatureError, match="cannot be read"):
        features["a"][2:4]
    for text in ("{", '{"format": 99}', "[]"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(FeatureError, match="manifest"):
            open_features(tmp_path)
