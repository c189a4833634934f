"""Replays folders that somebody else has written, each in a process of its own.

    python -m tests.bundles.hostile FOLDER

prints a line of JSON for each bundle in the folder: its name, and what came of it.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

from retrograd.bundles.replay import replay
from tests.apart import call_apart


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has no others
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        came = call_apart(lambda folder=folder: str(replay(folder)))
        print(json.dumps([folder.name, *came]), flush=True)


if __name__ == "__main__":
    main()
