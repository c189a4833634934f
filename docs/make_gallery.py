# ruff: noqa: INP001  # a folder of pages, not a package
"""Makes docs/gallery.md and its pictures: scripts of the corpus with a fault, each beside the same script without it.

.venv/bin/python docs/make_gallery.py               # some five minutes; with titles, these pictures alone
"""

import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "findings"))
from corpus import Case, read_corpus  # noqa: E402

PROGRAM = Path(sys.executable).with_name("retrograd")
IMAGES = ROOT / "docs" / "images" / "gallery"
SETTLED = 800  # milliseconds until curves are drawn
HIDDEN = "#map > .toolbar, #strip-choices, .hint, #notice, #scale, .swatch:has(.missing)"
LEAD = """<!-- Made by docs/make_gallery.py; change that, not this page. -->
# Gallery

What faults look like on [the map of the report](report.md#what-it-shows). Each is planted into a healthy script of our
[corpus](../benchmarks/README.md#whether-findings-are-right-findings), so the mended run below it is that script as it was. The
finding is printed as `retrograd explain` does, and *how to read this* says what to look at.

**How to read every picture.** Above are curves over the steps: the loss, at times another. Below is the map: a row is a
[site](concepts.md#site) in the order of the model, a column a step, and the colour a statistic of all elements there, darker
for larger. The bar above the map says which colour is which number: each map has its own. Mauve is exactly zero, vermilion
NaN or infinite. To get such a page of a run of yours: `retrograd run --open train.py`.

"""


@dataclass(frozen=True)
class Fault:
    """An entry of the gallery.

    Attributes:
        title: its heading, of which the files of its pictures are named.
        case: the name of the script in the corpus.
        view: what the address of the report holds after #.
        read: how to read the picture.
        options: of ``retrograd run``.
    """

    title: str
    case: str
    view: str
    read: str
    options: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """How its pictures are called."""
        return re.sub(r"\W+", "_", self.title.lower())


FAULTS = [
    Fault(
        "Dead units",
        "dead-units/digits_mlp",
        "",
        "The gradient comes from below. It ends at `3`, the ReLU whose units are all zero: above it every row is mauve, exactly "
        "zero, so nothing there learns. Mended, every row has a colour, and the loss falls.",
    ),
    Fault(
        "A gradient that vanishes",
        "vanishing/digits_mlp",
        "",
        "From the last row to the first the colour becomes paler, and the bar spans ten powers of ten: each sigmoid "
        "takes most of what is left. Mended, the bar spans less than two.",
    ),
    Fault(
        "A learning rate that is too high",
        "learning-rate-too-high/digits_mlp",
        "quantity=update&statistic=update_ratio&scalars=loss&scalars=update_ratio",
        "The map shows ‖Δw‖/‖w‖, how much of a weight one step changes. The first updates are as large as the weights or larger, "
        "the loss jumps up with them and never comes below its start. A usual ratio is about a thousandth.",
    ),
    Fault(
        "A step that explodes",
        "loss-spike/tiny_gpt",
        "scalars=loss&scalars=lr[0]",
        "All is well to the left of one column. There the rate jumps, the loss with it, and the gradients of all blocks "
        "change at once and do not come back: a cause that lies outside of the model. One that spreads from a layer begins in its row.",
    ),
    Fault(
        "An attention that has collapsed",
        "attention-collapse/tiny_gpt",
        "quantity=value&statistic=zero_share&filter=softmax",
        "A row is the softmax of a block, the colour the share of its weights that are exactly zero. Of a causal mask that is "
        "47 %, which the mended run shows throughout. Here it is 71 % at once and 93 % at the end: each position looks at one other.",
        ("--sites", "*", "*/softmax", "--"),
    ),
    Fault(
        "NaN",
        "nan-forward/mixture_of_experts",
        "quantity=value",
        "Vermilion is what is not finite. Its first column is the step, and the topmost row in that column the place: all rows below "
        "only inherit it.",
    ),
    Fault(
        "A graph that leaks",
        "graph-leaks/denoising_autoencoder",
        "scalars=loss&scalars=memory",
        "The map and the loss are those of the mended run, bit for bit: nothing is wrong with the numbers. The second curve "
        "is the memory of the process, which goes up to the end; mended, it stays after the first steps.",
    ),
]


def record(case: Case, options: tuple[str, ...], folder: Path) -> str:
    """Run a script of the corpus, write its report, and give what is found, as printed, without the card."""
    script = folder / f"{case.base}.py"
    script.write_text(case.text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.replace(f"{folder}/", "")

    call(str(PROGRAM), "run", "-q", "-o", "run", *options, script.name)
    call(str(PROGRAM), "report", "run")
    found = call(str(PROGRAM), "explain", "run")
    return found.partition("\n\n")[2].partition("\n\n")[2].strip() or found.splitlines()[0]


def draw(browser: Browser, report: Path, view: str, target: Path) -> None:
    """A screenshot of the curves and the map, without what one would press."""
    page = browser.new_page(viewport={"width": 760, "height": 800})
    page.goto(f"{report.as_uri()}#{view}")
    page.wait_for_selector("html[data-ready=yes]")
    page.locator("#unfold").click()
    page.evaluate("hidden => document.querySelectorAll(hidden).forEach(part => (part.style.display = 'none'))", HIDDEN)
    page.mouse.move(0, 0)
    page.wait_for_timeout(SETTLED)
    page.locator("#map").screenshot(path=target)
    page.close()


def show_repair(sick: Case, healthy: Case) -> str:
    """The lines that mend it, as a diff."""
    lines = difflib.unified_diff(sick.text.splitlines(), healthy.text.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def write_entry(fault: Fault, sick: Case, healthy: Case, found: str) -> str:
    """The section of one fault."""
    base = f"[{healthy.name}.py](../benchmarks/findings/healthy/{healthy.name}.py)"
    return f"""## {fault.title}

![{fault.title}: the map](images/gallery/{fault.stem}.png)

*How to read this.* {fault.read}

```text
{found}
```

Mended, {base}:

```diff
{show_repair(sick, healthy)}
```

![The same script without the fault: the map](images/gallery/{fault.stem}_mended.png)

"""


def make_gallery(browser: Browser, titles: list[str]) -> str:
    """All pictures, or those of some titles, and the page, whose other entries are left as they are."""
    cases = {case.name: case for case in read_corpus()}
    written = (ROOT / "docs" / "gallery.md").read_text()
    entries = []
    for fault in FAULTS:
        sick, healthy = cases[fault.case], cases[cases[fault.case].base]
        if titles and fault.title not in titles:
            entries.append(written[written.index(f"## {fault.title}\n") :].partition("\n## ")[0].rstrip("\n") + "\n\n")
            continue
        said = []
        for case, end in ((sick, ""), (healthy, "_mended")):
            with tempfile.TemporaryDirectory() as home:
                said.append(record(case, fault.options, Path(home)))
                draw(browser, Path(home, "run", "report.html"), fault.view, IMAGES / f"{fault.stem}{end}.png")
        print(f"{fault.title}: {said[0]}\nmended: {said[1]}", file=sys.stderr)
        entries.append(write_entry(fault, sick, healthy, said[0]))
    return LEAD + "".join(entries).rstrip("\n") + "\n"


if __name__ == "__main__":
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        (ROOT / "docs" / "gallery.md").write_text(make_gallery(browser, sys.argv[1:]))
        browser.close()
