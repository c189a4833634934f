"""Folders that somebody else has written, or a disk has damaged: what comes of opening them is what was written, or an
error of ours. No other error, no crash, no more memory than is there."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import retrograd as rg
from retrograd.core.errors import DamagedRunError, FeatureError
from retrograd.core.exports.export import export
from retrograd.core.foreign import tables
from tests.apart import Came, call, call_apart
from tests.core.foreign.opened import LOOKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory, and forks")

OURS = {
    "ok", "damaged-run", "not-a-run", "cannot-extract", "graph", "bad-trace", "saved-tensor", "no-such-site",
    "run-not-writable",
}  # fmt: skip


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(net: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of each kind."""
    home = tmp_path_factory.mktemp("sound")
    net = make_net()
    with rg.record(net, home / "run", tensors=["*:output"]):
        train(net, 4)
    data = torch.randn(20, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=5)
    rg.extract_dataset(make_net().eval(), loader, ["0", "2"], home / "features", progress=False)
    for name in ("graph", "trace", "inventory"):
        (home / name).mkdir()
    rg.walk(net(data)).save(home / "graph" / "graph.parquet")
    with rg.trace() as trace:
        train(net, 2)
    trace.save(home / "trace" / "trace.json.gz")
    with rg.take_inventory(net) as inventory:
        net(data).square().mean().backward()
    inventory.save(home / "inventory" / "inventory.parquet")
    with rg.watch_hangs(home / "rings"):
        train(net, 2)
    return home


def look_at_all(home: Path) -> dict[str, Came]:
    """What comes of looking at each folder in a folder."""
    looks = {folder: LOOKS[folder.name.partition("-")[0]] for folder in sorted(home.iterdir())}
    return call_apart({folder.name: partial(look, folder) for folder, look in looks.items()})


def list_wrong(came: dict[str, Came]) -> dict[str, Came]:
    return {name: each for name, each in came.items() if each[0] not in OURS}


def test_what_nobody_has_changed_is_read(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "all")
    assert {slug for slug, _ in look_at_all(tmp_path / "all").values()} == {"ok"}


DEEP = b'{"format": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TEXTS: dict[str, bytes] = {
    "deep": DEEP,
    "deeper": b"[" * 1_000_000,
    "a list": b"[]",
    "a number": b"7",
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "twice": b'{"format": 1, "format": 1}',
    "digits": b'{"format": 1' + b"0" * 5000 + b"}",
    "not finite": b'{"format": Infinity, "status": NaN, "asked": {}}',
    "another kind": b'{"format": 1, "sites": 7, "model": "x", "statistics": 3, "asked": [], "status": [], "lost": 3}',
    "names that are none": b'{"format": 1, "sites": [1, null, {}], "features": [1], "asked": {}, "began": "x"}',
    "no site": b'{"format": 1, "sites": ["../../x", "\\ud800", "0:output"], "model": [{"path": 7, "parameters": "x"}]}',
}  # fmt: skip


