"""The gallery says of each fault what is found today, and its page is what its program writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.test_sick import mask

pytest.importorskip("playwright")
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text()


def load() -> ModuleType:
    found = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs" / "make_gallery.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


GALLERY = load()


def test_the_page_is_what_its_program_writes() -> None:
    assert GALLERY.make_gallery(None, ["none of them"]) == PAGE


def test_each_picture_is_there_small_and_shown() -> None:
    pictures = sorted(path.name for path in GALLERY.IMAGES.iterdir())
    assert pictures == sorted(re.findall(r"images/gallery/(\S+)\)", PAGE))
    assert max(path.stat().st_size for path in GALLERY.IMAGES.iterdir()) <= 60_000


def test_the_readme_shows_a_finding_of_it() -> None:
    shown = (ROOT / "README.md").read_text().partition("$ retrograd explain\n…\n")[2].partition("```")[0]
    assert shown.startswith("critical")
    assert " ".join(shown.split()) in " ".join(PAGE.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.stem, marks=[] if fault.stem == "nan" else pytest.mark.thorough)
        for fault in GALLERY.FAULTS
    ],
)
def test_a_fault_is_found_as_printed_and_the_mended_script_has_none(fault: object, tmp_path: Path) -> None:
    path, sick, healthy = fault.read_scripts()  # type: ignore[attr-defined]
    for name, text in (("sick", sick), ("healthy", healthy)):
        (tmp_path / name).mkdir()
        found = GALLERY.record(path.name, text, fault.options, tmp_path / name)  # type: ignore[attr-defined]
        if name == "sick":
            assert mask(found) in mask(PAGE)
        else:
            assert "no findings" in found
