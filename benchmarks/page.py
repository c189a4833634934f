"""What a long run costs in a browser: the served page and the file, in headless Chromium.

    python benchmarks/reading.py make /tmp/long --ranks 1 --steps 10000 --sites 1880
    python benchmarks/page.py served /tmp/long
    python benchmarks/page.py file /tmp/long

CPU time is that of the processes of the server and of Chromium that draws the page, not of the machine, so others who
use it disturb little. ``served`` follows a copy of the run to which a process of its own adds a step each 200 ms. What
an update costs the page is told twice: CPU of the thread that runs its scripts, lays it out and paints it (Chromium's
own ``TaskDuration``), which is for how long it cannot answer a person; and CPU of the whole process, with the threads
that compile and rasterize. Both are told without news, too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
TICKS = os.sysconf("SC_CLK_TCK")
PAINTED = "html[data-ready=yes]"


class Chromium:
    """A page, and what the process that draws it uses."""

    def __init__(self, browser: Browser) -> None:
        self._known = {each["id"] for each in _list_renderers(browser.new_browser_cdp_session())}
        self.page: Page = browser.new_page(viewport={"width": 1440, "height": 900})
        self._session = browser.new_browser_cdp_session()
        self._own = self.page.context.new_cdp_session(self.page)
        self._own.send("Performance.enable", {"timeDomain": "threadTicks"})

    @property
    def cpu(self) -> float:
        """Seconds of the processes that draw this page; they come with it."""
        return sum(each["cpuTime"] for each in _list_renderers(self._session) if each["id"] not in self._known)

    @property
    def busy(self) -> float:
        """Seconds of CPU of the thread that runs the page's scripts, lays it out and paints it."""
        return float(self._metrics()["TaskDuration"])

    def tell_work(self) -> str:
        """What the thread of the page has done so far, in milliseconds."""
        found = self._metrics()
        kinds = {"ScriptDuration": "script", "LayoutDuration": "layout", "RecalcStyleDuration": "style"}
        return ", ".join(f"{word} {1000 * found[name]:,.0f}" for name, word in kinds.items())

    def _metrics(self) -> dict[str, float]:
        found = self._own.send("Performance.getMetrics")["metrics"]
        return {each["name"]: each["value"] for each in found}

    def weigh(self) -> float:
        """Megabytes of the processes that draw this page, after garbage was collected."""
        self._own.send("HeapProfiler.enable")
        self._own.send("HeapProfiler.collectGarbage")
        resident = [_resident(each["id"]) for each in _list_renderers(self._session) if each["id"] not in self._known]
        return sum(resident)


def _list_renderers(session: CDPSession) -> list[dict[str, Any]]:
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return [each for each in found if each["type"] == "renderer"]


