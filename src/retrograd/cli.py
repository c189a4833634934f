"""The ``retrograd`` command: record a training script, and look at what was recorded.

Handlers import what they need when they are called: torch takes seconds to load, and neither ``--help`` nor ``run``
needs it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrograd.errors import RetrogradError
from retrograd.foreign.plain_text import show_plainly

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """
examples:
  retrograd run train.py --lr 0.1                record an unmodified script
  retrograd explain                              what is wrong with the newest run, and what to do
  retrograd compare runs/first runs/second       where two runs part, and why
  retrograd report runs/train-20250131-120000    one HTML file that shows the whole run
  retrograd view runs/train-20250131-120000      a table in the terminal
  retrograd trace train.py --lr 0.1              every node of the first backward passes
  retrograd inventory train.py --lr 0.1          what autograd keeps in one step, and where
  retrograd debug train.py --lr 0.1              stop inside loss.backward(), and look
"""

_LAUNCHERS = ("run", "explain", "trace", "inventory", "debug")
"""Commands of ours behind which stands one of the user; behind ``explain``, or a run."""

_RUN_USAGE = """\
retrograd run [OPTIONS] [--] train.py [ARGS]
       retrograd run [OPTIONS] [--] -m MODULE [ARGS]
       retrograd run [OPTIONS] [--] torchrun | accelerate launch | any program [ARGS]"""

_RUN_EXAMPLES = """
examples:
  retrograd run train.py --lr 0.1
  retrograd run -o runs/first --every 10 -m package.train
  retrograd run --sites 'blocks.*:output.grad' '*:weight.grad' -- train.py
  retrograd run --tensors '*.attn:output' --schedule log train.py
  retrograd run --inventory 1 train.py
  retrograd run torchrun --nproc-per-node 2 train.py

What stands behind the command belongs to it, and so do its output and its exit code. We write one line to stderr
when it starts, one at once for what is critical, and when it ends what was found.
"""


_EXPLAIN_USAGE = """\
retrograd explain [OPTIONS] [RUN]
       retrograd explain [OPTIONS] [--] train.py [ARGS]
       retrograd explain [OPTIONS] [--] -m MODULE [ARGS]
       retrograd explain [OPTIONS] [--] torchrun | accelerate launch | any program [ARGS]"""

_EXPLAIN_EXAMPLES = """
examples:
  retrograd explain                                      the newest run below runs/
  retrograd explain runs/train-20250131-120000 -v        with the evidence
  retrograd explain runs/first --json --fail-on warning  JSON lines, and an exit code for CI
  retrograd explain train.py --lr 0.1                    run it, watched closely, and explain what it did
  retrograd explain --steps 20 -m package.train          no longer than 20 steps

A run is explained from its record alone. A command is run, and watched more closely than `retrograd run` does: also
writes to what autograd has saved, where exactly NaN is made, and points without a derivative. The exit code is that of
the command, or 0 for a run; 1 where --fail-on says so; 2 for what cannot be carried out.
"""

_COMPARE_EXAMPLES = """
examples:
  retrograd compare runs/first runs/second
  retrograd compare runs/first runs/second --noise runs/first-again
  retrograd compare runs/first/rank00000 runs/first/rank00001
  retrograd compare runs/first runs/second --json

Runs are held against each other in the order in which training reached each site. The exit code is 0 if they are
the same, but for noise, 1 if they are not, and 2 if they cannot be compared.
"""

_TRACE_USAGE = """\
retrograd trace [OPTIONS] [--] train.py [ARGS]
       retrograd trace [OPTIONS] [--] -m MODULE [ARGS]
       retrograd trace [OPTIONS] [--] torchrun | accelerate launch | any program [ARGS]"""

_TRACE_EXAMPLES = """
examples:
  retrograd trace train.py --lr 0.1
  retrograd trace --steps 100:102 --memory --by module train.py
  retrograd trace --live --nodes 'blocks.3*' --norms -m package.train
  retrograd trace -o traces/first torchrun --nproc-per-node 2 train.py

DIR/rank*/chrome.json opens in ui.perfetto.dev, and rg.Trace.load() reads DIR/rank*/trace.json.gz. The table goes to
stderr when the script has ended; the script's output and exit code are its own. When a traced pass raises, the
exception says in which node, and how to run that node again. After the traced passes only the last events are kept,
for `retrograd watch DIR`.
"""

_INVENTORY_USAGE = """\
retrograd inventory [OPTIONS] [--] train.py [ARGS]
       retrograd inventory [OPTIONS] [--] -m MODULE [ARGS]
       retrograd inventory [OPTIONS] [--] torchrun | accelerate launch | any program [ARGS]"""

_INVENTORY_EXAMPLES = """
examples:
  retrograd inventory train.py --batch-size 256
  retrograd inventory --step 100 --by tensor -m package.train

