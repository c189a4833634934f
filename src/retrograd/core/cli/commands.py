"""The commands: each is a class, whose fields are its options; other parts have theirs in ``launch/commands.py``.

Torch takes seconds to load, and neither ``--help`` nor a wrong path needs it: a command asks for public names, as in
``rg.compare``, which are loaded when they are used.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from dataclasses import MISSING, dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

import retrograd as rg
from retrograd.core.addresses import path_to_read, read_path
from retrograd.core.amounts import count_of
from retrograd.core.launch.chosen_run import check_run, choose_run, reading, show_in_browser, tell_page
from retrograd.core.launch.hook_file import install_hook, remove_hook
from retrograd.core.launch.options import Command, option, write_completion
from retrograd.core.launch.requests import RunRequest
from retrograd.core.limits import LIMITS
from retrograd.core.notices import print_text, say, waiting
from retrograd.core.plugins import list_provided
from retrograd.core.runs.layout import PARENT
from retrograd.core.runs.listing import find_runs


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write a run as one HTML file that opens offline."""

    name: ClassVar[str] = "report"
    reads: ClassVar[bool] = True

    run: Path | None = option("RUN", None, "folder of a run (default: the newest)")
    output: Path | None = option("-o --output", None, "the file (default: RUN/report.html)", metavar="FILE")
    open: bool = option("--open", False, "show it in the browser")

    def check(self) -> None:
        check_run(self.run)

    def carry_out(self) -> None:
        with reading(self.run) as run:
            written = rg.write_report(run, self.output)
        tell_page(written, is_opened=self.open)


@dataclass(frozen=True, kw_only=True)
class Serve(Command):
    """Show a run, or all runs of a folder, in the browser while they are recorded."""

    name: ClassVar[str] = "serve"
    reads: ClassVar[bool] = True
    examples: ClassVar[str] = """
examples:
  retrograd serve                                the newest run below runs/
  retrograd serve runs                           all runs of that folder, to choose from
  retrograd serve --open runs/train-20250131-120000

The page is that of `retrograd report`, and follows the run. Only local requests with the token in the
address are answered. Nothing is written. Ctrl-C ends it.
"""

    run: Path | None = option("RUN", None, "a run, or a folder of runs (default: the newest run)")
    port: int = option("--port", 0, "where to listen (default: any port that is free)", metavar="N")
    open: bool = option("--open", False, "show it in the browser")

    def check(self) -> None:
        if self.run is not None and not self.run.is_dir():
            check_run(self.run)

    def carry_out(self) -> None:
        from retrograd.core.serving.server import RunServer, serve

        def tell(server: RunServer) -> None:
            print_text(server.address, flush=True)
            if self.open:
                show_in_browser(server.address, server.write_redirect())

        with contextlib.suppress(KeyboardInterrupt):
            serve(path_to_read(choose_run(None) if self.run is None else self.run).absolute(), self.port, told=tell)


@dataclass(frozen=True, kw_only=True)
class View(Command):
    """Print a run as a table."""

    name: ClassVar[str] = "view"
    reads: ClassVar[bool] = True

    run: Path | None = option("RUN", None, "folder of a run (default: the newest)")
    sites: tuple[str, ...] | None = option(
        "--sites", None, "which sites, as in 'blocks.*:output.grad'", metavar="PATTERN"
    )
    statistic: str = option("--statistic", "rms", "which statistic, such as mean, abs_max or zero_share (default: rms)")
    sort: Literal["calls", "name", "value", "gradient", "zeros", "nonfinite", "update"] = option(
        "--sort", "calls", "call order, name, or a column, largest first", group="form"
    )
    all: bool = option("--all", False, "every site of a long run, of which a screenful is shown")
    map: bool = option("--map", False, "draw sites x steps instead of the table", group="form")
    follow: bool = option("--follow", False, "follow a run that is recorded, until it is over", group="form")

    def check(self) -> None:
        check_run(self._tell_apart()[0])

    def carry_out(self) -> int:
        from retrograd.core.runs.findings import explain_run, read_last_findings
        from retrograd.core.views.findings_text import list_findings
        from retrograd.core.views.shown import check_choice

        path, sites = self._tell_apart()
        if self.follow:
            from retrograd.core.views.followed import follow_run

            follow_run(rg.open_run(choose_run(path)))
            return 0
        with reading(path) as run:
            check_choice(run.history, sites, self.statistic)
            is_long = run.history.rows.count > LIMITS.explained_rows
            findings = read_last_findings(run) if is_long else explain_run(run)
        first = [findings.headline] if findings.missing or not len(findings) else []
        print_text("\n".join([*first, *list_findings(findings)]), flush=True)
        most = LIMITS.shown_sites if is_long and not self.all and sites is None else None
        with waiting("laying the table out", is_long=is_long and (self.map or most is None), follows=True):
            if self.map:
                rg.print_heatmap(run, sites, statistic=self.statistic)
            else:
                rg.print_table(run, sites, statistic=self.statistic, sort=self.sort, most=most)
        return 2 if findings.unread else 0

    def _tell_apart(self) -> tuple[Path | None, tuple[str, ...] | None]:
        """The run and the patterns, also where the run follows the patterns."""
        if self.run is None and self.sites and read_path(self.sites[-1]).is_dir():
            return read_path(self.sites[-1]), self.sites[:-1] or None
        return self.run, self.sites


