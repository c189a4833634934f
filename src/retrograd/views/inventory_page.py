"""``rg.write_inventory``: an inventory as one HTML file: held bytes over forward and backward, and by module."""

from __future__ import annotations

import os
from pathlib import Path

from retrograd.errors import SavedTensorError
from retrograd.files import write_text
from retrograd.inventory.inventory import Inventory
from retrograd.views.kept.payload import pack_inventory, tell_inventory
from retrograd.views.page.frame import frame_page


def write_inventory(
    inventory: Inventory, path: str | os.PathLike[str] = "inventory.html", *, title: str = "What autograd keeps"
) -> Path:
    """Write an inventory as one HTML file that opens offline.

    It shows the bytes held over forward and backward with the peak named, a treemap by module of what is alive at the
    position that is chosen, and every tensor there with all that is known of it.

    Args:
        inventory: as made by ``rg.take_inventory()``, or loaded.
        path: the file.
        title: the heading.

    Returns:
        The path.

    Raises:
        SavedTensorError: the file cannot be written.
    """
    target = Path(path)
    try:
        write_text(target, build_page(inventory, title))
    except OSError as error:
        raise SavedTensorError(
            f"The inventory cannot be written to {str(target)!r}: {error.strerror or error}.",
            repair="give a file in a folder that exists and can be written.",
        ) from error
    return target


def build_page(inventory: Inventory, title: str) -> str:
    """The page as text. Whatever comes from the inventory is escaped: it can be neither markup nor script."""
    facts = tell_inventory(inventory)
    return frame_page(
        "retrograd.views.inventory_assets",
        title,
        {"inventory": facts},
        {"inventory": pack_inventory(inventory)},
        parts={"kept": "retrograd.views.kept"},
        words={"about": facts["about"]},
    )
