"""Reads a report without a browser, by other code than wrote it."""

from __future__ import annotations

import base64
import gzip
import html
import json
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np


def unpack_floats(text: str) -> np.ndarray:
    """Numbers from gzip in base64, byte by byte."""
    data = gzip.decompress(base64.b64decode(text))
    n = len(data) // 4
    words = [bytes(data[plane * n + i] for plane in range(4)) for i in range(n)]
    return np.array([struct.unpack("<f", word)[0] for word in words], dtype=np.float32)


class Page(HTMLParser):
    """A page by its elements.

    Attributes:
        scripts: text of each script element, by its id, or "" for the one that runs.
        style: text of the style elements.
        tags: every element that was opened, with its attributes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.style = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside = ""
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            name = self.tags[-1][1].get("id") or ""
            self.scripts[name] = self.scripts.get(name, "") + data
        elif self._inside == "style":
            self.style += data

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads(self.scripts["facts-json"])

    @property
    def policy(self) -> str:
        found = next(attributes for tag, attributes in self.tags if attributes.get("http-equiv"))
        return html.unescape(found["content"] or "")

    def numbers(self, statistic: str) -> np.ndarray:
        """A statistic's numbers, of shape (bands, series, columns)."""
        measure = next(measure for measure in self.facts["measures"] if measure["name"] == statistic)
        shape = len(measure["bands"]), len(measure["series"]), len(self.facts["columns"]["first"])
        return unpack_floats(self.scripts[f"block-statistic-{statistic}"]).reshape(shape)

    def line(self, statistic: str, band: str, site: str) -> np.ndarray:
        """The numbers of one site."""
        measure = next(measure for measure in self.facts["measures"] if measure["name"] == statistic)
        row = measure["series"].index(self.facts["sites"].index(site))
        return self.numbers(statistic)[measure["bands"].index(band), row]

    def scalar(self, name: str) -> np.ndarray:
        """The numbers of a scalar, of shape (bands, columns); of the clock, for an empty name."""
        names = [each["name"] for each in self.facts["scalars"]["listed"]]
        shape = 3, len(names) + 1, len(self.facts["columns"]["first"])
        return unpack_floats(self.scripts["block-scalars"]).reshape(shape)[:, names.index(name) if name else -1]
