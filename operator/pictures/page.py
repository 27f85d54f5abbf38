"""One page with all pictures, which needs nothing but itself."""

from collections.abc import Sequence
from html import escape
from typing import Final

from specdecode_operator.capture.comparison.result import Comparison
from specdecode_operator.pictures.figures.drawing import LeftOut, Picture, Series, measured
from specdecode_operator.pictures.files import inline_svg
from specdecode_operator.pictures.measures import Measure, measures_of
from specdecode_operator.problems import printable
from specdecode_operator.version import __version__

# Nothing is loaded and nothing runs, whatever a name in a file says.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_FEW: Final = 2
_STYLE: Final = """
:root { color-scheme: light; }
body { font: .95rem/1.5 "DejaVu Sans", Verdana, sans-serif; color: #222; background: #fff; margin: 0 auto;
  padding: 1.5rem; max-width: 60rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
section { margin: 2.4rem 0 0; break-inside: avoid; } section p { margin: 0 0 .2rem; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
figcaption, footer, .quiet { color: #555; font-size: .8rem; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #ccc; vertical-align: top; }
th:first-child, td:first-child { text-align: left; font-weight: normal; color: #555; min-width: 6rem; }
td .quiet { display: block; white-space: nowrap; }
.wide { overflow-x: auto; } th.words, td.words { text-align: left; }
th + th, td + td { min-width: 4.6rem; }
.warning { border-left: 4px solid #d55e00; padding: .2rem .7rem; margin: .5rem 0; }
nav { columns: 3 14rem; font-size: .85rem; margin: 1rem 0; } nav a { display: block; color: #005a8f; }
@media print {
  :root { font-size: 11px; } body { max-width: none; padding: 0; } nav { display: none; }
  .wide { overflow: visible; } .wide table { font-size: .75rem; }
  .wide th, .wide td { min-width: 0; padding: .15rem .3rem; }
}
"""


def page(
    series: Sequence[Series],
    drawn: Sequence[Picture | LeftOut],
    warnings: Sequence[str],
    comparison: Comparison | None = None,
) -> str:
    """Return the page. What others wrote is escaped, and could not run if it were not."""
    names = list(dict.fromkeys(each.capture.identity.name for each in series))
    title = " and ".join(names) if len(names) <= _FEW else f"{len(names)} captures"
    pictures = [each for each in drawn if isinstance(each, Picture)]
    links = "".join(f'<a href="#{each.name}">{escape(each.title)}</a>' for each in pictures)
    left_out = "".join(
        f"<li>{escape(each.title)}: {escape(each.why)}.</li>" for each in drawn if isinstance(each, LeftOut)
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Capture report: {escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>",
        *(f'<p class="quiet">{escape(each.capture.caption)}</p>' for each in series),
        *(f'<p class="warning">{escape(each)}</p>' for each in warnings),
        _verdicts(comparison) if comparison is not None else "",
        _table(series),
        f"</header><nav>{links}</nav><main>",
        *map(_section, pictures),
        f"<section><h2>Left out</h2><ul>{left_out}</ul></section>" if left_out else "",
        f"</main><footer><p>specdecode capture report {escape(__version__)}</p></footer></body></html>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _section(picture: Picture) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in picture.sentences)
    captions = "<br>".join(escape(each.caption) for each in picture.captures)
    return (
        f'<section id="{picture.name}"><h2>{escape(picture.title)}</h2>{sentences}'
        f"<figure>{inline_svg(picture)}<figcaption>{captions}</figcaption></figure></section>"
    )


def _verdicts(comparison: Comparison) -> str:
    """Return what each arm comes to against the first."""
    rows = "".join(
        f"<tr><td>{escape(arm.name)}</td><td>{escape(arm.verdict or 'baseline')}</td>"
        f"<td>{escape(arm.outputs.outputs if arm.outputs is not None else '')}</td>"
        f'<td class="words">{escape(printable(arm.message))}</td></tr>'
        for arm in comparison.arms
    )
    head = "<tr><th>arm</th><th>verdict</th><th>outputs</th><th class='words'>against the baseline</th></tr>"
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _table(series: Sequence[Series]) -> str:
    """Return the figures of all captures, one a column; how far the others are from the first where there are more."""
    columns = [measures_of(each.capture) for each in series]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = "".join(f"<th>{escape(each.label)}</th>" for each in series)
    rows = ""
    for name in names:
        cells = "".join(_cell(column.get(name), columns[0].get(name)) for column in columns)
        rows += f"<tr><td>{escape(name)}</td>{cells}</tr>"
    return f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(measure: Measure | None, first: Measure | None) -> str:
    if measure is None:
        return "<td>not known</td>"
    value = measure.value
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    shown = (
        f"{100 * value:.1f} %"
        if measure.unit == "share"
        else f"{measured(value) if isinstance(value, float) else f'{value:,}'} {measure.unit}".strip()
    )
    base = first.value if first is not None and first is not measure else None
    if isinstance(base, float | int) and base:
        change = (
            f"{100 * (value - base):+.1f} points" if measure.unit == "share" else f"{100 * (value / base - 1):+.1f} %"
        )
        shown += f' <span class="quiet">({change.replace("-", "−")})</span>'  # noqa: RUF001  a minus
    return f"<td>{shown}</td>"
