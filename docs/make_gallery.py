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
import textwrap
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from retrograd import write_report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "findings"))
from corpus import read_corpus  # noqa: E402

PROGRAM = Path(sys.executable).with_name("retrograd")
IMAGES = ROOT / "docs" / "images" / "gallery"
SETTLED = 800  # milliseconds until curves are drawn
HIDDEN = "#map > .toolbar, #strip-choices, .hint, #notice, #scale, .swatch:has(.missing)"
LEAD = """<!-- Made by docs/make_gallery.py; change that, not this page. -->
# Gallery

What faults look like on [the map of the report](report.md#what-it-shows). Each is planted into a healthy script of
our [corpus](../benchmarks/README.md#whether-findings-are-right-findings), so the mended run below it is that script
as it was. The finding is printed as `retrograd explain` does, and *how to read this* says what to look at.

**How to read every picture.** Above are curves over the steps: the loss, at times another. Below is the map: a row is
a [site](concepts.md#site) in the order of the model, a column a step, and the colour a statistic of all elements
there, darker for larger. The bar above the map says which colour is which number: each map has its own. Mauve is
exactly zero, vermilion NaN or infinite. To get such a page of a run of yours: `retrograd run --open train.py`.

"""


@dataclass(frozen=True)
class Fault:
    """An entry of the gallery.

    Attributes:
        title: its heading, of which the files of its pictures are named.
        case: the name of the script in the corpus; or its path, if ``mended`` says what mends it.
        view: what the address of the report holds after #.
        read: how to read the picture.
        options: of ``retrograd run``.
        mended: a text of the script, and what takes its place.
        enlarged: the same for both, so that the fault is seen in a short run.
    """

    title: str
    case: str
    view: str
    read: str
    options: tuple[str, ...] = ()
    mended: tuple[str, str] | None = None
    enlarged: tuple[tuple[str, str], ...] = ()

    @property
    def stem(self) -> str:
        """How its pictures are called."""
        return re.sub(r"\W+", "_", self.title.lower())

    def read_scripts(self) -> tuple[Path, str, str]:
        """The path of the healthy script, or of the only one, and the texts with the fault and without it."""
        if self.mended:
            path = ROOT / self.case
            sick = path.read_text()
            healthy = sick.replace(*self.mended)
        else:
            cases = {case.name: case for case in read_corpus()}
            base = cases[self.case].base
            path = ROOT / "benchmarks" / "findings" / "healthy" / f"{base}.py"
            sick, healthy = cases[self.case].text, cases[base].text
        for old, new in self.enlarged:
            assert old in sick
            sick, healthy = sick.replace(old, new), healthy.replace(old, new)
        assert sick != healthy
        return path, sick, healthy


FAULTS = [
    Fault(
        "Dead units",
        "dead-units/digits_mlp",
        "",
        "The gradient comes from below. It ends at `3`, the ReLU whose units are all zero: above it every row"
        " is mauve, exactly zero, so nothing there learns. Mended, every row has a colour, and the loss "
        "falls.",
    ),
    Fault(
        "A gradient that vanishes",
        "vanishing/digits_mlp",
        "",
        "From the last row to the first the colour becomes paler, and the bar spans ten powers of ten: each "
        "sigmoid takes most of what is left. Mended, the bar spans less than two.",
    ),
    Fault(
        "A learning rate that is too high",
        "learning-rate-too-high/digits_mlp",
        "quantity=update&statistic=update_ratio",
        "The map shows ‖Δw‖/‖w‖, how much of a weight one step changes. The bar ends near 10: the first "
        "updates are larger than the weights. The loss jumps up with them, and never comes below its start. "
        "Mended, the bar ends at 0.02.",
    ),
    Fault(
        "A step that explodes",
        "loss-spike/tiny_gpt",
        "",
        "All is well to the left of one column. There the loss jumps, and the rows of all blocks change at "
        "once and do not come back: so the cause lies outside of the model, here in the schedule of the rate.",
    ),
    Fault(
        "An attention that has collapsed",
        "attention-collapse/tiny_gpt",
        "quantity=value&statistic=zero_share&filter=softmax",
        "A row is the softmax of a block, the colour the share of its weights that are exactly zero. A causal"
        " mask alone makes 47 %, throughout, as below. Here it is 71 % at once and 93 % at the end: each "
        "position looks at a single other one.",
        ("--sites", "*", "*/softmax", "--"),
    ),
    Fault(
        "NaN",
        "examples/sick_nan.py",
        "quantity=value&zoom=25-45",
        "Vermilion is what is not finite. The first column that has any is the step. In that column the "
        "topmost vermilion row is the place: `attention`, while `embed` above it is still finite. One step "
        "later the weights are NaN, and so is all.",
        mended=("blank.unsqueeze(1)", "(blank & ~blank.all(dim=1, keepdim=True)).unsqueeze(1)"),
    ),
    Fault(
        "A graph that leaks",
        "graph-leaks/denoising_autoencoder",
        "scalars=loss&scalars=memory",
        "The loss and the map are the same with and without the fault: no number of the training is wrong. "
        "The second curve is the memory of the process. It climbs to the end; mended, it stays. (Both scripts"
        " have forty times the data of those in the corpus.)",
        enlarged=(("make_pictures(800)", "make_pictures(32000)"), ("split(50)", "split(2000)")),
    ),
]


