"""What it takes to read a run from object storage: requests, bytes, and seconds at so many milliseconds a request.

    python benchmarks/reading.py make /tmp/long --ranks 4 --steps 5000 --sites 60
    python benchmarks/stores.py /tmp/long
    python benchmarks/stores.py /tmp/long --readers 1

The files of that folder are put into the memory of this process, as a store whose every request takes ``--latency``
seconds, as many at a time as are made, and which remembers what it has listed, as s3fs does. Bytes take no time.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

import retrograd as rg
from retrograd.core.history import ahead, windows


class Requests:
    """Counts what is asked of the store, and lets each request take its time."""

    def __init__(self, latency: float) -> None:
        self.latency = latency
        self.count = self.bytes = 0
        self._lock = threading.Lock()
        self._known: dict[str, Any] = {}
        self._plain = {name: getattr(MemoryFileSystem, name) for name in ("cat_file", "find", "info")}

    def _ask(self, size: int = 0) -> None:
        with self._lock:
            self.count += 1
            self.bytes += size
        time.sleep(self.latency)

    def cat_file(self, store: Any, name: str, **where: Any) -> bytes:
        data: bytes = self._plain["cat_file"](store, name, **where)
        self._ask(len(data))
        return data

    def find(self, store: Any, name: str, **options: Any) -> Any:
        """List all files: what s3fs remembers until it is told to forget it."""
        found = self._plain["find"](store, name, **{**options, "detail": True})
        for _ in range(1 + len(found) // 1000):
            self._ask()
        self._known = found
        return found if options.get("detail") else list(found)

    def info(self, store: Any, name: str, **options: Any) -> Any:
        name = store._strip_protocol(name)
        if name not in self._known and not any(each.startswith(f"{name}/") for each in self._known):
            self._ask()
        return self._plain["info"](store, name, **options)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        for name in self._plain:
            setattr(MemoryFileSystem, name, self._method(name))
        try:
            yield
        finally:
            for name, plain in self._plain.items():
                setattr(MemoryFileSystem, name, plain)

    def _method(self, name: str) -> Any:
        own = getattr(self, name)

        def ask(store: Any, *words: Any, **named: Any) -> Any:  # a function: given the store, as a method is
            return own(store, *words, **named)

        return ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--readers", type=int, default=ahead.FAR_READERS, help="requests at a time")
    arguments = parser.parse_args()
    ahead.FAR_READERS = windows.FAR_READERS = arguments.readers
    store = MemoryFileSystem()
    files = [path for path in arguments.folder.rglob("*") if path.is_file()]
    for path in files:
        store.pipe_file(f"/runs/a/{path.relative_to(arguments.folder)}", path.read_bytes())
    print(
        f"{len(files):,} files, {sum(path.stat().st_size for path in files) / 1e6:,.0f} MB, {arguments.readers} readers"
    )
    print("| what | requests | MB | s | CPU s |\n| --- | --- | --- | --- | --- |")
    requests = Requests(arguments.latency)
    with requests.counted(), tempfile.TemporaryDirectory() as pages:
        run = _tell("open", requests, lambda: rg.open_run("memory://runs/a"))
        _tell("look again", requests, run.refresh)
        _tell("one series", requests, lambda: run.history["blocks.1.fc:output.grad"].rms)
        _tell("the report", requests, lambda: rg.write_report(run, Path(pages) / "page.html"))


def _tell(what: str, requests: Requests, work: Any) -> Any:
    requests.count = requests.bytes = 0
    began, used = time.perf_counter(), time.process_time()
    found = work()
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    print(f"| {what} | {requests.count:,} | {requests.bytes / 1e6:,.1f} | {wall:.1f} | {cpu:.1f} |", flush=True)
    return found


if __name__ == "__main__":
    main()
