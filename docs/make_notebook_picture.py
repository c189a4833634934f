# ruff: noqa: INP001  # a folder of pages, not a package
"""Draws docs/images/live_cell.png: what a cell shows of a recording while the next cell trains.

.venv/bin/python docs/make_notebook_picture.py

The cells run in a kernel of IPython, as under Jupyter; the page around them is written here.
"""

import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel
from playwright.sync_api import sync_playwright
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parents[1]
CELLS = [
    "import torch\nimport retrograd as rg\nfrom train_digits import DigitNet",
    "model = DigitNet(8)\nrecording = rg.record(model)\nrecording",
    """\
from sklearn.datasets import load_digits
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(data.target)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(2000):
    batch = torch.randint(len(labels), (64,))
    optimizer.zero_grad()
    scores = model(images[batch])
    torch.nn.functional.cross_entropy(scores, labels[batch]).backward()
    optimizer.step()
recording.close()""",
]
LONG_ENOUGH = 70  # steps
PATIENCE = 300  # seconds
STYLE = """
body { background: #111; color: #e0e0e0; font: 13px system-ui, sans-serif; margin: 14px 12px; width: 720px; }
.cell { display: grid; grid-template-columns: 66px 1fr; margin-bottom: 12px; }
.prompt, pre { font: 13px/18px "DejaVu Sans Mono", monospace; margin: 0; }
.prompt { color: #b0b0b0; padding-top: 6px; }
.code, .code pre { background: #212121 !important; }
.code { border: 1px solid #616161; padding: 5px 6px; }
.shown { grid-column: 2; padding-top: 8px; }
"""


def run_cells() -> str:
    """What the second cell shows once the third one has trained for a while, as HTML."""
    manager, client = start_new_kernel(cwd=str(ROOT / "examples"))
    try:
        for cell in CELLS[:-1]:
            client.execute_interactive(cell, timeout=PATIENCE, output_hook=lambda message: None)
        client.execute(CELLS[-1])
        while True:
            shown = find_shown(client.get_iopub_msg(timeout=PATIENCE))
            step = re.search(r"step (\d+)", shown)
            if step and int(step[1]) >= LONG_ENOUGH:
                return shown
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def find_shown(message: dict[str, Any]) -> str:
    """What a message brings up to date; empty for any other."""
    is_shown = message["msg_type"] == "update_display_data"
    return str(message["content"]["data"]["text/html"]) if is_shown else ""


def frame(output: str) -> str:
    """A page of the cells, with the output of the second one."""
    colors = HtmlFormatter(style="github-dark", nowrap=True)
    parts = []
    for number, cell in enumerate(CELLS, 1):
        prompt = escape("[*]:" if number == len(CELLS) else f"[{number}]:")
        code = f'<div class="code"><pre>{highlight(cell, PythonLexer(), colors)}</pre></div>'
        below = f'<div class="shown">{output}</div>' if number == len(CELLS) - 1 else ""
        parts.append(f'<div class="cell"><div class="prompt">{prompt}</div>{code}{below}</div>')
    return f"<meta charset=utf-8><style>{STYLE}{colors.get_style_defs('pre')}</style>{''.join(parts)}"


if __name__ == "__main__":
    page_text = frame(run_cells())
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 744, "height": 200}, color_scheme="dark")
        page.set_content(page_text)
        page.screenshot(path=ROOT / "docs" / "images" / "live_cell.png", full_page=True)
        browser.close()