def record(name: str, text: str, options: tuple[str, ...], folder: Path) -> str:
    """Record a script, and give what is found, as printed, without the card."""
    script = folder / name
    script.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.replace(f"{folder}/", "")

    call(str(PROGRAM), "run", "-q", "-o", "run", *options, script.name)
    found = call(str(PROGRAM), "explain", "run")
    findings = found.partition("\n\n")[2].partition("\n\n")[2].strip() or found.splitlines()[0]
    return "\n".join(textwrap.fill(line, 92, subsequent_indent=11 * " ") for line in findings.splitlines())


def draw(browser: Browser, run: Path, view: str, target: Path) -> None:
    """A screenshot of the curves and the map of a run, without what one would press."""
    report = write_report(run)
    page = browser.new_page(viewport={"width": 760, "height": 800})
    page.goto(f"{report.as_uri()}#{view}")
    page.wait_for_selector("html[data-ready=yes]")
    page.locator("#unfold").click()
    page.evaluate("hidden => document.querySelectorAll(hidden).forEach(part => (part.style.display = 'none'))", HIDDEN)
    page.mouse.move(0, 0)
    page.wait_for_timeout(SETTLED)
    page.locator("#map").screenshot(path=target)
    page.close()


def write_entry(fault: Fault, found: str) -> str:
    """The section of one fault."""
    path, sick, healthy = fault.read_scripts()
    lines = difflib.unified_diff(sick.splitlines(), healthy.splitlines(), n=0, lineterm="")
    repair = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
    return f"""## {fault.title}

![{fault.title}: the map](images/gallery/{fault.stem}.png)

*How to read this.* {fault.read}

```text
{found}
```

Mended, [{path.name}](../{path.relative_to(ROOT)}):

```diff
{repair}
```

![The same script without the fault: the map](images/gallery/{fault.stem}_mended.png)

"""


def make_gallery(browser: Browser, titles: list[str]) -> str:
    """All pictures, or those of some titles; and the page, in which what is found in the others is left as it is."""
    written = (ROOT / "docs" / "gallery.md").read_text()
    entries = []
    for fault in FAULTS:
        path, *texts = fault.read_scripts()
        if titles and fault.title not in titles:
            found = written.partition(f"## {fault.title}\n")[2].partition("```text\n")[2].partition("\n```")[0]
            entries.append(write_entry(fault, found))
            continue
        said = []
        for text, end in zip(texts, ("", "_mended"), strict=True):
            with tempfile.TemporaryDirectory() as home:
                said.append(record(path.name, text, fault.options, Path(home)))
                draw(browser, Path(home, "run"), fault.view, IMAGES / f"{fault.stem}{end}.png")
        print(f"{fault.title}: {said[0]}\nmended: {said[1]}", file=sys.stderr)
        entries.append(write_entry(fault, said[0]))
    return LEAD + "".join(entries).rstrip("\n") + "\n"


if __name__ == "__main__":
    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        (ROOT / "docs" / "gallery.md").write_text(make_gallery(browser, sys.argv[1:]))
        browser.close()
