"""``retrograd inventory``: its options, which travel to the processes of the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.launch.options import option
from retrograd.core.launch.requests import check_number, folder_option
from retrograd.core.launch.start import Request


@dataclass(frozen=True, kw_only=True)
class InventoryRequest(Request):
    """Find what autograd keeps between forward and backward in one step of an unmodified script."""

    name: ClassVar[str] = "inventory"
    promise: ClassVar[str] = "taking an inventory of {} into {}"
    parent: ClassVar[str] = "inventories"
    done: ClassVar[str] = "listed"
    leaves: ClassVar[str] = "rank*/inventory.html"
    see: ClassVar[str] = "see it in a browser: {}/rank*/inventory.html"
    examples: ClassVar[str] = """
examples:
  retrograd inventory train.py --batch-size 256
  retrograd inventory --pass 100 --by tensor -m package.train

DIR/rank*/inventory.html opens in a browser, and rg.Inventory.load() reads DIR/rank*/inventory.parquet. The table goes
to stderr when the script has ended; the script's output and exit code are its own.
"""

    shown: str = folder_option("inventories")
    number: int = option(
        "--pass",
        1,
        "which backward pass, counted from 0 (default: 1, the second)",
        metavar="N",
        check=check_number,
    )
    by: Literal["module", "node", "tensor"] = option("--by", "module", "what makes a line of the table")
    timed: bool = option("--timed", False, "measure how long operations take")


REQUESTS: tuple[type[Request], ...] = (InventoryRequest,)
