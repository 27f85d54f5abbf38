"""Figures as files: SVG that may stand in a page beside others, and pictures with their own title and caption."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

from specdecode_operator.pictures.figures.drawing import QUIET, Picture

_SVG: Final = "http://www.w3.org/2000/svg"
_XLINK: Final = "http://www.w3.org/1999/xlink"
_REFERENCE: Final = re.compile(r"url\(#([^)]+)\)")
_DOTS_PER_INCH: Final = 150
_LINE_IN: Final = 0.17
_CAPTION_LINE_IN: Final = 0.125
_LINE: Final = 120
_CAPTION_LINE: Final = 150
"""Letters of the sizes of sentences and captions that a figure is wide."""


ET.register_namespace("", _SVG)
ET.register_namespace("xlink", _XLINK)


def inline_svg(picture: Picture) -> str:
    """Return a figure as an element of a page: what is no picture left out, and no id that another figure has."""
    with _no_glyph_warnings():
        raw = io.BytesIO()
        picture.figure.savefig(raw, format="svg")
    # What matplotlib wrote itself, with all names escaped by it.
    root = ET.fromstring(raw.getvalue())  # noqa: S314
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    used = set(_references(root))
    for element in root.iter():
        _rename(element, picture.name, used)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-label", " ".join((f"{picture.title}:", *picture.sentences)))
    return ET.tostring(root, encoding="unicode")


def _references(root: ET.Element) -> Iterator[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == f"{{{_XLINK}}}href":
                yield value.removeprefix("#")
            else:
                yield from _REFERENCE.findall(value)


def _rename(element: ET.Element, prefix: str, used: set[str]) -> None:
    """Give ids that something refers to the figure's name, and drop the others."""
    for name, value in list(element.attrib.items()):
        if name == "id":
            if value in used:
                element.set(name, f"{prefix}-{value}")
            else:
                del element.attrib[name]
        elif name == f"{{{_XLINK}}}href":
            element.set(name, f"#{prefix}-{value.removeprefix('#')}")
        elif "url(#" in value:
            element.set(name, _REFERENCE.sub(rf"url(#{prefix}-\1)", value))


def write_alone(picture: Picture, files: list[Path]) -> None:
    """Write a figure with its title, its sentence and its captures' identity, once in each format.

    The figure cannot be put into a page afterwards.
    """
    figure = picture.figure
    captions = [line for each in picture.captures for line in _wrapped(each.caption, _CAPTION_LINE)]
    above = [picture.title, *(line for each in picture.sentences for line in _wrapped(each))]
    width, height = figure.get_size_inches()
    below_in, above_in = _CAPTION_LINE_IN * (len(captions) + 1), _LINE_IN * (len(above) + 0.5)
    whole = height + below_in + above_in
    figure.set_size_inches(width, whole)
    bottom, top = below_in / whole, 1 - above_in / whole
    legends = 0.0
    with _no_glyph_warnings():
        for legend in figure.legends:
            legends = legend.get_window_extent().height / figure.dpi / whole + _LINE_IN / 2 / whole
            legend.set_bbox_to_anchor((0, bottom, 1, top - bottom), figure.transFigure)
    # With an anchor of its own a legend is no longer given room.
    figure.set_layout_engine("constrained", rect=(0, bottom, 1, top - bottom - legends))
    figure.text(0.01, 1 - 0.06 / whole, above[0], va="top", fontweight="bold")
    figure.text(0.01, 1 - (0.06 + _LINE_IN) / whole, "\n".join(above[1:]), va="top", fontsize=8.5)
    figure.text(0.01, 0.05 / whole, "\n".join(captions), va="bottom", fontsize=7, color=QUIET)
    with _no_glyph_warnings():
        for file in files:
            # Without a date the same capture gives the same bytes.
            metadata = {"Date": None} if file.suffix == ".svg" else {"Software": None}
            figure.savefig(file, dpi=_DOTS_PER_INCH, metadata=metadata)


def _wrapped(text: str, letters: int = _LINE) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


@contextmanager
def _no_glyph_warnings() -> Iterator[None]:
    """Say nothing of letters that the font lacks: names may have any, and a browser has more fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Gg]lyph")
        yield