DIR/rank*/inventory.html opens in a browser, and rg.Inventory.load() reads DIR/rank*/inventory.parquet. The table goes
to stderr when the script has ended; the script's output and exit code are its own.
"""

_DEBUG_USAGE = """\
retrograd debug [--break WHERE ...] [--] train.py [ARGS]
       retrograd debug [--break WHERE ...] [--] -m MODULE [ARGS]"""

_DEBUG_EXAMPLES = """
examples:
  retrograd debug train.py
  retrograd debug --break 'blocks.3*' 'norm > 100' -- train.py --lr 0.1
  retrograd debug --break non-finite -m package.train

A prompt opens where a pass stops: at a breakpoint, at the first gradient that is not finite, at an exception.
"""

_WATCH_EXAMPLES = """
examples:
  retrograd watch runs/train-20250131-120000
  retrograd watch --once --limit 60 traces/train-20250131-120000

It reads what the processes leave in their files, so it also works on one that hangs, or has died.
"""

_REPLAY_EXAMPLES = """
examples:
  retrograd replay traces/train-20250131-120000/rank00000/bundles/blocks.3-SoftmaxBackward0

The exit code is 0 if the node gives the same as before, bit for bit, and 1 if not, or if there is nothing to compare.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line.

    Args:
        words: what follows ``retrograd``; that of the process by default.

    Returns:
        The exit code: 0, 1 for a replay that differs or a pass that hangs, or 2 for what cannot be carried out.
        ``run``, ``trace``, ``inventory`` and ``debug`` do not return: the process becomes the command.
    """
    words = sys.argv[1:] if words is None else words
    try:
        arguments = _parse(words)
        code = arguments.handle(arguments)
        sys.stdout.flush()
    except RetrogradError as error:
        print(f"retrograd: {show_plainly(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `retrograd view RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # die of it, so that a shell script around us stops too
        return 128 + signal.SIGINT
    return code or 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    command: list[str] = []
    if words and words[0] in _LAUNCHERS:
        from retrograd.launch.command import split_command

        options, command = split_command(words[1:])
        if words[0] == "explain" and not _is_command(command):
            command = []
        else:
            words = [words[0], *options]
    return _make_parser().parse_args(words, argparse.Namespace(command=command))


def _is_command(command: Sequence[str]) -> bool:
    """Whether this is a command, not a run with options behind it."""
    from retrograd.launch.explaining import is_command

    return bool(command) and is_command(command)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrograd",
        description="Record what happens inside loss.backward(), and see it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_explain(commands)
    _add_compare(commands)
    _add_report(commands)
    _add_view(commands)
    _add_export(commands)
    _add_trace(commands)
    _add_inventory(commands)
    _add_debug(commands)
    _add_watch(commands)
    _add_replay(commands)
    _add_install_hook(commands)
    return parser


def _add_run(commands: Commands) -> None:
    parser = _add_command(commands, "run", _run, "record a training script, unmodified", _RUN_EXAMPLES)
    parser.usage = _RUN_USAGE
    parser.add_argument("-o", "--output", metavar="DIR", help="run folder (default: runs/<script>-<date>-<time>)")
    parser.add_argument(
        "--sites", nargs="+", action="extend", metavar="PATTERN", help="what to record, as in 'blocks.*:output.grad'"
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--every", type=int, default=1, metavar="N", help="record every N-th step")
    steps.add_argument("--schedule", choices=["log"], help="record every step at first, then ever fewer")
    parser.add_argument(
        "--tensors", nargs="+", action="extend", metavar="PATTERN", help="sites whose tensors are kept whole"
    )
    parser.add_argument("--no-histogram", dest="histogram", action="store_false", help="no histograms of exponents")
    parser.add_argument(
        "--inventory", type=int, metavar="N", help="show in the report what autograd keeps in backward pass N, from 0"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run that DIR holds")
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing of findings, or of what goes well")


def _add_explain(commands: Commands) -> None:
    does = "say what is wrong with a run, or with a script that is run for it"
    parser = _add_command(commands, "explain", _explain, does, _EXPLAIN_EXAMPLES)
    parser.usage = _EXPLAIN_USAGE
    _add_run_folder(parser, is_needed=False)
    parser.add_argument("-v", "--verbose", action="store_true", help="what each finding rests on, and what it explains")
    parser.add_argument("--all", action="store_true", help="all findings (default: at most five)")
    parser.add_argument("--not-checked", action="store_true", help="what could not be checked, and why")
    parser.add_argument("--json", action="store_true", help="all findings, as lines of JSON")
    parser.add_argument(
        "--fail-on",
        choices=["critical", "warning", "note"],
        help="exit with 1 if there is a finding that is as severe, or worse",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of a command: end it after N steps")
    parser.add_argument("-o", "--output", metavar="DIR", help="of a command: run folder, as of `retrograd run`")


def _add_compare(commands: Commands) -> None:
    parser = _add_command(commands, "compare", _compare, "say where two runs part first, and why", _COMPARE_EXAMPLES)
    parser.add_argument("a", metavar="A", type=Path, help="the folder of a run, or of one of its ranks")
    parser.add_argument("b", metavar="B", type=Path, help="another one")
    parser.add_argument(
        "--noise",
        nargs="+",
        default=[],
        metavar="RUN",
        type=Path,
        help="runs of the same program as A, of the same seed",
    )
    parser.add_argument("--json", action="store_true", help="the verdict and each difference, as lines of JSON")


def _add_report(commands: Commands) -> None:
    parser = _add_command(commands, "report", _report, "write a run as one HTML file that opens offline")
    _add_run_folder(parser, is_needed=False)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the file (default: RUN/report.html)")
    parser.add_argument("--against", metavar="RUN", type=Path, help="show the difference to this run, or rank's folder")


def _add_view(commands: Commands) -> None:
    parser = _add_command(commands, "view", _view, "print a run as a table")
    _add_run_folder(parser, is_needed=False)
    parser.add_argument("--sites", nargs="+", metavar="PATTERN", help="which sites, as in 'blocks.*:output.grad'")
    parser.add_argument("--statistic", default="rms", help="which statistic (default: rms)")
    form = parser.add_mutually_exclusive_group()
    keys = ["calls", "name", "value", "gradient", "zeros", "nonfinite", "update"]
    form.add_argument("--sort", default="calls", choices=keys, help="call order, name, or a column, largest first")
    form.add_argument("--map", action="store_true", help="draw sites x steps instead of the table")


def _add_export(commands: Commands) -> None:
    parser = _add_command(commands, "export", _export, "write a run for other tools")
    _add_run_folder(parser)
    parser.add_argument("--to", choices=["tensorboard", "csv"], required=True, help="what to write")
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, help="where (default: inside RUN)")


def _add_trace(commands: Commands) -> None:
    does = "trace every node of some backward passes of an unmodified script"
    parser = _add_command(commands, "trace", _trace, does, _TRACE_EXAMPLES)
    parser.usage = _TRACE_USAGE
    parser.add_argument("-o", "--output", metavar="DIR", help="folder (default: traces/<script>-<date>-<time>)")
    parser.add_argument(
        "--steps", default="3", metavar="N|A:B", help="the first N backward passes, or A to B-1 from 0 (default: 3)"
    )
    parser.add_argument("--nodes", metavar="PATTERN", help="nodes to show, as in 'blocks.3*'; the files hold all")
    parser.add_argument("--live", action="store_true", help="print each of them to stderr as soon as it has run")
    parser.add_argument("--norms", action="store_true", help="norms of what goes in and comes out")
    parser.add_argument("--memory", action="store_true", help="bytes that each node gains")
    parser.add_argument(
        "--by", default="node", choices=["node", "module", "kind"], help="what makes a line of the table"
    )
    parser.add_argument("--sort", default="time", choices=["time", "memory"], help="order of the table")


def _add_inventory(commands: Commands) -> None:
    does = "find what autograd keeps between forward and backward in one step of an unmodified script"
    parser = _add_command(commands, "inventory", _inventory, does, _INVENTORY_EXAMPLES)
    parser.usage = _INVENTORY_USAGE
    parser.add_argument("-o", "--output", metavar="DIR", help="folder (default: inventories/<script>-<date>-<time>)")
    parser.add_argument(
        "--step", type=int, default=1, metavar="N", help="which backward pass, counted from 0 (default: 1, the second)"
    )
    parser.add_argument(
        "--by", default="module", choices=["module", "node", "tensor"], help="what makes a line of the table"
    )
    parser.add_argument("--timed", action="store_true", help="measure how long operations take")


def _add_debug(commands: Commands) -> None:
    does = "stop inside the backward passes of an unmodified script, and look"
    parser = _add_command(commands, "debug", _debug, does, _DEBUG_EXAMPLES)
    parser.usage = _DEBUG_USAGE
    parser.add_argument(
        "--break",
        dest="breakpoints",
        nargs="+",
        action="extend",
        metavar="WHERE",
        help="nodes, as in 'blocks.3*', or conditions, as in non-finite and 'norm > 100'",
    )
    parser.add_argument(
        "--no-non-finite", dest="nonfinite", action="store_false", help="go on where a gradient is not finite"
    )


def _add_watch(commands: Commands) -> None:
    does = "say where each process of a run is in its backward pass, also when it hangs"
    parser = _add_command(commands, "watch", _watch, does, _WATCH_EXAMPLES)
    _add_run_folder(parser)
    parser.add_argument("--once", action="store_true", help="say it once, and end")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="how long a node may take until it counts as hanging"
    )


def _add_replay(commands: Commands) -> None:
    does = "run one node of a backward pass again, from its bundle"
    parser = _add_command(commands, "replay", _replay, does, _REPLAY_EXAMPLES)
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="folder of the bundle")
    parser.add_argument(
        "--any-torch", action="store_true", help="try it though another version of torch has written it"
    )
    parser.add_argument(
        "--trust", action="store_true", help="you know who wrote it: carry out whatever it names, without checks"
    )


def _add_install_hook(commands: Commands) -> None:
    does = "let isolated interpreters (python -I) of this environment be recorded too"
    parser = _add_command(commands, "install-hook", _install_hook, does)
    parser.add_argument("--remove", action="store_true", help="take the hook away again")


def _add_command(
    commands: Commands, name: str, handle: Callable[[argparse.Namespace], int | None], does: str, examples: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(handle=handle)
    return parser


def _add_run_folder(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    if is_needed:
        parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    else:
        parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="folder of a run (default: the newest)")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"retrograd {version('retrograd')}")
        parser.exit()


def _run(arguments: argparse.Namespace) -> None:
    from retrograd.launch.start import start_command

    start_command(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from retrograd.launch.explaining import explain_as_asked

    return explain_as_asked(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    from retrograd.comparing.compare import compare

    comparison = compare(arguments.a, arguments.b, noise=arguments.noise)
    print(comparison.as_json_lines() if arguments.json else show_plainly(f"{comparison}\n"), end="")
    return 0 if comparison else 1


def _report(arguments: argparse.Namespace) -> None:
    from retrograd.runs.latest import find_latest
    from retrograd.runs.reader import open_run
    from retrograd.views.report import write_report

    against = open_run(arguments.against) if arguments.against else None
    print(write_report(open_run(arguments.run or find_latest()), arguments.output, against=against))


def _view(arguments: argparse.Namespace) -> None:
    from retrograd.findings.explain import explain
    from retrograd.runs.latest import find_latest
    from retrograd.runs.reader import open_run
    from retrograd.views.findings_text import list_findings
    from retrograd.views.table import print_table
    from retrograd.views.text_heatmap import print_heatmap

    run = open_run(arguments.run or find_latest())
    findings = explain(run)
    print("\n".join(list_findings(findings) or [findings.headline]))
    if arguments.map:
        print_heatmap(run, arguments.sites, statistic=arguments.statistic)
    else:
        print_table(run, arguments.sites, statistic=arguments.statistic, sort=arguments.sort)


def _export(arguments: argparse.Namespace) -> None:
    from retrograd.runs.export import export
    from retrograd.runs.reader import open_run

    print(export(open_run(arguments.run), arguments.to, arguments.output))


def _trace(arguments: argparse.Namespace) -> None:
    from retrograd.launch.trace_request import start_trace

    start_trace(arguments)


def _inventory(arguments: argparse.Namespace) -> None:
    from retrograd.launch.inventory_request import start_inventory

    start_inventory(arguments)


def _debug(arguments: argparse.Namespace) -> None:
    from retrograd.launch.debugging import start_debugging

    start_debugging(arguments)


def _watch(arguments: argparse.Namespace) -> int:
    from retrograd.views.hang_report import watch_run

    return watch_run(arguments.run, once=arguments.once, limit=arguments.limit)


def _replay(arguments: argparse.Namespace) -> int:
    from retrograd.bundles.replayed import replay

    replayed = replay(arguments.bundle, strict=not arguments.any_torch, trusted=arguments.trust)
    print(replayed)
    return 0 if replayed else 1


def _install_hook(arguments: argparse.Namespace) -> None:
    from retrograd.launch.hook_file import install_hook, remove_hook

    site_packages = Path(sysconfig.get_path("purelib"))
    if arguments.remove:
        print(f"removed {remove_hook(site_packages)}")
    else:
        print(f"installed {install_hook(site_packages)}")


if __name__ == "__main__":
    sys.exit(main())