def test_json_that_is_wrong_in_every_way(sound: Path, tmp_path: Path) -> None:
    for place in ("run/manifest.json", "run/rank00000/rank.json", "features/manifest.json"):
        kind, _, name = place.partition("/")
        for what, text in TEXTS.items():
            folder = tmp_path / f"{kind}-{Path(name).stem}-{what}"
            shutil.copytree(sound / kind, folder)
            (folder / name).write_bytes(text)
    for what, text in TEXTS.items():
        head, *rows = gzip.decompress((sound / "trace" / "trace.json.gz").read_bytes()).splitlines()
        for where, lines in {"head": [text, *rows], "row": [head, text, *rows]}.items():
            folder = tmp_path / f"trace-{where}-{what}"
            folder.mkdir()
            (folder / "trace.json.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    came = look_at_all(tmp_path)
    assert list_wrong(came) == {}
    assert all(slug != "ok" for name, (slug, _) in came.items() if name.endswith(("-deep", "-a list", "-twice")))


def test_files_that_unpack_to_too_much(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, graph = tmp_path / "all" / "trace-bomb", tmp_path / "all" / "graph-bomb"
    trace.mkdir(parents=True)
    with gzip.open(trace / "trace.json.gz", "wb", compresslevel=1) as file:
        for _ in range(20):
            file.write(b"0" * (1 << 24))
    graph.mkdir()
    pq.write_table(pa.table({"name": pa.nulls(20_000_000)}), graph / "graph.parquet")
    came = look_at_all(tmp_path / "all")
    assert {name: slug for name, (slug, _) in came.items()} == {"trace-bomb": "bad-trace", "graph-bomb": "graph"}
    monkeypatch.setattr(tables, "MOST_VALUES", 100)
    with pytest.raises(DamagedRunError, match="are too many"):
        rg.open_run(sound / "run")


def test_devices_pipes_and_links(sound: Path, tmp_path: Path) -> None:
    """Nothing waits for a pipe that nobody writes to, reads a device to its end, or writes through a link."""
    files = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file() and path.name != ".lock"]
    for number, place in enumerate(map(str, files)):
        kind, _, name = place.partition("/")
        for what in ("pipe", "device"):
            folder = tmp_path / f"{kind}-{number}-{what}"
            shutil.copytree(sound / kind, folder)
            (folder / name).unlink()
            if what == "pipe":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to("/dev/zero")
    assert list_wrong(look_at_all(tmp_path)) == {}


def test_a_page_of_a_run_is_not_written_through_a_link(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "run", tmp_path / "run")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("report.html", "statistics.csv", "tensorboard"):
        (tmp_path / "run" / name).symlink_to(victim)
    run = rg.open_run(tmp_path / "run")
    page = rg.write_report(run)
    assert page.read_text().startswith("<!doctype html>")
    assert call(lambda: export(run, "csv"))[0] == "run-not-writable"
    assert call(lambda: export(run, "tensorboard"))[0] == "run-not-writable"
    assert victim.read_text() == "precious"


# what a disk does


def change_bytes(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    match chance.randrange(4):
        case 0:
            del data[chance.randrange(len(data)) :]
        case 1:
            start = chance.randrange(len(data))
            data[start : start + 512] = bytes(min(512, len(data) - start))
        case _:
            for _ in range(chance.choice([1, 1, 4])):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def change_table(path: Path, chance: random.Random) -> None:
    """Other columns, other types, other numbers: a file that is well made, and lies."""
    table = pq.read_table(path)
    name = chance.choice(table.column_names)
    at, column = table.column_names.index(name), table[name]
    others: list[Callable[[], pa.Table]] = [
        lambda: table.drop_columns([name]),
        lambda: table.set_column(at, name, pa.nulls(len(table), column.type)),
        lambda: table.set_column(at, name, pa.repeat("x", len(table))),
        lambda: table.set_column(at, name, pa.array(chance.choices([-1, 0, 7, 10**6, 2**62], k=len(table)))),
        lambda: table.set_column(at, name, pa.array(chance.choices([math.nan, math.inf, -1e300], k=len(table)))),
        lambda: table.slice(0, 0),
        lambda: pa.concat_tables([table, table]),
    ]  # fmt: skip
    pq.write_table(chance.choice(others)().replace_schema_metadata(table.schema.metadata), path)


def change_json(text: bytes, chance: random.Random) -> bytes:
    content = json.loads(text)
    places = list_places(content)
    outer, key = chance.choice(places)
    outer[key] = chance.choice([None, True, -1, 7, 10**30, 0.5, "x", "</script>", [], {}, [[1]], {"path": "x"}])
    return json.dumps(content).encode()


def list_places(value: Any) -> list[tuple[Any, Any]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in parts for place in ((value, key), *list_places(part))]


def change_trace(path: Path, chance: random.Random) -> None:
    lines = gzip.decompress(path.read_bytes()).splitlines()
    number = chance.randrange(len(lines))
    lines[number] = change_json(lines[number], chance)
    path.write_bytes(gzip.compress(b"\n".join(lines)))


def change_tensors(path: Path, chance: random.Random) -> None:
    """A file of tensors that is well made, with notes that lie."""
    with safetensors.safe_open(path, "pt") as file:
        notes = file.metadata()
    tensors = safetensors.torch.load_file(path)
    name = chance.choice(sorted(tensors))
    match chance.randrange(4):
        case 0:
            del tensors[name]
        case 1:
            tensors[chance.choice(["x", "1/2/3/train/x", "a/b/c/d/e"])] = tensors.pop(name)
        case 2:
            tensors[name] = tensors[name][:1].contiguous()
        case _:
            notes = {"retrograd": change_json(notes["retrograd"].encode(), chance).decode()}
    safetensors.torch.save_file(tensors, path, notes)


def change(path: Path, chance: random.Random) -> None:
    wise = {".parquet": change_table, ".gz": change_trace, ".safetensors": change_tensors}.get(path.suffix)
    if path.suffix == ".json" and chance.random() < 0.8:
        path.write_bytes(change_json(path.read_bytes(), chance))
    elif wise is not None and chance.random() < 0.6:
        wise(path, chance)
    else:
        change_bytes(path, chance)


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]
)
def test_whatever_is_changed_is_read_or_told(seed: int, sound: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    for number in range(60):
        kind = chance.choice(["run", "run", "run", "features", "graph", "trace", "inventory", "inventory", "rings"])
        folder = tmp_path / f"{kind}-{number}"
        shutil.copytree(sound / kind, folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
        change(chance.choice(files), chance)
    came = look_at_all(tmp_path)
    assert list_wrong(came) == {}
    assert len({slug for slug, _ in came.values()}) > 2


@pytest.mark.parametrize("kind", ["features", "run"])
def test_a_bit_that_turned_in_a_tensor_is_told(kind: str, sound: Path, tmp_path: Path) -> None:
    """Every bit counts: of the tensors themselves, and of what is said of them."""
    chance = random.Random(0)
    [file, *_] = sorted((sound / kind).rglob("*.safetensors"))
    data = file.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    places = [begin, len(data) - 1, *(chance.randrange(begin, len(data)) for _ in range(20))]
    for number, place in enumerate(places):
        folder = tmp_path / str(number)
        shutil.copytree(sound / kind, folder)
        changed = bytearray(data)
        changed[place] ^= 1 << chance.randrange(8)
        (folder / file.relative_to(sound / kind)).write_bytes(changed)
        slug, text = call(lambda folder=folder: look(kind, folder))  # type: ignore[misc]
        assert slug in {"cannot-extract", "damaged-run"}, place
        assert "has a wrong checksum" in text


def look(kind: str, folder: Path) -> None:
    if kind == "features":
        for feature in rg.open_features(folder).values():
            feature[0]
    else:
        history = rg.open_run(folder).history
        for site in history.sites:
            for kept in history[site].tensors:
                kept.load()


def test_a_bit_that_turned_in_a_table_is_told(sound: Path, tmp_path: Path) -> None:
    """In the pages of a Parquet file, where a number may be changed and nothing else."""
    chance = random.Random(0)
    shutil.copytree(sound / "run", tmp_path / "run")
    [part] = (tmp_path / "run" / "rank00000" / "statistics").iterdir()
    data = part.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little")
    for _ in range(30):
        changed = bytearray(data)
        changed[chance.randrange(4, len(data) - footer - 8)] ^= 1 << chance.randrange(8)
        part.write_bytes(changed)
        slug, text = call(lambda: read_rows(tmp_path / "run"))
        assert slug in {"damaged-run", "ok"}, text
        if slug == "ok":  # it was in what no reader looks at, or its rows are left out, and told
            run = rg.open_run(tmp_path / "run")
            rows = repr(run.history.table().to_pydict())
            assert run.damaged or rows == read_rows(sound / "run")


def read_rows(folder: Path) -> str:
    return repr(rg.open_run(folder).history.table().to_pydict())


def test_features_of_shards_that_do_not_fit_each_other(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "features", tmp_path / "features")
    [shard] = (tmp_path / "features").glob("batch-*")
    shutil.copy(shard, shard.with_name("batch-00000099.safetensors"))
    with pytest.raises(FeatureError, match="cannot be read"):
        rg.open_features(tmp_path / "features")
