"""The notebook runs in a kernel of its own, and shows in each place the kind of thing that is stored there."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.examples.scripts import EXAMPLES

TOUR = EXAMPLES / "tour.ipynb"
SHOWN = {
    "plan": "table",
    "record-run": "table",
    "series-table": "table",
    "series-plot": "picture",
    "kept-tensors": "picture",
    "matrix-table": "table",
    "matrix-plot": "picture",
    "pandas-frame": "table",
    "rewrite-rule": "picture",
    "trace-run": "table",
    "trace-print": "text",
    "graph-walk": "tree",
    "graph-find": "text",
    "inventory-table": "table",
    "adjoint-right": "table",
    "adjoint-wrong": "table",
    "explain-healthy": "findings",
    "explain-sick": "findings",
}
"""What each cell shows that shows anything."""

LINK = re.compile(r"\]\((?P<path>[^)#:\s]+)\)")


class Reader(HTMLParser):
    """The elements of an output by name, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def execute(kernels: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of this interpreter, whichever kernels are installed."""
    (kernels / "own").mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "own", "language": "python"}
    (kernels / "own" / "kernel.json").write_text(json.dumps(spec))
    manager = AsyncKernelManager(
        kernel_name="own",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernels)], ensure_native_kernel=False),
    )
    notebook = nbformat.read(TOUR, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(notebook, km=manager, timeout=120, record_timing=False)
    return client.execute(cleanup_kc=True, cwd=str(kernels))  # the kernel ends with it


def code_cells(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def kinds(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Cell → what it shows; a cell that shows nothing is missing."""
    return {cell.id: kind_of(cell) for cell in code_cells(notebook) if cell.outputs}


def kind_of(cell: nbformat.NotebookNode) -> str:
    if all(output.get("name") == "stdout" for output in cell.outputs):
        return "text"
    (output,) = cell.outputs
    data = output.data
    if "image/png" in data:
        width, height = size_of_png(base64.b64decode(data["image/png"]))
        return "picture" if width > 100 and height > 100 else "speck"
    return kind_of_page(data)


def kind_of_page(data: Mapping[str, str]) -> str:
    assert output_is_ours(data), data.get("text/html", data)
    found = Reader(data["text/html"])
    if {"table", "tr", "td"} <= set(found.names):
        return "table"
    if "finding" in found.text:
        return "findings"
    return "tree" if "pre" in found.names and found.text.count("\n") > 5 else "nothing"


def output_is_ours(data: Mapping[str, Any]) -> bool:
    return 'class="retrograd"' in data["text/html"] or 'class="dataframe"' in data["text/html"]


def size_of_png(content: bytes) -> tuple[int, int]:
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def page_of(notebook: nbformat.NotebookNode, name: str) -> Reader:
    (cell,) = (cell for cell in notebook.cells if cell.id == name)
    return Reader(cell.outputs[0].data["text/html"])


@pytest.mark.slow
def test_the_tour_runs_and_shows_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    stored = nbformat.read(TOUR, as_version=4)
    nbformat.validate(stored)
    done = execute(tmp_path / "kernels")
    assert kinds(done) == kinds(stored) == SHOWN
    for notebook in (done, stored):
        assert "no findings" in page_of(notebook, "explain-healthy").text
        assert "applies softmax again" in page_of(notebook, "explain-sick").text
        assert "0.5 times the right gradient" in page_of(notebook, "adjoint-wrong").text


def test_what_is_stored_is_small_names_no_machine_and_links_somewhere() -> None:
    text = TOUR.read_text()
    assert len(text) < 600_000
    assert not re.search(r"ipykernel_\d|/tmp/|/home/", text)
    links = LINK.findall("\n".join(cell.source for cell in nbformat.read(TOUR, as_version=4).cells))
    assert len(links) > 5
    assert all((EXAMPLES / link).is_file() for link in links)
