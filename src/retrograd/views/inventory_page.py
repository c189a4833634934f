"""``rg.write_inventory``: an inventory as one HTML file: held bytes over forward and backward, and by module.

Like the report's page it has a content security policy that lets nothing run but its own script, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from importlib import resources
from pathlib import Path
from string import Template

from retrograd.errors import SavedTensorError
from retrograd.saved.inventory import Inventory
from retrograd.saved.inventory_text import print_size
from retrograd.views.inventory_payload import pack_inventory
from retrograd.views.report.page import escape_json, find_version, wrap_module

_REPORT = resources.files("retrograd.views.report")
_PICTURE = resources.files("retrograd.views.picture")
_HERE = resources.files("retrograd.views.inventory_assets")
_SCRIPTS = (
    (_REPORT, "dom.js"), (_REPORT, "payload.js"), (_PICTURE, "theme.js"), (_HERE, "format.js"), (_HERE, "store.js"),
    (_HERE, "tiles.js"), (_HERE, "details.js"), (_HERE, "timeline.js"), (_HERE, "treemap.js"), (_HERE, "modules.js"),
    (_HERE, "tensors.js"), (_HERE, "main.js"),
)  # fmt: skip
"""Those that are imported before those that import them."""

_STYLES = ((_REPORT, "theme.css"), (_HERE, "page.css"))


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
        target.write_text(build_page(inventory, title), encoding="utf-8", newline="\n")
    except OSError as error:
        raise SavedTensorError(
            f"The inventory cannot be written to {str(target)!r}: {error.strerror or error}.",
            repair="give a file in a folder that exists and can be written.",
        ) from error
    return target


def build_page(inventory: Inventory, title: str) -> str:
    """The page as text. Whatever comes from the inventory is escaped: it can be neither markup nor script."""
    style = "\n".join(home.joinpath(f"css/{name}").read_text(encoding="utf-8") for home, name in _STYLES)
    modules = (wrap_module(name, home.joinpath(f"js/{name}").read_text(encoding="utf-8")) for home, name in _SCRIPTS)
    script = "\n".join(['"use strict";', *modules])
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    )
    facts = {"peak": inventory.peak.position, "notes": list(inventory.notes), "passes": inventory.passes}
    return Template(_HERE.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        policy=policy,
        version=html.escape(find_version()),
        title=html.escape(title),
        about=html.escape(_describe(inventory)),
        style=style,
        facts=escape_json(facts),
        inventory=pack_inventory(inventory),
        script=script,
    )


def _describe(inventory: Inventory) -> str:
    if not inventory.passes:
        return "No backward pass was seen."
    return (
        f"{len(inventory.storages):,} pieces of memory are kept, {print_size(inventory.resident)}; copies of each "
        f"saved tensor would take {print_size(inventory.asked)}. Peak: {print_size(inventory.peak.bytes)}."
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
