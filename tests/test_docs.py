"""The documentation is true: its Python runs, its links lead somewhere, every error is explained, the map is the house.

The ``python`` blocks of a page run in order, in one namespace and an empty folder. A block inside an HTML comment
runs too, which is where a page hides its preparations; ``python no-run`` marks a block that cannot run here, and
``python raises`` one that must raise the error whose slug is the title of its section. ``python title="train.py"`` is
written to that file, and of a ``console`` block each line after ``$`` is a command, which prints what stands below it:
numbers may be others, and … is anything.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from retrograd.core import errors
from retrograd.core.cli import load_commands
from retrograd.core.launch.parser import parse
from tests import warm
from tests.sources import SOURCE
from tests.test_imports import CORE, PARTS

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for folder in (".", "docs", "benchmarks", "examples") for page in (ROOT / folder).glob("*.md"))

NOT_RUN: dict[str, int] = {}
"""Page → how many of its blocks are marked ``no-run``; a page that is missing has none."""

BLOCK = re.compile(r"^```(?:python|(?=console))(?P<mark>[^\n]*)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(?<![\w:])\d[\d,]*(\.\d+)?(e[+-]?\d+)?")
LINK = re.compile(r"\]\((?!\w+:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
FILE = re.compile(r"(?:[\w.*-]+/)*(?:[\w.*-]+/|[\w*-]+\.(?:py|pyi|c|h|js|toml|md|html))")
NAME = re.compile(r"(?:\w+\.)*([A-Za-z_]\w+)(?:\(.*\))?")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Marks and code of the Python blocks and sessions, the code pushed down to its line in the page."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield match["mark"].strip(), "\n" * text.count("\n", 0, match.start("code")) + match["code"]


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link may point at: the headings, spelt as GitHub spells them."""
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in HEADING.findall(prose(page))
    }


def sections(page: Path) -> dict[str, str]:
    """Title → text of each second-level section."""
    _, *parts = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in parts)


def section_of(page: Path, code: str) -> str:
    """The slug that is the title of the section with this code."""
    (title,) = (title for title, text in sections(page).items() if code.strip() in text)
    return title.strip("`")