@dataclass(frozen=True, kw_only=True)
class Export(Command):
    """Write a run for other tools, or for a tracker of experiments."""

    name: ClassVar[str] = "export"
    examples: ClassVar[str] = """
examples:
  retrograd export --to parquet
  retrograd export runs/train-20250131-120000 --to tensorboard
  retrograd export runs/train-20250131-120000 --to wandb -o offline && wandb sync offline/wandb/offline-run-*

Nothing is sent anywhere: the folder for W&B is an offline run, that for MLflow holds a database, mlflow.db.
"""

    run: Path | None = option("RUN", None, "folder of a run (default: the newest)")
    to: Literal["csv", "parquet", "tensorboard", "wandb", "mlflow"] = option("--to", MISSING, "what to write")
    output: Path | None = option("-o --output", None, "where (default: inside RUN)", metavar="PATH")
    sites: tuple[str, ...] | None = option(
        "--sites", None, "sites that a tracker is given, as in 'blocks.*:output.grad'", metavar="PATTERN"
    )
    statistics: tuple[str, ...] | None = option(
        "--statistics", None, "statistics of them, as in rms abs_max", metavar="NAME"
    )

    def check(self) -> None:
        check_run(self.run)

    def carry_out(self) -> None:
        with reading(self.run) as run:
            written = rg.export(run, self.to, self.output, sites=self.sites, statistics=self.statistics)
        print_text(str(written))


@dataclass(frozen=True, kw_only=True)
class Compact(Command):
    """Rewrite the statistics of a run as few files, sorted by site, and ranks merged."""

    name: ClassVar[str] = "compact"
    reads: ClassVar[bool] = True
    examples: ClassVar[str] = """
examples:
  retrograd compact runs/train-20250131-120000
  retrograd compact runs/train-20250131-120000 --keep-ranks
  retrograd compact runs/train-20250131-120000 -o runs/so-far

One series is then read from few files. What ranks saw cannot be told apart afterwards, unless they are kept. Killed at
any moment, the run can be read as before or as after. A run that is still being recorded is refused without -o.
"""

    run: Path = option("RUN", MISSING, "folder of a run")
    output: Path | None = option(
        "-o --output", None, "a new folder for a compacted copy; the run stays as it is, and may go on", metavar="DIR"
    )
    keep_ranks: bool = option("--keep-ranks", False, "leave the rows of each rank apart")

    def carry_out(self) -> None:
        print_text(str(rg.compact(self.run, self.output, keep_ranks=self.keep_ranks, progress=True)))


@dataclass(frozen=True, kw_only=True)
class InstallHook(Command):
    """Let isolated interpreters (python -I) of this environment be recorded too."""

    name: ClassVar[str] = "install-hook"

    remove: bool = option("--remove", False, "take the hook away again")

    def carry_out(self) -> None:
        site_packages = Path(sysconfig.get_path("purelib"))
        if self.remove:
            print_text(f"removed {remove_hook(site_packages)}")
        else:
            print_text(f"installed {install_hook(site_packages)}")


