"""The picture of the architecture: what runs where, and who calls whom. Its numbers are those of the page's table."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from bench.site.pages import ROOT

PICTURE: Final = ROOT / "docs/design/architecture.svg"
PAGE: Final = PICTURE.with_suffix(".md")

_WIDTH, _HEIGHT = 960, 600
_LINE_PX, _ASCENT_PX = 18, 5
_FONT = 'font-family="system-ui, sans-serif" font-size="14"'
_INK, _PALE, _ACCENT = "#1f2937", "#6b7280", "#3949ab"


@dataclass(frozen=True)
class Box:
    """Something that runs or lies somewhere; a frame where it has no lines."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Call:
    """Who calls whom: a path from the caller, and where on it the number stands."""

    points: tuple[tuple[int, int], ...]
    number: int | None = None
    at: tuple[int, int] = (0, 0)


BOXES: Final = (
    Box(540, 28, 400, 128, "operator namespace"),
    Box(230, 188, 710, 396, "your namespace"),
    Box(20, 44, 160, 96, "You", ("kubectl, Git, CI", "specdecode")),
    Box(20, 346, 160, 80, "Clients", ("OpenAI's API",)),
    Box(20, 482, 160, 80, "Model hub", ("or a mirror",)),
    Box(250, 44, 220, 96, "API server", ("CRDs with CEL rules,", "admission policies")),
    Box(560, 60, 170, 80, "Operator", ("plans, writes,", "reads metrics")),
    Box(750, 60, 170, 80, "Webhook", ("in the operator's pod",), optional=True),
    Box(256, 218, 430, 64, "Objects", ("deployments, captures, their children, ConfigMaps",)),
    Box(256, 346, 206, 80, "Engines", ("Deployment or group,", "Service; vLLM on GPUs")),
    Box(506, 346, 200, 80, "Capture Job", ("the same engine with a", "recorder, and a load")),
    Box(750, 346, 170, 80, "Claim", ("traces, statistics,", "manifest, checksums")),
    Box(256, 482, 206, 80, "Model Jobs", ("read config.json,", "fill a cache"), optional=True),
    Box(506, 482, 200, 80, "Models", ("claim, or nodes' disks",)),
)
CALLS: Final = (
    Call(((180, 92), (250, 92)), 1, (214, 92)),
    Call(((360, 44), (360, 14), (835, 14), (835, 60)), 2, (600, 14)),
    Call(((560, 104), (470, 104)), 3, (512, 104)),
    Call(((420, 140), (420, 218))),
    Call(((320, 282), (320, 346)), 4, (320, 318)),
    Call(((606, 282), (606, 346)), 4, (606, 322)),
    Call(((715, 140), (715, 302), (420, 302), (420, 346)), 5, (715, 240)),
    Call(((180, 386), (256, 386)), 6, (214, 386)),
    Call(((706, 386), (750, 386)), 7, (726, 386)),
    Call(((256, 522), (180, 522)), 8, (218, 522)),
    Call(((462, 522), (506, 522)), 8, (482, 522)),
    Call(((606, 482), (606, 454), (360, 454), (360, 426)), 9, (482, 454)),
    Call(((606, 454), (606, 426))),
)


def picture() -> str:
    """Return the picture as SVG, on a ground of its own so that it reads in the dark, too."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" {_FONT}>',
        "<title>What runs where, and who calls whom</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        f'<path d="M0 0L8 4L0 8z" fill="{_ACCENT}"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
    ]
    for box in BOXES:
        parts += _box(box)
    for call in CALLS:
        parts += _call(call)
    return "\n".join([*parts, "</svg>", ""])


def _box(box: Box) -> Iterator[str]:
    frame = not box.lines
    dashes = ' stroke-dasharray="5 4"' if box.optional else ""
    yield (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" '
        f'fill="{"#f5f6fb" if frame else "#ffffff"}" stroke="{_PALE}"{dashes}/>'
    )
    if frame:
        yield f'<text x="{box.x + 12}" y="{box.y + 20}" fill="{_PALE}">{escape(box.title)}</text>'
        return
    middle = box.x + box.width // 2
    first_y = box.y + (box.height - len(box.lines) * _LINE_PX) // 2 + _ASCENT_PX
    for row, line in enumerate((box.title, *box.lines)):
        style = 'font-weight="600"' if row == 0 else 'font-size="13"'
        y = first_y + row * _LINE_PX
        yield f'<text x="{middle}" y="{y}" fill="{_INK}" {style} text-anchor="middle">{escape(line)}</text>'


def _call(call: Call) -> Iterator[str]:
    path = " ".join(f"{x},{y}" for x, y in call.points)
    yield f'<polyline points="{path}" fill="none" stroke="{_ACCENT}" stroke-width="1.5" marker-end="url(#tip)"/>'
    if call.number is not None:
        x, y = call.at
        yield f'<circle cx="{x}" cy="{y}" r="9" fill="#ffffff" stroke="{_ACCENT}"/>'
        yield f'<text x="{x}" y="{y + 4}" fill="{_ACCENT}" font-size="12" text-anchor="middle">{call.number}</text>'


def write() -> Path:
    """Write the picture anew."""
    PICTURE.write_text(picture())
    return PICTURE
