from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from retrograd.core import files
from retrograd.core.errors import FeatureError, NoSuchSiteError, RetrogradWarning
from retrograd.core.limits import LIMITS
from retrograd.core.runs.lock import Lock
from retrograd.tools.features.dataset import extract_dataset
from retrograd.tools.features.stored import StoredFeatures, open_features
from tests import warm
from tests.tools.features.nets import hook_by_hand

SAMPLES = 23
X = torch.randn(SAMPLES, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)).eval()


def make_loader(batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch_size, **options)


def by_hand(model: nn.Module, path: str, batch_size: int = 4) -> Tensor:
    return torch.cat([hook_by_hand(model, path, part) for part in X.split(batch_size)])


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "shard_bytes", 2200)


def test_features_are_those_of_hooks_by_hand(tmp_path: Path, small_shards: None) -> None:
    model = make_model()
    features = extract_dataset(model, make_loader(), ["0", "3:input.input"], tmp_path / "a" / "b", target=1)
    assert list(features) == ["0", "3:input.input", "target"]
    assert torch.equal(features["0"][:], by_hand(model, "0"))
    assert torch.equal(features["3:input.input"][:], by_hand(model, "2"))
    assert torch.equal(features["target"][:], Y)
    assert features.is_complete
    assert features.samples == SAMPLES
    assert len(list(features.folder.glob("*.safetensors"))) > 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_folder_is_plain_data(tmp_path: Path, small_shards: None) -> None:
    extract_dataset(make_model(), make_loader(), "0", tmp_path, pool="mean", dtype="float16", target=1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["features"]["0"] == {"shape": [4], "dtype": "float16"}
    assert (manifest["samples"], manifest["batches"], manifest["complete"]) == (SAMPLES, 6, True)
    assert (manifest["asked"]["sites"], manifest["asked"]["pool"]) == (["0"], "mean")
    parts = [safetensors.torch.load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert torch.equal(torch.cat([part["0"] for part in parts]), by_hand(make_model(), "0").mean((2, 3)).half())


class Dicts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": X[index], "label": Y[index]}


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (X.split(4), {}),
        ([(x, "names") for x in X.split(4)], {}),
        (DataLoader(Dicts(), 4), {"target": "label"}),
        (DataLoader(Dicts(), 4), {"inputs": "input"}),
        (DataLoader(Dicts(), 4), {"inputs": lambda item: (item["input"],), "target": lambda item: item["label"]}),
        ([(0, x) for x in X.split(4)], {"inputs": 1}),
        (make_loader(num_workers=2, multiprocessing_context="fork"), {"device": "cpu"}),
    ],
)
def test_what_loaders_yield(tmp_path: Path, loader: Any, options: dict[str, Any]) -> None:
    features = extract_dataset(make_model(), loader, "3", tmp_path, **options)
    assert torch.equal(features["3"][:], by_hand(make_model(), "3"))
    if "target" in options:
        assert torch.equal(features["target"][:], Y)


def test_a_site_of_many_forms_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LSTM(6, 4, batch_first=True))
    loader = X.reshape(SAMPLES, 6, 6).split(4)
    with pytest.raises(FeatureError, match=r"0\.0, 0\.1\.0, 0\.1\.1"):
        extract_dataset(model, loader, "0", tmp_path)
    with pytest.raises(FeatureError, match=r"\[1, 4, 4\], and the batch has 4 samples"):
        extract_dataset(model, loader, "0:output.1.0", tmp_path)
    features = extract_dataset(model, loader, "0:output.*", tmp_path, pool=first_or_swapped)
    assert features["0:output.1.0"].shape == (SAMPLES, 1, 4)


def first_or_swapped(value: Tensor) -> Tensor:
    return value.transpose(0, 1) if value.shape[0] == 1 else value


def test_the_same_call_again_goes_on(tmp_path: Path, small_shards: None) -> None:
    model, loaded = make_model(), []

    def load(until: int) -> Iterator[Tensor]:
        for number, part in enumerate(X.split(4)):
            if number == until:
                raise OSError("the network is gone")
            loaded.append(number)
            yield part

    for until in (3, 5):
        with pytest.raises(OSError, match="network"):
            extract_dataset(model, load(until), "0", tmp_path)
        features = open_features(tmp_path)
        assert not features.is_complete
        assert torch.equal(features["0"][:], by_hand(model, "0")[: 4 * until])
    assert torch.equal(extract_dataset(model, load(99), "0", tmp_path)["0"][:], by_hand(model, "0"))


