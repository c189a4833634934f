# ruff: noqa: INP001  # a folder of pages, not a package
"""Draws docs/images/report.png, the report of `make demo`, and served.png, the page of its script while it trains.

make demo && .venv/bin/python docs/make_picture.py [report compared served graph inventory]

compared.png is the page of `retrograd compare healthy fast deeper --report`, scrolled to its map: three runs of
examples/train_digits.py, as it is, with --learning-rate 0.3, and with a seventh block and zeros for weights of the
fourth. graph.png is the backward graph of GPT-2, inventory.png what autograd keeps of a ResNet-50.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from transformers import GPT2Config, GPT2LMHeadModel

import retrograd as rg

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.nets import make_resnet  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PROGRAM = Path(sys.executable).with_name("retrograd")
VIEW = "#open=blocks.4.conv1%3Aoutput"
SETTLED = 800  # milliseconds until curves are drawn
LONG_ENOUGH = re.compile(
    r"^(1[2-9]|[2-9]\d)\d \(0 to"
)  # steps of a run that is followed: 120 or more, for a page skips some
RUNS = {"healthy": [], "fast": ["--learning-rate", "0.3"], "deeper": []}
SEVENTH = ("            ResidualBlock(4 * width, 4 * width),\n", "        self.dropout = nn.Dropout(0.1)\n")
ZEROS = "        nn.init.zeros_(self.blocks[4].conv2.weight)\n"


def take(page: Page, name: str, *, whole: bool = False) -> None:
    """A screenshot in docs/images, in 256 colours: a third of the bytes."""
    taken = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
    usual = sorted(taken.getcolors(1 << 24), reverse=True)[:160]
    rare = taken.quantize(96, Image.Quantize.MAXCOVERAGE).getpalette()[: 3 * 96]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, color in usual for part in color] + rare)
    few = taken.quantize(palette=palette, dither=Image.Dither.NONE)
    few.save(IMAGES / f"{name}.png", optimize=True)
    page.close()


def draw_report(browser: Browser) -> None:
    """The report of the demo."""
    page = browser.new_page(viewport={"width": 1440, "height": 880})
    page.goto((ROOT / "runs" / "demo" / "report.html").resolve().as_uri() + VIEW)
    page.wait_for_selector(".panel .uplot")
    page.wait_for_timeout(SETTLED)
    show_map(page)
    take(page, "report")


def draw_graph(browser: Browser) -> None:
    """The backward graph of GPT-2, one attention opened."""
    model = GPT2LMHeadModel(GPT2Config())
    words = torch.randint(50257, (2, 32))
    with rg.record_origins(), tempfile.TemporaryDirectory() as home:
        path = rg.draw_graph(model(words, labels=words).loss, Path(home, "graph.html"))
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(path.as_uri())
        page.locator("#search").fill("h.0.attn#1")
        page.keyboard.press("Enter")
        page.wait_for_timeout(SETTLED)
        page.locator(".match").press("Enter")
        page.wait_for_timeout(SETTLED)
        take(page, "graph")


def draw_inventory(browser: Browser) -> None:
    """What autograd keeps of a ResNet-50, its largest tensor chosen."""
    net = make_resnet()
    with tempfile.TemporaryDirectory() as home:
        net.step()  # a first pass takes longer
        inventory = rg.take_inventory(net.model, net.inputs, net.loss)
        path = rg.write_inventory(inventory, Path(home, "inventory.html"))
        page = browser.new_page(viewport={"width": 1280, "height": 905})
        page.goto(path.as_uri())
        page.wait_for_timeout(SETTLED)
        page.locator("#treemap").click(position={"x": 60, "y": 90})
        page.wait_for_timeout(SETTLED)
        page.locator("#details dd", has_text=str(ROOT)).evaluate(
            "(line, root) => (line.textContent = line.textContent.replace(root, ''))", f"{ROOT}/"
        )
        take(page, "inventory")


def draw_served(browser: Browser) -> None:
    """The page of a run that is recorded meanwhile, in the dark theme."""
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "digits"
        words = [PROGRAM, "run", "--live", "-o", run, "examples/train_digits.py"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(words, cwd=ROOT, stdout=nowhere, stderr=pipe, text=True) as training:
            assert training.stderr is not None
            address = next(word for line in training.stderr for word in line.split() if word.startswith("http://"))
            page = browser.new_page(viewport={"width": 1440, "height": 880}, color_scheme="dark")
            page.goto(address)
            page.wait_for_selector("html[data-ready=yes] .label", timeout=60_000)
            page.locator(".label", has_text="relu").first.click()
            page.wait_for_selector(".panel .uplot")
            page.get_by_text(LONG_ENOUGH).wait_for(timeout=300_000)
            page.wait_for_timeout(5 * SETTLED)  # its curves come a little later
            show_map(page)
            take(page, "served")
            training.terminate()


def draw_compared(browser: Browser) -> None:
    """The page of three runs over each other, at its map."""
    with tempfile.TemporaryDirectory() as home:
        plain = (ROOT / "examples" / "train_digits.py").read_text()
        block, after = SEVENTH
        assert block in plain
        assert after in plain
        for name, words in RUNS.items():
            script = Path(home, "train_digits.py")
            is_deeper = name == "deeper"
            script.write_text(plain.replace(block, 2 * block).replace(after, ZEROS + after) if is_deeper else plain)
            command = [PROGRAM, "run", "-q", "-o", name, script, "--epochs", "8", *words]
            subprocess.run(command, cwd=home, check=True, stdout=subprocess.DEVNULL)
        words = [PROGRAM, "compare", *RUNS, "--report", "-o", "compared.html"]
        found = subprocess.run(words, cwd=home, check=False, stdout=subprocess.DEVNULL)
        assert found.returncode == 1  # they differ
        page = browser.new_page(viewport={"width": 1440, "height": 880})
        page.goto(Path(home, "compared.html").as_uri())
        page.wait_for_selector("html[data-ready=yes] .label")
        page.wait_for_timeout(SETTLED)
        show_map(page)
        take(page, "compared")


def show_map(page: Page) -> None:
    """Scroll to the scalars and the map, below what the page says of the run."""
    page.locator("#map").evaluate("map => scrollTo(0, map.getBoundingClientRect().top + scrollY - 12)")
    page.wait_for_timeout(SETTLED)


DRAWN = {
    "report": draw_report,
    "compared": draw_compared,
    "served": draw_served,
    "graph": draw_graph,
    "inventory": draw_inventory,
}

if __name__ == "__main__":
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in sys.argv[1:] or DRAWN:
            DRAWN[name](browser)
        browser.close()
