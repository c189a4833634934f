# ruff: noqa: INP001  # a folder of pages, not a package
"""Draws docs/images/live_cell.png, a cell that shows a recording while the next one trains, and notebook.png.

.venv/bin/python docs/make_notebook_picture.py

The cells run in a kernel of IPython, as under Jupyter; the page around them is written here.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel
from make_picture import take
from playwright.sync_api import sync_playwright
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[1]
DIGITS = """\
from sklearn.datasets import load_digits
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(data.target)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range({}):
    batch = torch.randint(len(labels), (64,))
    optimizer.zero_grad()
    scores = model(images[batch])
    torch.nn.functional.cross_entropy(scores, labels[batch]).backward()
    optimizer.step()
recording.close()"""
LIVE = [
    "import torch\nimport retrograd as rg\nfrom train_digits import DigitNet",
    "model = DigitNet(8)\nrecording = rg.record(model)\nrecording",
    DIGITS.format(2000),
]
SHOWN = [
    "import torch, retrograd as rg; from train_digits import DigitNet; model = DigitNet(8)\n"
    "recording = rg.record(model)\n" + DIGITS.format(80),
    "history = recording.history\nhistory.scalars",
    'history["blocks.2.*:output*"]',
    'history["head:weight.grad"]',
    'history.matrix("rms", "*relu*:output.grad")',
]
LONG_ENOUGH = 70  # steps
PATIENCE = 300  # seconds
STYLE = """
body { background: #111; color: #e0e0e0; font: 13px system-ui, sans-serif; margin: 14px 12px; width: 860px; }
.cell { display: grid; grid-template-columns: 66px 1fr; margin-bottom: 12px; }
.prompt, pre { font: 13px/18px "DejaVu Sans Mono", monospace; margin: 0; }
.prompt { color: #b0b0b0; padding-top: 6px; }
.code, .code pre { background: #212121 !important; }
.code { border: 1px solid #616161; padding: 5px 6px; }
.shown { grid-column: 2; padding-top: 8px; }
"""


@contextmanager
def open_kernel() -> Iterator[Any]:
    """A kernel in the folder of examples, as its client."""
    manager, client = start_new_kernel(cwd=str(ROOT / "examples"))
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cells(cells: list[str]) -> list[str]:
    """What each cell shows, as HTML."""
    outputs: list[str] = []
    with open_kernel() as client:
        for cell in cells:
            messages: list[dict[str, Any]] = []
            client.execute_interactive(cell, timeout=PATIENCE, output_hook=messages.append)
            outputs.append("".join(map(read, messages)))
    return outputs


def run_live() -> list[str]:
    """What the second cell shows once the third one has trained for a while."""
    with open_kernel() as client:
        for cell in LIVE[:-1]:
            client.execute_interactive(cell, timeout=PATIENCE, output_hook=lambda message: None)
        client.execute(LIVE[-1])
        while True:
            shown = read(client.get_iopub_msg(timeout=PATIENCE), "update_display_data")
            step = re.search(r"step (\d+)", shown)
            if step and int(step[1]) >= LONG_ENOUGH:
                return ["", shown, ""]


def read(message: dict[str, Any], kind: str = "execute_result") -> str:
    """What a message of a kind shows, as HTML; empty for any other."""
    return str(message["content"]["data"]["text/html"]) if message["msg_type"] == kind else ""


def frame(cells: list[str], outputs: list[str], running: int | None = None) -> str:
    """A page of cells and what they show."""
    colors = HtmlFormatter(style="github-dark", nowrap=True)
    parts = []
    for number, (cell, output) in enumerate(zip(cells, outputs, strict=True), 1):
        prompt = escape("[*]:" if number == running else f"[{number}]:")
        code = f'<div class="code"><pre>{highlight(cell, PythonLexer(), colors)}</pre></div>'
        below = f'<div class="shown">{output}</div>' if output else ""
        parts.append(f'<div class="cell"><div class="prompt">{prompt}</div>{code}{below}</div>')
    return f"<meta charset=utf-8><style>{STYLE}{colors.get_style_defs('pre')}</style>{''.join(parts)}"


if __name__ == "__main__":
    pages = {"live_cell": frame(LIVE, run_live(), len(LIVE)), "notebook": frame(SHOWN[1:], run_cells(SHOWN)[1:])}
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, text in pages.items():
            page = browser.new_page(viewport={"width": 884, "height": 200}, color_scheme="dark")
            page.set_content(text)
            take(page, name, whole=True)
        browser.close()