def _resident(process: int) -> float:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu_of(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, str]]:
    """The process of a server, and its address."""
    words = [str(Path(sys.executable).with_name("retrograd")), "serve", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            yield process.pid, address
        finally:
            process.send_signal(signal.SIGINT)


def copy_run(folder: Path, target: Path) -> Path:
    """A copy that may be written to; the large files, which are never changed, are links."""

    def copy(source: str, goal: str) -> None:
        os.link(source, goal) if source.endswith(".parquet") else shutil.copy2(source, goal)

    shutil.copytree(folder, target, copy_function=copy)
    return target


def go_on(folder: Path) -> NoReturn:
    """Add a step each 200 ms, as a resumed training does, until killed."""
    import retrograd as rg
    from reading import invent_rows
    from retrograd.core.history.sink import Event, Moment, RowBatch
    from retrograd.core.runs.writer import RunWriter

    sites = rg.open_run(folder).history.sites
    writer = RunWriter(folder, resume=True)
    writer.add_sites(sites)
    rows, bins = invent_rows(range(50), sites, 0)  # again and again: what is measured is not what invents them
    for step in itertools.count(writer.next_step):
        writer.add_rows(RowBatch(Moment(step), rows[step % 50].tobytes(), bins[step % 50].tobytes()))
        writer.add_event(Event(Moment(step), "loss", value=1 / (1 + step), time=time.time()))
        time.sleep(0.2)


@contextmanager
def training(folder: Path) -> Iterator[None]:
    """A process that adds steps meanwhile."""
    process = subprocess.Popen([sys.executable, __file__, "go-on", str(folder)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def tell(what: str, value: float, unit: str) -> None:
    print(f"| {what} | {value:,.2f} {unit} |", flush=True)


def measure_served(browser: Browser, folder: Path, updates: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as home:
        run = copy_run(folder, Path(home) / "run")
        with serving(run) as (server, address):
            chromium, page = (found := Chromium(browser)), found.page
            began = time.perf_counter()
            page.goto(address)
            page.wait_for_selector(PAINTED, timeout=300_000)
            tell("wall time from the address to numbers", time.perf_counter() - began, "s")
            tell("server's CPU until then, with its start", _cpu_of(server), "s")
            tell("page's CPU until then", chromium.cpu, "s")
            tell("thread of the page until then", chromium.busy, "s")
            began, used = time.perf_counter(), _cpu_of(server)
            if not page.locator(".label:not(.folder)").count():
                page.locator(".label").first.click()
                page.wait_for_timeout(200)
            if page.locator(".label:not(.folder)").count():
                page.locator(".label:not(.folder)").first.click()
                page.wait_for_selector(".panel .uplot", timeout=300_000)
            tell("wall time of opening a row", time.perf_counter() - began, "s")
            tell("server's CPU of that", _cpu_of(server) - used, "s")
            page.wait_for_timeout(3000)  # histograms come behind the curves
            watch_updates(chromium, server, run, updates)


def watch_updates(chromium: Chromium, server: int, run: Path, updates: int) -> None:
    """Tell what each of some updates costs, beside what the page costs while there are none."""
    page, quiet = chromium.page, 10
    cpu, busy = chromium.cpu, chromium.busy
    page.wait_for_timeout(1000 * quiet)
    tell("page's CPU without news", 1000 * (chromium.cpu - cpu) / quiet, "ms/s")
    tell("thread of the page without news", 1000 * (chromium.busy - busy) / quiet, "ms/s")
    tell("memory of the page's process before updates", chromium.weigh(), "MB")
    with training(run):
        wait_for_update(page, 2)  # the first ones find the code of the page cold
        page.evaluate("performance.clearMeasures('update')")
        cpu, used, busy, each, last = chromium.cpu, _cpu_of(server), chromium.busy, list[float](), 0
        while last < updates:
            seen = wait_for_update(page, last + 1)
            each.append(1000 * (chromium.busy - busy) / (seen - last))
            busy, last = chromium.busy, seen
        cpu, used, work = chromium.cpu - cpu, _cpu_of(server) - used, chromium.tell_work()
    lasted = page.evaluate("performance.getEntriesByName('update').map((each) => each.duration)")
    tell(f"an update, asking included (median of {len(lasted)})", statistics.median(lasted), "ms")
    tell("thread of the page for an update, median", statistics.median(each), "ms")
    tell("thread of the page for an update, longest", max(each), "ms")
    tell("page's CPU of an update", 1000 * cpu / len(lasted), "ms")
    tell("server's CPU of an update", 1000 * used / len(lasted), "ms")
    print(f"all that the thread of the page did, in ms: {work}")
    tell("memory of the page's process after them", chromium.weigh(), "MB")
    tell("memory of the server", _resident(server), "MB")


def wait_for_update(page: Page, many: int) -> int:
    """Wait until a page has shown so many updates, five minutes at most, and count them."""
    for _ in range(1500):
        if (seen := int(page.evaluate("performance.getEntriesByName('update').length"))) >= many:
            return seen
        page.wait_for_timeout(200)
    raise TimeoutError("the page shows no update")


def measure_file(browser: Browser, folder: Path, updates: int) -> None:
    del updates
    import retrograd as rg

    with tempfile.TemporaryDirectory(dir=folder.parent) as home:
        began = time.process_time()
        path = rg.write_report(folder, Path(home) / "report.html")
        tell("CPU of writing the file", time.process_time() - began, "s")
        tell("its size", path.stat().st_size / 1e6, "MB")
        chromium, page = (found := Chromium(browser)), found.page
        began = time.perf_counter()
        page.goto(path.as_uri())
        page.wait_for_selector(PAINTED, timeout=300_000)
        tell("wall time from the address to numbers", time.perf_counter() - began, "s")
        tell("page's CPU until then", chromium.cpu, "s")
        tell("thread of the page until then", chromium.busy, "s")
        page.wait_for_timeout(5000)
        tell("page's CPU until everything is made ready", chromium.cpu, "s")
        tell("memory of the page's process", chromium.weigh(), "MB")


WORK: dict[str, Callable[[Browser, Path, int], None]] = {"served": measure_served, "file": measure_file}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*WORK, "go-on"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--updates", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.what == "go-on":
        go_on(arguments.folder)
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        print("| | |\n| --- | ---: |", flush=True)
        WORK[arguments.what](browser, arguments.folder, arguments.updates)
        browser.close()


if __name__ == "__main__":
    main()
