"""Pages are files that load nothing, run nothing but their own script, and text in them stays text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.core.history.sink import Event, Moment
from retrograd.core.views.page.frame import escape_json, frame_page, join_modules, pack_json, wrap_module
from retrograd.core.views.report import write_report
from retrograd.following.graph.node import Edge, Node
from retrograd.following.views.graph_picture import draw_graph
from retrograd.memory.views.inventory_page import write_inventory
from tests.core.views.invented import Numbers, make_history
from tests.core.views.unpacking import Page
from tests.following.graph.by_hand import make_graph
from tests.memory.views.invented_inventory import invent_inventory

HOSTILE = '</script><script>alert("owned")</script><img src=x onerror=alert(1)>'
VIEWS = Path(str(resources.files("retrograd.core.views")))
ROOMS = [
    Path(str(resources.files(f"retrograd.{part}.views"))) for part in ("core", "explaining", "following", "memory")
]
SCRIPTS = sorted(path for room in ROOMS for path in room.glob("*/js/*.js"))
SHARED = sorted(VIEWS.glob("page/js/*.js"))
KEPT = sorted(VIEWS.glob("kept/js/*.js"))
OWN = {
    "report": [*KEPT, *sorted(VIEWS.glob("report/js/*.js"))],
    "graph": [path for path in SCRIPTS if path.parts[-3] == "picture"],
    "inventory": [*KEPT, *(path for path in SCRIPTS if path.parts[-3] == "inventory_assets")],
}
WRITE: dict[str, Callable[[Path], Path]] = {
    "report": lambda path: write_report(make_history(Numbers(["a:output"], np.ones((1, 3)))), path),
    "graph": lambda path: draw_graph(make_graph([Node(0, "SumBackward0", 1)], (Edge(0, 0),)), path),
    "inventory": lambda path: write_inventory(invent_inventory(), path),
}
"""Kinds of pages, by what writes one."""

values = st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@pytest.fixture(params=WRITE)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def page(kind: str, tmp_path: Path) -> Page:
    return Page(WRITE[kind](tmp_path / "page.html"))


def test_only_the_pages_own_script_and_style_may_run(page: Page) -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == hash_of(page.scripts[""])
    assert rules["style-src"] == hash_of(page.style)


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_nothing_is_loaded(page: Page) -> None:
    for tag, attributes in page.tags:
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
        assert attributes.get("src") is None, tag
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
    assert "@import" not in page.style
    assert not re.search(r"url\((?!data:)", page.style)


def test_every_name_of_a_template_is_filled_in_and_every_id_is_there_once(page: Page) -> None:
    markup = re.sub(r"<script.*?</script>", "", page.text, flags=re.DOTALL)
    assert not re.search(r"\$[a-z_]", markup)
    assert "Written by retrograd" in markup
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"theme", "failure", "facts-json"} <= set(ids)


def test_every_module_is_in_the_page_once_and_after_those_it_imports(kind: str, page: Page) -> None:
    script, files = page.scripts[""], [*SHARED, *OWN[kind]]
    starts = {path.name: script.find(f"const module_{path.stem} = ") for path in files}
    assert all(starts[path.name] >= 0 for path in OWN[kind])
    for path in (path for path in files if starts[path.name] >= 0):
        assert script.count(f"const module_{path.stem} = ") == 1
        for name in re.findall(r'from "\./([\w-]+\.js)"', path.read_text(encoding="utf-8")):
            assert 0 <= starts[name] < starts[path.name]
    assert "</script" not in script.lower()
    assert "<!--" not in script
    assert "\r" not in script


def test_every_shared_script_and_sheet_is_in_some_page(tmp_path: Path) -> None:
    pages = [Page(write(tmp_path / f"{kind}.html")) for kind, write in WRITE.items()]
    (listed := tmp_path / "listed.html").write_text(
        frame_page("retrograd.core.serving", "Runs", {}, {}, is_served=True), encoding="utf-8"
    )
    pages.append(Page(listed))
    for path in SHARED:
        assert any(f"const module_{path.stem} = " in page.scripts[""] for page in pages)
    for path in VIEWS.glob("page/css/*.css"):
        assert all(path.read_text(encoding="utf-8") in page.style for page in pages)


def test_no_page_has_a_script_of_the_same_name_as_one_of_all_pages() -> None:
    for own in OWN.values():
        assert not {path.name for path in own} & {path.name for path in SHARED}


@given(values)
def test_json_in_a_page_reads_back_and_ends_no_script(value: object) -> None:
    text = escape_json(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert text.isascii()


@given(values)
def test_packed_json_reads_back(value: object) -> None:
    assert json.loads(gzip.decompress(base64.b64decode(pack_json(value), validate=True))) == value
    assert pack_json(value) == pack_json(value)


def test_hostile_names_stay_text_everywhere(tmp_path: Path) -> None:
    history = make_history(Numbers([f"{HOSTILE}:output", f"{HOSTILE}:output.grad"], np.ones((2, 3)), nan=1))
    history.describe(
        command=[HOSTILE],
        model=[{"path": HOSTILE, "type": HOSTILE, "parameters": 1}],
        not_recorded=[{"site": HOSTILE, "reason": HOSTILE}],
        versions={"torch": HOSTILE},
        statistics=[HOSTILE],
        status=HOSTILE,
    )
    history.add_event(Event(Moment(0), "fault", HOSTILE, text=HOSTILE))
    page = Page(write_report(history, tmp_path / "report.html"))
    plain = Page(write_report(make_history(Numbers(["a:output"], np.ones((1, 3)))), tmp_path / "plain.html"))
    assert HOSTILE not in page.text
    assert "<img" not in page.text
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in plain.tags}
    assert page.facts["nonfinite"]["site"] == f"{HOSTILE}:output"
    assert page.scripts[""] == plain.scripts[""]


def test_a_hostile_title_word_or_block_name_stays_text(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    blocks = {f'statistic-{HOSTILE}" onload="alert(1)': "AAAA"}
    target.write_text(frame_page("retrograd.following.views.picture", HOSTILE, {}, blocks, words={"about": HOSTILE}))
    page = Page(target)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [attributes for _, attributes in page.tags if "onload" in attributes]
    assert HOSTILE not in page.text


def test_modules_become_functions_that_share_only_what_they_export() -> None:
    text = 'import { one } from "./a.js";\n\nconst own = one;\nexport function two() {}\nexport const three = 3;\n'
    wrapped = wrap_module("b.js", text)
    assert "const { one } = module_a;" in wrapped
    assert "import" not in wrapped
    assert "export" not in wrapped
    assert wrapped.startswith("const module_b = (() => {")
    assert wrapped.endswith("return { two, three };\n})();")


def test_modules_that_import_each_other_are_refused() -> None:
    texts = {"a.js": 'import { b } from "./b.js";\n', "b.js": 'import { a } from "./a.js";\n'}
    with pytest.raises(ValueError, match=r"a\.js → b\.js → a\.js"):
        join_modules("a.js", texts)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parts[-3]}/{path.name}")
def test_scripts_never_make_markup_from_text_and_reach_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace('"http:", ""', "")  # of the name of SVG
    for dangerous in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "http",
    ):
        assert dangerous not in text
    assert ("fetch(" in text) == (path.name == "server.js")  # of pages that are served, of their own server


def test_the_vendored_library_keeps_its_licence() -> None:
    vendor = resources.files("retrograd.core.views.report").joinpath("vendor")
    assert "Permission is hereby granted" in vendor.joinpath("uPlot.LICENSE").read_text()
