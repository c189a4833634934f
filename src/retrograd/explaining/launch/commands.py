"""The commands of explaining."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

import retrograd as rg
from retrograd.core.amounts import name_letters
from retrograd.core.foreign.text import show_plainly
from retrograd.core.launch.chosen_run import check_is_no_script, check_run, reading, tell_page
from retrograd.core.launch.options import Command, option
from retrograd.core.notices import print_text
from retrograd.core.runs.layout import PARENT
from retrograd.core.runs.listing import find_runs, to_plain
from retrograd.core.runs.settings import read_settings
from retrograd.explaining.launch.options import ExplainOptions


class Explain(ExplainOptions):
    """Report what is wrong with a run, or with a script that is run for it."""

    def check(self) -> None:
        if not self.command and not self.schema:
            check_is_no_script(self.run)
            check_run(self.run)

    def carry_out(self) -> int:
        if self.schema:
            print_text(Path(__file__).with_name("explain.schema.json").read_text("utf-8"), end="", is_json=True)
            return 0
        from retrograd.explaining.launch.explaining import explain_as_asked

        return explain_as_asked(self)


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Report where runs first diverge from the first of them, and why."""

    name: ClassVar[str] = "compare"
    reads: ClassVar[bool] = True
    examples: ClassVar[str] = """
examples:
  retrograd compare runs/first runs/second
  retrograd compare runs/first runs/second --noise runs/first-again
  retrograd compare runs/first/rank00000 runs/first/rank00001
  retrograd compare runs/first runs/second --json
  retrograd compare runs/first runs/second runs/third --open

Runs are compared in the order in which training reached each site; --report lays them over each other in one HTML file.
The exit code is 0 if they are the same, but for noise, 1 if they are not, and 2 if they cannot be compared.
"""

    a: Path = option("A", MISSING, "the folder of a run, or of one of its ranks")
    others: tuple[Path, ...] = option("B", MISSING, "another one, or several, each of which is compared with A")
    noise: tuple[Path, ...] = option("--noise", (), "runs of the same program as A, of the same seed", metavar="RUN")
    json: bool = option("--json", False, "the verdict and each difference, as lines of JSON")
    report: bool = option("--report", False, "write a page that shows the runs over each other")
    output: Path | None = option("-o --output", None, "its file (default: compared.html, here)", metavar="FILE")
    open: bool = option("--open", False, "write it, and show it in the browser")

    def check(self) -> None:
        for each in (self.a, *self.others, *self.noise):
            check_run(each, can_be_parent=False)

    def carry_out(self) -> int:
        from retrograd.core.runs.listed import find_differing
        from retrograd.core.runs.loss_curve import reduce_curve
        from retrograd.core.views.runs_table import print_differences

        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(reading(each)) for each in (self.a, *self.others)]
            noise = [stack.enter_context(reading(each)) for each in self.noise]
            letters = name_letters(len(runs))
            named = zip(runs[1:], letters[1:], strict=True)
            comparisons = [rg.compare(runs[0], other, noise=noise, letter=letter) for other, letter in named]
            starts = [(read_settings(run.history.manifest), reduce_curve(run.history.made_loss)) for run in runs]
            lasts = [run.history.scalars.last for run in runs] if self.json else []
        if not self.json:
            print_differences(letters, starts)
        for k, (path, comparison) in enumerate(zip(self.others, comparisons, strict=True), start=1):
            which = str(path) if len(self.others) > 1 else ""
            text = f"{comparison.letter} = {which}: {comparison}\n" if which else f"{comparison}\n"
            if self.json:
                (settings, curve), (its_settings, its_curve) = starts[0], starts[k]
                differing = find_differing([settings, its_settings])
                text = comparison.as_json_lines(
                    which,
                    final=[to_plain(curve.final), to_plain(its_curve.final)],
                    scalars=_pair(lasts[0], lasts[k], [*lasts[0], *lasts[k]]),
                    settings=_pair(settings, its_settings, differing),
                )
            print_text(text if self.json else show_plainly(text), end="", is_json=self.json)
        if self.report or self.output or self.open:
            written = rg.write_comparison(runs, self.output, comparisons=comparisons)
            tell_page(written, is_opened=self.open, file=sys.stderr if self.json else sys.stdout)
        return 0 if all(comparisons) else 1


def _pair(first: Mapping[str, Any], second: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[Any]]:
    """What both runs have under these names, as JSON values."""
    return {name: [to_plain(first.get(name)), to_plain(second.get(name))] for name in dict.fromkeys(names)}


@dataclass(frozen=True, kw_only=True)
class ServeTools(Command):
    """Let an agent read the runs of a folder: a server of the Model Context Protocol, on standard input and output."""

    name: ClassVar[str] = "mcp"
    reads: ClassVar[bool] = True
    examples: ClassVar[str] = """
examples:
  retrograd mcp runs

Its tools list runs, describe and explain one, give series, and compare two. They write nothing, read nothing outside
of the folder, and bound their answers. It needs `pip install 'retrograd[mcp]'`.
"""

    folder: Path = option("FOLDER", PARENT, f"the folder whose runs may be read (default: {PARENT})")

    def check(self) -> None:
        if self.folder != PARENT:  # which the first run makes
            find_runs(self.folder)

    def carry_out(self) -> None:
        from retrograd.explaining.launch.run_tools import serve_tools

        serve_tools(self.folder)


COMMANDS: tuple[type[Command], ...] = (Explain, Compare, ServeTools)