def run_session(text: str) -> None:
    """Run the commands of a session, and hold what each prints against what stands below it."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # torchrun is beside python
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        words = shlex.split(line, comments=True)
        program = {"retrograd": [sys.executable, "-m", "retrograd"], "python": [sys.executable]}
        words = [*program.get(words[0], words[:1]), *words[1:]]
        done = warm.run(words, env={**os.environ, "PATH": path, "COLUMNS": "160"}, **streams)
        shown = shown.replace("/home/me/", "")  # where the reader is
        expected = re.escape(NUMBER.sub("N", shown.strip() + "\n")).replace("…\\\n", "(.*\n)*?").replace("…", ".*")
        printed = NUMBER.sub("N", done.stdout.replace(f"{Path.cwd()}/", "").strip() + "\n")
        assert done.returncode < 2, f"$ {line}\n{done.stdout}"
        assert re.fullmatch(expected, printed) or not shown.strip(), f"$ {line}\n{done.stdout}"


def error_classes(base: type[errors.RetrogradError] = errors.RetrogradError) -> Iterator[type[errors.RetrogradError]]:
    yield base
    for kind in base.__subclasses__():
        yield from error_classes(kind)


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=label)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for mark, code in blocks(page):
        if mark == "raises":
            with pytest.raises(errors.RetrogradError) as raised:
                exec(compile(code, label(page), "exec"), namespace)
            assert raised.value.slug == section_of(page, code)
        elif mark == "console":
            run_session(code)
        elif mark.startswith("title="):
            Path(mark.removeprefix("title=").strip('"')).write_text(code.lstrip("\n"))
        elif mark != "no-run":
            exec(compile(code, label(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_blocks_that_do_not_run_are_known(page: Path) -> None:
    marks = [mark for mark, _ in blocks(page) if not mark.startswith("title=")]
    assert set(marks) <= {"", "no-run", "raises", "console"}
    assert marks.count("no-run") == NOT_RUN.get(label(page), 0)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(prose(page)):
        target = page.parent / link["path"] if link["path"] else page
        assert target.exists(), f"{link[0]} leads nowhere"
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors(target), f"{link[0]}: no such heading"


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link["path"]).resolve() for link in LINK.finditer(index.read_text())}
    assert {page for page in (ROOT / "docs").glob("*.md") if page != index} <= linked


def test_every_error_is_explained() -> None:
    explained = sections(ROOT / "docs" / "errors.md")
    assert set(explained) == {f"`{kind.slug}`" for kind in error_classes()}


@pytest.mark.parametrize("kind", list(error_classes()), ids=lambda kind: kind.slug)
def test_an_explanation_shows_mistake_repair_and_reason(kind: type[errors.RetrogradError]) -> None:
    text = sections(ROOT / "docs" / "errors.md")[f"`{kind.slug}`"]
    assert kind.__name__ in text
    if not kind.__subclasses__():
        assert re.findall(r"\*\*(\w+)\.\*\*", text) == ["Mistake", "Repair", "Reason"]


# ---- the pages for contributors ----

MAP, *_ = CONTRIBUTING = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "journeys.md", ROOT / "docs" / "recipes.md"]
INSIDE_A_PART = {"launch/", "launch/commands.py", "views/", "css/", "js/"}
PLACEHOLDERS = {"slug", "train_digits", "format_NAME", "print_NAME", "write_NAME", "draw_NAME", "NAME", "console"}


def quoted(page: Path) -> set[str]:
    """What stands between single backticks outside of blocks of code."""
    return set(re.findall(r"`([^`\n]+)`", prose(page)))


def files_like(path: str) -> Iterator[Path]:
    """The files and folders that a page names: from the root, from the package, or some inside of each part."""
    for root in (ROOT, SOURCE):
        yield from root.glob(path)
    if "/" not in path or path in INSIDE_A_PART:
        yield from SOURCE.rglob(path)


@pytest.mark.parametrize("page", CONTRIBUTING, ids=label)
def test_files_that_a_page_for_contributors_names_exist(page: Path) -> None:
    named = {text for text in quoted(page) if FILE.fullmatch(text)}
    assert len(named) > 20
    assert not {path for path in named if next(files_like(path), None) is None}


@pytest.mark.parametrize("page", CONTRIBUTING, ids=label)
def test_names_that_a_page_for_contributors_uses_are_in_the_code(page: Path) -> None:
    files = (file for folder in (SOURCE, ROOT / "tests") for file in folder.rglob("*.py*") if file.suffix != ".pyc")
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    named = {match[1] for text in quoted(page) if (match := NAME.fullmatch(text)) and not FILE.fullmatch(text)}
    assert not named - words - PLACEHOLDERS


def test_the_map_has_the_parts_and_rooms_that_the_imports_have() -> None:
    row = re.compile(r"^\| (.+?) \| .* \| (.+?) \|$", re.MULTILINE)
    tables = [row.findall(text)[1:] for text in MAP.read_text().split("\n#")]
    parts, rooms = (table for table in tables if len(table) in (len(PARTS) - 1, len(CORE)))
    assert {part.strip("`/"): set(others.replace("nothing", "").split(", ")) - {""} for part, others in parts} == {
        part: others for part, others in PARTS.items() if part != "__main__"
    }
    assert tuple(room.strip("`") for room, _ in rooms) == CORE


# ---- the list for models ----

LIST = ROOT / "docs" / "llms.txt"
ENTRY = re.compile(r"- \[[^\]]+\]\((?P<path>[\w./]+\.md)\): \S.*")


def test_the_list_for_models_has_every_page_once() -> None:
    """As llmstxt.org has it: a title, a summary, text, then sections of links with a line each."""
    head, *parts = re.split(r"^## .+\n", LIST.read_text(), flags=re.MULTILINE)
    assert re.match(r"# retrograd\n\n(> .+\n)+\n", head)
    entries = [line for part in parts for line in part.splitlines() if line]
    paths = [match["path"] for line in entries if (match := ENTRY.fullmatch(line))]
    assert len(paths) == len(set(paths)) == len(entries)
    contributors = {"index.md", "journeys.md", "recipes.md"}
    assert set(paths) == {page.name for page in LIST.parent.glob("*.md")} - contributors


def test_commands_that_the_pages_for_tools_show_can_be_read() -> None:
    """In code and in tables; ``train.py`` stands for any script."""
    shown = [
        words
        for page in (LIST, LIST.with_name("agents.md"), LIST.with_name("ci.md"))
        for words in re.findall(r"(?:^|`|run: )(retrograd [^`\n#…]+)", page.read_text(), flags=re.MULTILINE)
    ]
    assert len(shown) > 15
    for words in shown:
        command = shlex.split(words.partition(" > ")[0])[1:]
        asked = parse(command, load_commands, "", "")
        assert asked.name == command[0]


def test_the_workflow_can_be_read() -> None:
    [text] = re.findall(r"^```yaml\n(.*?)^```", (LIST.with_name("ci.md")).read_text(), flags=re.DOTALL | re.MULTILINE)
    jobs = yaml.safe_load(text)["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
