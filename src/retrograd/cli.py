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

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """
examples:
  retrograd run train.py --lr 0.1                record an unmodified script
  retrograd report runs/train-20250131-120000    one HTML file that shows the whole run
  retrograd view runs/train-20250131-120000      a table in the terminal
"""

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
  retrograd run torchrun --nproc-per-node 2 train.py

What stands behind the command belongs to it, and so do its output and its exit code. We write one line to stderr
when it starts, and one when it ends.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Carry out a command line.

    Args:
        words: what follows ``retrograd``; that of the process by default.

    Returns:
        The exit code: 0, or 2 for what cannot be carried out. ``retrograd run`` does not return: the process becomes
        the command.
    """
    words = sys.argv[1:] if words is None else words
    try:
        arguments = _parse(words)
        arguments.handle(arguments)
        sys.stdout.flush()
    except RetrogradError as error:
        print(f"retrograd: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough, as in `retrograd view RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # die of it, so that a shell script around us stops too
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    command: list[str] = []
    if words and words[0] == "run":
        from retrograd.launch.command import split_command

        options, command = split_command(words[1:])
        words = ["run", *options]
    return _make_parser().parse_args(words, argparse.Namespace(command=command))


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
    _add_report(commands)
    _add_view(commands)
    _add_export(commands)
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
    parser.add_argument("--resume", action="store_true", help="go on with the run that DIR holds")


def _add_report(commands: Commands) -> None:
    parser = _add_command(commands, "report", _report, "write a run as one HTML file that opens offline")
    _add_run_folder(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the file (default: RUN/report.html)")
    parser.add_argument("--against", metavar="RUN", type=Path, help="show the difference to this run, or rank's folder")


def _add_view(commands: Commands) -> None:
    parser = _add_command(commands, "view", _view, "print a run as a table")
    _add_run_folder(parser)
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


def _add_install_hook(commands: Commands) -> None:
    does = "let isolated interpreters (python -I) of this environment be recorded too"
    parser = _add_command(commands, "install-hook", _install_hook, does)
    parser.add_argument("--remove", action="store_true", help="take the hook away again")


def _add_command(
    commands: Commands, name: str, handle: Callable[[argparse.Namespace], None], does: str, examples: str = ""
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


def _add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"retrograd {version('retrograd')}")
        parser.exit()


def _run(arguments: argparse.Namespace) -> None:
    from retrograd.launch.start import start_command

    start_command(arguments)


def _report(arguments: argparse.Namespace) -> None:
    from retrograd.runs.reader import open_run
    from retrograd.views.report import write_report

    against = open_run(arguments.against) if arguments.against else None
    print(write_report(open_run(arguments.run), arguments.output, against=against))


def _view(arguments: argparse.Namespace) -> None:
    from retrograd.runs.reader import open_run
    from retrograd.views.table import print_table
    from retrograd.views.text_heatmap import print_heatmap

    run = open_run(arguments.run)
    if arguments.map:
        print_heatmap(run, arguments.sites, statistic=arguments.statistic)
    else:
        print_table(run, arguments.sites, statistic=arguments.statistic, sort=arguments.sort)


def _export(arguments: argparse.Namespace) -> None:
    from retrograd.runs.export import export
    from retrograd.runs.reader import open_run

    print(export(open_run(arguments.run), arguments.to, arguments.output))


def _install_hook(arguments: argparse.Namespace) -> None:
    from retrograd.launch.hook_file import install_hook, remove_hook

    site_packages = Path(sysconfig.get_path("purelib"))
    if arguments.remove:
        print(f"removed {remove_hook(site_packages)}")
    else:
        print(f"installed {install_hook(site_packages)}")


if __name__ == "__main__":
    sys.exit(main())
