# ruff: noqa: INP001  # a folder of pages, not a package
"""Lets `make site` read pages as GitHub does, and puts what they link to outside of docs/ into the site.

A file of the repository is in the site under its own path, and docs/ at the top; a script is a page with its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = ("[!R]*.md", "benchmarks/*.md", "benchmarks/findings/healthy/*.py", "examples/*.*")
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)([^)\s]*)\)")
HIDDEN = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^```python (?:raises|no-run)$", re.MULTILINE)
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>(?:~[\w.]*\.)?")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and scripts that lie beside docs/."""
    for path in sorted(path for pattern in BESIDE for path in ROOT.glob(pattern)):
        name, made = path.relative_to(ROOT).as_posix(), {"abs_src_path": str(path)}
        if path.suffix == ".py":
            made = {"content": f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n```python\n{path.read_text()}```\n"}
        files.append(File.generated(config, name.replace(".py", ".md"), **made))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files into links between pages, or text where there is none; leave out what is hidden."""
    here = page.file.src_uri
    folder = posixpath.dirname(here if page.file.generated_by else f"docs/{here}")

    def turn(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        source = posixpath.normpath(posixpath.join(folder, path))
        target = source.removeprefix("docs/").replace(".py", ".md")
        if files.get_file_from_path(target) is None and (ROOT / source).exists():
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(turn, MARK.sub("```python", HIDDEN.sub("", markdown))).replace(r"\<", "&lt;")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the roles of docstrings as code, ``:func:`every``` as every, and bars in code of tables as bars."""
    return ROLE.sub("<code>", html).replace(r"\|", "|")
