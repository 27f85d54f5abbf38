"""Define the look of all charts, and write them as files or inline SVG.

Colours, markers and hatches can be distinguished in grayscale and with every kind of colour vision.
"""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from specdecode_operator.capture.report.capture_reader import Capture
from specdecode_operator.redaction import clip, clip_start, redact

WIDTH_IN: Final = 8.0
HEIGHT_IN: Final = 3.1
GRID: Final = "#D9D9D9"
INK: Final = "#222222"
QUIET: Final = "#666666"
_LEGEND_LINE_IN: Final = 0.165
_WHOLE: Final = 100
"""Numbers from here on are shown without decimals."""

_CLOSE, _ONE_DECADE, _FEW_DECADES = 4, 30, 2000
"""Ratios of an axis' ends: below them it is linear, has more ticks, and has some within a decade."""


@dataclass(frozen=True)
class Style:
    """How one capture is drawn in every picture."""

    colour: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    hatch: str

    @property
    def marked_line(self) -> dict[str, Any]:
        """Keywords of `Axes.plot`."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


# Colours that people with any colour vision can tell apart (Okabe and Ito, 2008); marks, lines and hatches for print.
STYLES: Final = (
    Style("#0072B2", "o", "-", ""),
    Style("#D55E00", "s", "--", "////"),
    Style("#009E73", "^", "-.", "\\\\\\\\"),
    Style("#CC79A7", "D", ":", "xxxx"),
    Style("#E69F00", "v", (0, (6, 2, 1, 2, 1, 2)), "----"),
    Style("#56B4E9", "P", (0, (1, 1)), "||||"),
    Style("#000000", "X", (0, (8, 3)), "++"),
)


@dataclass(frozen=True)
class Picture:
    """One figure, with sentences that state its numbers."""

    name: str  # of its file, without a suffix
    title: str
    sentences: tuple[str, ...]  # one, or one for each capture
    figure: Figure
    captures: tuple[Capture, ...]  # those that it is drawn of


@dataclass(frozen=True)
class LeftOut:
    """A figure without data, and the reason."""

    title: str
    why: str


@dataclass(frozen=True)
class Series:
    """One capture of a report, with its name in legends and its style."""

    capture: Capture
    label: str
    style: Style


def series_of(captures: Sequence[Capture]) -> list[Series]:
    """Return captures as series; equal names get a number."""
    spaces = {each.identity.name.rpartition("/")[0] for each in captures}
    shared = f"{spaces.pop()}/" if len(spaces) == 1 else ""
    names = [
        f"{_short(each.identity.name.removeprefix(shared))}{' (replayed)' if each.replayed else ''}"
        for each in captures
    ]
    numbered = [
        f"{name} #{names[: place + 1].count(name)}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
    return [Series(*each) for each in zip(captures, numbered, STYLES, strict=False)]


_LABEL: Final = 36


def _short(name: str) -> str:
    """Shorten a name for a legend in the middle, since names of captures differ at their ends."""
    name = redact(name)
    return name if len(name) <= _LABEL else clip(name, _LABEL // 3) + clip_start(name, _LABEL - _LABEL // 3)


@contextmanager
def looks() -> Iterator[None]:
    """Set the style for print: no mathematics in untrusted names, text as text, and reproducible bytes."""
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.edgecolor": QUIET,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.7,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "svg.fonttype": "none",
        "svg.hashsalt": "specdecode",
        "text.parse_math": False,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with mpl.rc_context(settings):
        yield


def new_figure(rows: int = 1, columns: int = 1, *, height_in: float = HEIGHT_IN, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes. Without pyplot, no display is needed and no figure stays in memory."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def legend_above(figure: Figure, *axes: Axes, columns: int = 3) -> None:
    """Draw one legend above the figure, with each name once."""
    named: dict[str, Artist] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    handles, labels = list(named.values()), list(named)
    if handles:
        widest = max(map(len, labels))
        beside = min(columns, max(1, 110 // (widest + 8)), len(labels))
        figure.legend(handles, labels, loc="outside upper left", ncols=beside)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + _LEGEND_LINE_IN * math.ceil(len(labels) / beside))


def number(value: float) -> str:
    """Return a number for an axis or a sentence: 12,000, 340, 7.5, 0.03."""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:.3g}"


def measured(value: float) -> str:
    """Return a measured number for a sentence or a table, to three digits: 12,000, 340, 7.50, 0.0300."""
    return f"{value:,.0f}" if abs(value) >= _WHOLE else f"{value:#.3g}" if value else "0"


def counted(count: float, what: str) -> str:
    """Return a count with its noun: 1 request, 12 requests."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def plain_log(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks; one whose ends lie close stays linear."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if low > 0 and high / low < _CLOSE:
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    ratio = high / low
    subs = (1, 1.5, 2, 3, 5, 7) if ratio < _ONE_DECADE else (1, 2, 5) if ratio < _FEW_DECADES else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def percent_axis(axes: Axes, label: str, largest: float = 1.0) -> None:
    """Show shares from 0 as percent."""
    axes.set_ylim(0, min(1.0, largest) * 1.04)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}"))
    axes.set_ylabel(f"{label} (%)")


def whole_ticks(axes: Axes) -> None:
    """Put ticks only at whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))


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
    """Return a figure as an SVG element, without metadata and with ids that are unique in a page."""
    with _no_glyph_warnings():
        raw = io.BytesIO()
        picture.figure.savefig(raw, format="svg")
    # What matplotlib wrote itself, with all names escaped by it.
    root = ET.fromstring(raw.getvalue())  # noqa: S314
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    _prefix_ids(root, picture.name)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-label", " ".join((f"{picture.title}:", *picture.sentences)))
    return ET.tostring(root, encoding="unicode")


def _prefix_ids(root: ET.Element, prefix: str) -> None:
    """Prefix the ids that are referred to, and the references, and drop the other ids."""
    href = f"{{{_XLINK}}}href"
    values = [(name, value) for element in root.iter() for name, value in element.attrib.items()]
    used = {value.removeprefix("#") for name, value in values if name == href}
    used.update(found for name, value in values if name != href for found in _REFERENCE.findall(value))
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id" and value in used:
                element.set(name, f"{prefix}-{value}")
            elif name == "id":
                del element.attrib[name]
            elif name == href:
                element.set(name, f"#{prefix}-{value.removeprefix('#')}")
            elif "url(#" in value:
                element.set(name, _REFERENCE.sub(rf"url(#{prefix}-\1)", value))


def write_alone(picture: Picture, files: list[Path]) -> None:
    """Write a figure with its title, its sentence and its captures' identity, once in each format.

    The figure cannot be put into a page afterwards.
    """
    figure = picture.figure
    wrapped = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    captions = [line for each in picture.captures for line in wrapped(each.caption, _CAPTION_LINE)]
    above = [picture.title, *(line for each in picture.sentences for line in wrapped(each, _LINE))]
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


@contextmanager
def _no_glyph_warnings() -> Iterator[None]:
    """Suppress warnings about glyphs that the font lacks: names may contain any, and a browser has more fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Gg]lyph")
        yield
