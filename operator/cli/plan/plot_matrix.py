"""Draws every precision on every place as a heat map: how many requests fit at once; needs the extra `plot`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from specdecode_operator.cli.plan.answers import DOES_NOT_FIT, TIGHT, Answer, short_names, shown_precisions
from specdecode_operator.cli.plan.text import heading
from specdecode_operator.deployment.spec.facts import Facts
from specdecode_operator.sizing.choice.node_placement import place_phrase
from specdecode_operator.sizing.choice.quantization_matrix import MatrixRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

MOST_ROWS: Final = 100
"""Of precisions, over all objects: more make a picture that no screen shows."""

_CELL_WIDTH_IN: Final = 1.1
_CELL_HEIGHT_IN: Final = 0.26
_DARK: Final = 0.55
"""Share of the scale below which cells are so dark that their number is white."""

_NO_PLACE: Final = "#EFEFEF"
_HATCH: Final = "////"
_NOTE: Final = "hatched: does not fit    ~ tight    * needs a checkpoint that nobody named, or cannot be launched so"

_Maps = list[tuple[Answer, Facts, list[MatrixRow]]]


def draw_matrix(answers: Sequence[Answer]) -> "Figure | None":
    """Return the figure, a map for each object; None where none was sized in every precision, as on CPU."""
    from matplotlib.figure import Figure  # noqa: PLC0415  heavy, and an extra

    maps: _Maps = [(each, each.facts, shown_precisions(each, each.facts)) for each in answers if each.facts]
    maps = [each for each in maps if each[2]]
    if not maps:
        return None
    heights = [len(dict.fromkeys(map(_precisions, rows))) for *_, rows in maps]
    widths = [len(dict.fromkeys(map(_place, rows))) for *_, rows in maps]
    size = (max(9.0, 3.6 + _CELL_WIDTH_IN * max(widths)), 0.4 + sum(1.4 + _CELL_HEIGHT_IN * rows for rows in heights))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(maps), 1, squeeze=False, height_ratios=[5 + rows for rows in heights])[:, 0]
    for place, (answer, facts, rows) in zip(axes, maps, strict=True):
        _draw(figure, place, rows, facts)
        place.set_title(heading(answer, facts, precisions=False), fontsize="small")
    figure.supxlabel(_NOTE, fontsize="small")
    return figure


def rows_of(answers: Sequence[Answer]) -> int:
    """Return how many rows the maps of these objects have."""
    maps = [shown_precisions(each, each.facts) for each in answers if each.facts]
    return sum(len(dict.fromkeys(map(_precisions, rows))) for rows in maps)


def _precisions(row: MatrixRow) -> str:
    models = " / ".join(str(each) for each in (row.target_precision, row.draft_precision) if each is not None)
    return f"{models}, {row.kv_cache_dtype}"


def _place(row: MatrixRow) -> tuple[str, int, int, str]:
    return row.product, row.gpus, row.nodes, row.split.label


def _draw(figure: "Figure", axes: "Axes", rows: Sequence[MatrixRow], facts: Facts) -> None:
    from matplotlib.colors import LogNorm  # noqa: PLC0415  heavy, and an extra

    lines, places = list(dict.fromkeys(map(_precisions, rows))), list(dict.fromkeys(map(_place, rows)))
    fitting = [row.concurrency for row in rows if row.verdict.value != DOES_NOT_FIT]
    norm = LogNorm(min(fitting, default=1.0), max(*fitting, 1.0, 1.001 * min(fitting, default=1.0)))
    for row in rows:
        _draw_cell(axes, row, places.index(_place(row)), lines.index(_precisions(row)), norm)
    names = short_names({place[0] for place in places})
    labels = [f"{place_phrase(gpus, nodes, names[product])}\n{split}" for product, gpus, nodes, split in places]
    axes.set_xticks(range(len(places)), labels, fontsize="small")
    axes.set_yticks(range(len(lines)), lines, fontsize="small")
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_facecolor(_NO_PLACE)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("target / draft, KV cache" if facts.pair.draft is not None else "target, KV cache")
    if fitting:
        _draw_scale(figure, axes, norm, facts.pair.limits.max_model_len)


def _draw_cell(axes: "Axes", row: MatrixRow, x: int, y: int, norm: "Normalize") -> None:
    from matplotlib import colormaps  # noqa: PLC0415  heavy, and an extra
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    corner, fits = (x - 0.5, y - 0.5), row.verdict.value != DOES_NOT_FIT
    if fits:
        share = float(norm(row.concurrency))
        # Lighter is more, for every colour vision and in grey alike.
        cell = Rectangle(corner, 1, 1, facecolor=colormaps["cividis"](share), edgecolor="white")
        ink = "white" if share < _DARK else "black"
        words = f"{'~' * (row.verdict.value == TIGHT)}{row.concurrency:,.1f}{'*' * (not row.launchable)}"
        axes.text(x, y, words, ha="center", va="center", color=ink, fontsize="small")
    else:
        cell = Rectangle(corner, 1, 1, facecolor="white", edgecolor="#999999", hatch=_HATCH, linewidth=0.4)
    axes.add_patch(cell)


def _draw_scale(figure: "Figure", axes: "Axes", norm: "Normalize", max_model_len: int) -> None:
    from matplotlib.cm import ScalarMappable  # noqa: PLC0415  heavy, and an extra
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415

    bar = figure.colorbar(ScalarMappable(norm, "cividis"), ax=axes, pad=0.01, aspect=30)
    bar.set_label(f"requests of {max_model_len:,} tokens at once", fontsize="small")
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}"))
    bar.outline.set_visible(False)
