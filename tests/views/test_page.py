"""The page is one file that loads nothing, and text from a run stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrograd.history.sink import Event, Moment
from retrograd.views.report import write_report
from retrograd.views.report.blocks import Block
from retrograd.views.report.page import build_page, escape_json, join_scripts, wrap_module
from tests.views.invented import Numbers, make_history
from tests.views.unpacking import Page

HOSTILE = '</script><script>alert("owned")</script><img src=x onerror=alert(1)>'
SCRIPTS = resources.files("retrograd.views.report").joinpath("js")


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(write_report(make_history(Numbers(["a:output"], np.ones((1, 3)))), tmp_path / "report.html"))


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


@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5))
def test_json_in_a_page_reads_back_and_ends_no_script(value: object) -> None:
    text = escape_json(value)
    assert json.loads(text) == value
    assert not set("<>&") & set(text)
    assert text.isascii()


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


def test_a_hostile_title_or_block_name_stays_text(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text(build_page(HOSTILE, {}, [Block(f'statistic-{HOSTILE}" onload="alert(1)', {}, "AAAA")]))
    page = Page(target)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert not [attributes for _, attributes in page.tags if "onload" in attributes]


def test_modules_become_functions_that_share_only_what_they_export() -> None:
    text = 'import { one } from "./a.js";\n\nconst own = one;\nexport function two() {}\nexport const three = 3;\n'
    wrapped = wrap_module("b.js", text)
    assert "const { one } = module_a;" in wrapped
    assert "import" not in wrapped
    assert "export" not in wrapped
    assert wrapped.startswith("const module_b = (() => {")
    assert wrapped.endswith("return { two, three };\n})();")


@pytest.mark.parametrize("path", sorted(SCRIPTS.iterdir(), key=lambda path: path.name), ids=lambda path: path.name)
def test_scripts_never_make_markup_from_text_and_reach_nothing(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for dangerous in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "fetch(",
        "http",
    ):
        assert dangerous not in text


def test_every_module_is_in_the_page_once() -> None:
    script = join_scripts()
    for path in SCRIPTS.iterdir():
        assert script.count(f"const module_{path.name.removesuffix('.js')} = ") == 1
    assert "</script" not in script.lower()
    assert "<!--" not in script
    assert "\r" not in script


def test_the_vendored_library_keeps_its_licence() -> None:
    vendor = resources.files("retrograd.views.report").joinpath("vendor")
    assert "Permission is hereby granted" in vendor.joinpath("uPlot.LICENSE").read_text()