class Rows(Dataset[tuple[Tensor, int]]):
    """Cannot be read at one place, for as long as that is one."""

    fails_at = 13

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.fails_at:
            raise OSError("unreadable")
        self.loaded.append(index)
        return X[index], index


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_data_loader_goes_on_in_its_order_and_a_plain_one_loads_nothing_again(
    shuffles: bool, tmp_path: Path, small_shards: None
) -> None:
    model, rows = make_model(), Rows()

    def extract() -> StoredFeatures:
        loader = DataLoader(rows, 4, shuffle=shuffles, generator=torch.Generator().manual_seed(3))
        return extract_dataset(model, loader, "0", tmp_path, target=1, allow_shuffle=shuffles)

    with pytest.raises(OSError, match="unreadable"):
        extract()
    assert 0 < open_features(tmp_path).samples < SAMPLES
    rows.loaded, rows.fails_at = [], -1
    features = extract()
    order = features["target"][:]
    if shuffles:
        generator = torch.Generator().manual_seed(3)
        expected = torch.cat([part for _, part in DataLoader(rows, 4, shuffle=True, generator=generator)])
        assert torch.equal(order, expected)
    else:
        assert rows.loaded == list(range(12, SAMPLES))
        assert torch.equal(order, torch.arange(SAMPLES))
    torch.testing.assert_close(features["0"][:], by_hand(model, "0")[order])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sites": ["0", "1"]}, "sites"),
        ({"pool": "max"}, "pool None there, 'max' now"),
        ({"dtype": torch.bfloat16}, "dtype"),
        ({"target": 1}, "target"),
        ({"loader": make_loader(8)}, "batches 6 there, 3 now; batch_size 4 there, 8 now"),
        ({"model": make_model().double()}, "model"),
    ],
)
def test_other_arguments_are_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": make_model(), "loader": make_loader(), "sites": "0", "folder": tmp_path}
    extract_dataset(**arguments)
    with pytest.raises(FeatureError, match=said):
        extract_dataset(**{**arguments, **change})
    assert extract_dataset(**arguments).is_complete


def test_another_state_of_the_model_is_refused(tmp_path: Path) -> None:
    model = make_model()
    extract_dataset(model, make_loader(), "0", tmp_path)
    with torch.no_grad():
        model[3].weight.mul_(1.01)
    with pytest.raises(FeatureError, match="other arguments: model"):
        extract_dataset(model, make_loader(), "0", tmp_path)


def test_a_first_try_that_failed_is_no_obstacle(tmp_path: Path) -> None:
    model = make_model()
    with pytest.raises(NoSuchSiteError):
        extract_dataset(model, make_loader(), "9", tmp_path)
    with pytest.raises(ZeroDivisionError) as raised:
        extract_dataset(model, make_loader(), "0", tmp_path, pool=lambda value: 1 / 0)
    assert raised.value.__notes__ == ["while the feature '0' was read"]
    assert extract_dataset(model, make_loader(), "0", tmp_path).is_complete


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FeatureError, match=r"thesis\.tex"):
        extract_dataset(make_model(), make_loader(), "0", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FeatureError, match="cannot be written"):
        extract_dataset(make_model(), make_loader(), "0", tmp_path / "file")


def test_shuffled_loaders_are_refused(tmp_path: Path) -> None:
    model = make_model()
    for loader in (make_loader(shuffle=True), make_loader(sampler=RandomSampler(X))):
        with pytest.raises(FeatureError, match="RandomSampler"):
            extract_dataset(model, loader, "0", tmp_path)
    seeded = make_loader(shuffle=True, generator=torch.Generator().manual_seed(3))
    features = extract_dataset(model, seeded, "0", tmp_path, target=1, allow_shuffle=True)
    order = features["target"][:]
    assert sorted(order.tolist()) == list(range(SAMPLES))
    assert order.tolist() != list(range(SAMPLES))
    torch.testing.assert_close(features["0"][:], by_hand(model, "0")[order])


def test_a_feature_that_is_there_now_and_then_is_refused(tmp_path: Path) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x) if x.sum() > 0 else x

    for number, signs in enumerate([(1, -1), (-1, 1)]):
        loader = [sign * torch.ones(2, 3) for sign in signs]
        with pytest.raises(FeatureError, match=r"'second' is .*missing"):
            extract_dataset(Sometimes(), loader, "*", tmp_path / str(number))


