"""Sheets as plain values, for the page."""

from __future__ import annotations

from typing import Any

from retrograd.views.picture.contraction import Gradient, Port
from retrograd.views.picture.details import describe_fold, describe_node
from retrograd.views.picture.folds import Fold
from retrograd.views.picture.scene import Scene, Sheet, Thing

Json = dict[str, Any]


def list_sheets(scene: Scene) -> list[Json]:
    """All sheets of a scene. They name each other by their places in this list."""
    numbers = {fold: number for number, fold in enumerate(scene.sheets)}
    return [_write_sheet(scene, sheet, numbers) for sheet in scene.sheets.values()]


def _write_sheet(scene: Scene, sheet: Sheet, numbers: dict[Fold, int]) -> Json:
    above = sheet.fold.above
    return {
        "title": sheet.fold.title,
        "above": None if above is None else numbers[above],
        "things": [_write_thing(scene, thing, numbers) for thing in sheet.things],
        "rows": sheet.rows,
        "lines": [
            {
                "from": line.sender,
                "to": line.taker,
                "chain": line.chain,
                "turned": line.turned,
                "gradients": [_write_gradient(gradient) for gradient in line.gradients],
            }
            for line in sheet.lines
        ],
    }


def _write_thing(scene: Scene, thing: Thing, numbers: dict[Fold, int]) -> Json:
    content, box = thing.content, thing.box
    if isinstance(content, Port) or box is None:
        assert isinstance(content, Port)
        return {"gradient": _write_gradient(content.gradient), "enters": content.enters}
    written = {
        "name": thing.name,
        "title": box.title,
        "notes": box.notes,
        "pills": box.pills,
        "labels": box.labels,
        "width": box.width,
        "height": box.height,
    }
    if not isinstance(content, Fold):
        return {**written, "kind": "node", "heading": content.name, "details": describe_node(scene.outline, content)}
    number = numbers.get(content)
    if content.only_node is not None:
        written["alone"] = True
    details = describe_fold(scene.outline, content, can_open=number is not None)
    where = {} if number is None else {"fold": number}
    return {**written, **where, "kind": "fold", "heading": content.title, "details": details}


def _write_gradient(gradient: Gradient) -> str:
    return f"{gradient[0]}.{gradient[1]}"