@dataclass(frozen=True, kw_only=True)
class ListRuns(Command):
    """List the runs in a folder: when, how far, how they ended, the last loss, findings."""

    name: ClassVar[str] = "ls"
    examples: ClassVar[str] = """
examples:
  retrograd ls
  retrograd ls sweeps --sort final                          the lowest loss at the end first
  retrograd ls sweeps --filter status=finished 'lr>=0.01'   those of which both is so
  retrograd ls sweeps --search resnet --sort lr --reverse
  retrograd ls | cut -f 1,4,6                               name, status and final of each
  retrograd ls --json | jq -r 'select(.status == "failed") | .name'

Columns are name, when, steps, status, loss (of the last step), final (mean over the last twentieth of the steps),
findings (how many), finding (which), what the program has logged, and every setting: options of the command, arguments
of the optimizer, seed, commit. NaN and what is not known come last in every order. Findings are counted where they
were computed, as `retrograd run` does at the end.

A terminal, or a pipe where COLUMNS says a width, gets a table that fits, with the settings in which the runs differ.
Any other pipe gets all columns, with a tab between two and their names in the first line; what is not known is empty.
"""

    folder: Path = option("FOLDER", PARENT, f"the folder that holds the runs (default: {PARENT})")
    sort: str = option("--sort", "when", "order by a column (default: when, the newest first)", metavar="COLUMN")
    reverse: bool = option("--reverse", False, "in the other direction")
    filter: tuple[str, ...] = option(
        "--filter", (), "only runs for which all of it is so, as in status=failed 'lr>=0.01'", metavar="CONDITION"
    )
    search: str = option(
        "--search", "", "only runs with this in their name, status, findings or settings", metavar="TEXT"
    )
    json: bool = option("--json", False, "print one JSON object per run")

    def check(self) -> None:
        find_runs(path_to_read(self.folder))

    def carry_out(self) -> None:
        from retrograd.core.runs.listed import choose_listed, read_listed
        from retrograd.core.views.runs_table import join_by_tabs, print_runs

        with waiting(f"reading the runs of {self.folder}"):
            found = read_listed(path_to_read(self.folder))
        runs = choose_listed(found, self.sort, self.filter, self.search, is_reversed=self.reverse)
        if not runs:
            say(f"none of {count_of(len(found), 'run')} is so" if found else f"there is no run in {self.folder}")
        elif self.json:
            print_text("".join(f"{each.as_json()}\n" for each in runs), end="", is_json=True)
        elif sys.stdout.isatty() or "COLUMNS" in os.environ:
            print_runs(runs)
        else:
            print_text(join_by_tabs(runs), end="")


@dataclass(frozen=True, kw_only=True)
class Doctor(Command):
    """Say what is installed here, and what is slower or off because something is missing."""

    name: ClassVar[str] = "doctor"
    examples: ClassVar[str] = """
examples:
  retrograd doctor
  retrograd doctor --json | jq '.checks[] | select(.is_fine | not)'

Looked at are versions, our compiled parts, every private name of torch that we use, the device, folders that are
written to, and what others run in every process. The exit code is 1 where anything is missing, else 0.
"""

    json: bool = option("--json", False, "print one JSON object")

    def carry_out(self) -> int:
        from retrograd.core.cli.doctor import print_health

        return print_health(as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class Completion(Command):
    """Print what makes a shell complete our commands and options."""

    name: ClassVar[str] = "completion"
    examples: ClassVar[str] = """
examples:
  retrograd completion bash > ~/.local/share/bash-completion/completions/retrograd
  retrograd completion zsh >> ~/.zshrc
  retrograd completion fish > ~/.config/fish/completions/retrograd.fish
"""

    shell: Literal["bash", "zsh", "fish"] = option("SHELL", MISSING, "bash, zsh or fish")

    def carry_out(self) -> None:
        print_text(write_completion(COMMANDS, self.shell), end="")


_ORDER = (
    "run", "explain", "compare", "report", "serve", "view", "ls", "export", "compact", "trace", "inventory", "debug",
    "hangs", "replay", "mcp", "doctor", "install-hook", "completion",
)  # fmt: skip

OWN: tuple[type[Command], ...] = (
    RunRequest,
    Report,
    Serve,
    View,
    ListRuns,
    Export,
    Compact,
    Doctor,
    InstallHook,
    Completion,
)

COMMANDS: tuple[type[Command], ...] = tuple(
    sorted((*OWN, *chain.from_iterable(list_provided("commands"))), key=lambda each: _ORDER.index(each.name))
)
"""All commands, in the order of the help."""