def test_rows_of_differing_length_are_refused(tmp_path: Path) -> None:
    loader = [torch.ones(2, 3, 4), torch.ones(2, 5, 4)]
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(FeatureError, match=r"\[5, 4\] float32 a sample in this batch, and was \[3, 4\] float32 a"):
        extract_dataset(model, loader, "0", tmp_path / "a")
    assert extract_dataset(model, loader, "0", tmp_path / "b", pool="mean")["0"].shape == (4, 4)


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, loader = nn.Sequential(nn.Identity()), [torch.tensor([[1e5], [float("inf")]])]
    with pytest.raises(FeatureError, match=r"beyond 6\.55e\+04"):
        extract_dataset(model, loader, "0", tmp_path, dtype="float16")
    with pytest.raises(FeatureError, match="not a floating type"):
        extract_dataset(model, loader, "0", tmp_path, dtype="int8")
    with pytest.raises(FeatureError, match="complex128"):
        extract_dataset(model, [torch.ones(2, 1, dtype=torch.complex128)], "0", tmp_path)
    stored = extract_dataset(model, loader, "0", tmp_path, dtype=torch.bfloat16)["0"][:]
    assert torch.equal(stored, loader[0].bfloat16())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": "x"}, "inputs='x' is not in what the loader yields: a list"),
        ({"target": 5}, "target=5 is not in"),
        ({"pool": "average"}, "not a valid pool"),
        ({"target": lambda item: "cat"}, "not a tensor"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(FeatureError, match=said):
        extract_dataset(make_model(), make_loader(), "0", tmp_path, **options)


def test_batches_without_samples(tmp_path: Path) -> None:
    class Ones(nn.Module):
        def forward(self, count: int) -> Tensor:
            return torch.ones(count)

    with pytest.raises(FeatureError, match="no tensor, so its samples cannot be counted"):
        extract_dataset(Ones(), [2, 3], "self", tmp_path)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    assert lock.acquire()
    with pytest.raises(FeatureError, match="Another process"):
        extract_dataset(make_model(), make_loader(), "0", tmp_path)
    lock.release()
    assert extract_dataset(make_model(), make_loader(), "0", tmp_path).is_complete


def test_a_site_called_target(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("target", nn.Flatten())
    with pytest.raises(FeatureError, match="target:output"):
        extract_dataset(model, make_loader(), "target", tmp_path, target=1)
    features = extract_dataset(model, make_loader(), "target:output", tmp_path, target=1)
    assert torch.equal(features["target:output"][:], X.flatten(1))


def test_an_empty_loader(tmp_path: Path) -> None:
    with pytest.raises(FeatureError, match="no batch"):
        extract_dataset(make_model(), [], "0", tmp_path)


def test_a_model_in_training_mode_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(RetrogradWarning, match=r"'0' is in training mode") as told:
        extract_dataset(nn.Sequential(nn.Dropout(0.0)), X.split(4), "0", tmp_path)
    assert told[0].filename == __file__


class FullDisk:
    """A file on a disk that is full after so many bytes."""

    room = 0

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        FullDisk.room -= len(data)
        if FullDisk.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None) -> None:
    model = make_model()
    with monkeypatch.context() as patch:
        patch.setattr(files, "create", lambda path: FullDisk(path.open("wb")))
        FullDisk.room = 6000
        with pytest.raises(FeatureError, match="No space left on device"):
            extract_dataset(model, make_loader(), "0", tmp_path)
    assert not list(tmp_path.glob(".tmp*"))
    there = open_features(tmp_path)
    assert 0 < there.samples < SAMPLES
    assert torch.equal(there["0"][:], by_hand(model, "0")[: there.samples])
    assert torch.equal(extract_dataset(model, make_loader(), "0", tmp_path)["0"][:], by_hand(model, "0"))


def test_an_interrupted_write_is_not_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None
) -> None:
    """Ctrl-C right after the file got its name, before the writer has noted it."""
    model, replace = make_model(), Path.replace
    count = [0]

    def replace_and_interrupt(path: Path, target: Path) -> Path:
        result = replace(path, target)
        if target.suffix == ".safetensors":
            count[0] += 1
            if count[0] == 2:
                raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            extract_dataset(model, make_loader(), "0", tmp_path)
    assert torch.equal(extract_dataset(model, make_loader(), "0", tmp_path)["0"][:], by_hand(model, "0"))


def test_progress_is_told_plainly_where_nobody_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extract_dataset(make_model(), make_loader(), "0", tmp_path / "a")
    assert capsys.readouterr().err == "features: 6 of 6 batches, 23 samples in this call\n"
    extract_dataset(make_model(), make_loader(), "0", tmp_path / "b", progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    master, slave = os.openpty()
    code = (
        "import torch; from torch import nn; from retrograd.tools.features.dataset import extract_dataset\n"
        f"extract_dataset(nn.Sequential(nn.Flatten()), torch.ones(8, 2).split(2), '0', {str(tmp_path)!r})"
    )
    warm.run([sys.executable, "-c", code], stderr=slave, check=True, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert "━" in shown
    assert "4/4" in shown


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """400 MB of activations, 200 MB of features; twice the file size and a batch or two are held."""
    code = f"""
import resource, torch
from torch import nn
from retrograd.core.limits import LIMITS
from retrograd.tools.features.dataset import extract_dataset
LIMITS.shard_bytes = 8 << 20
model = nn.Sequential(nn.Identity(), nn.Linear(1000, 1000))
batch = torch.ones(500, 1000)
def loader(count):
    for _ in range(count): yield batch
extract_dataset(model, loader(10), "0", {str(tmp_path / "a")!r}, progress=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
extract_dataset(model, loader(100), "0", {str(tmp_path / "b")!r}, progress=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    words = [sys.executable, "-c", code]
    told = subprocess.run(words, capture_output=True, text=True, check=True)  # a fork counts what it shares
    assert int(told.stdout) < 40_000  # kilobytes
