"""The options that the benchmarks of steps share, and how they print what they have measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict

import torch

from interleaved import Measure, print_table


def make_plain_parser(text: str, nets: Collection[str]) -> argparse.ArgumentParser:
    """A parser for a benchmark that says this of itself and measures these nets. One thread is used from here on."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--nets", nargs="+", choices=nets, default=list(nets))
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation")
    return parser


def make_parser(text: str, nets: Collection[str]) -> argparse.ArgumentParser:
    """The same for one that measures for so many seconds, and prints by :func:`print_measures`."""
    parser = make_plain_parser(text, nets)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--json", action="store_true", help="print the measures as JSON")
    return parser


def print_measures(measures: list[Measure], arguments: argparse.Namespace) -> None:
    """Print what was measured as it was asked for."""
    if arguments.json:
        print(json.dumps([asdict(measure) for measure in measures], indent=1))
    else:
        print_table(measures, arguments.nets, arguments.markdown)
