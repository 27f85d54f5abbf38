"""Plot a plan (extra `plot`): memory of each candidate, free KV cache, and the precision matrix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from specdecode_operator.cli.plan.answers import DOES_NOT_FIT, TIGHT, Answer, Candidate, short_names, shown_precisions
from specdecode_operator.cli.plan.text import heading
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.placement import place_phrase
from specdecode_operator.sizing.quantization_matrix import MatrixRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure


_SHORTEST: Final = 1024
_OCTAVES: Final = 24


@dataclass(frozen=True)
class Held:
    """What a KV cache holds at one length."""

    max_model_len: int
    tokens: int
    requests: float  # of that length, at once


def held_by_length(facts: Facts, candidate: Candidate) -> list[Held]:
    """Return what the candidate would hold at lengths up to what the target was made for; nothing of a CPU."""
    device = find_device(candidate.product, facts.spec.accelerator.memory_gib_per_gpu)
    if facts.on_cpu or device is None:
        return []
    pair = facts.at(candidate.target_precision, candidate.draft_precision, candidate.budget.fewer_seqs).pair
    found = []
    for length in _lengths(pair.limits.max_model_len, pair.target.max_position_embeddings):
        try:
            budget = estimate(replace(pair, limits=replace(pair.limits, max_model_len=length)), device, candidate.split)
        except SizingError:
            continue
        if budget.kv_cache_tokens > 0:
            found.append(Held(length, budget.kv_cache_tokens, budget.max_concurrency))
    return found


def _lengths(own: int, longest: int) -> Iterator[int]:
    octaves = (_SHORTEST << octave for octave in range(_OCTAVES))
    yield from sorted({own, *(length for length in octaves if length <= max(own, longest))})


_MOST_LINES: Final = 8
"""More lines than that cannot be told apart: the others are left out, and that is said."""

# Colours that people with any colour vision can tell apart (Okabe and Ito, 2008); marks and lines for print.
_LOOKS: Final = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", "-"),
    ("#56B4E9", "P", "--"),
    ("#000000", "X", "-."),
    ("#999999", "*", ":"),
)
_AT_ONCE: Final = (1, 8, 64)
"""Requests of the full length whose tokens are drawn as lines to read off how many fit."""

_GUIDE: Final = "#888888"


class Line(NamedTuple):
    """What one candidate holds."""

    label: str
    own_length: int  # that the object asks for
    held: list[Held]


def lengths_of(bars: Sequence[tuple[Answer, Candidate]], *, several: bool) -> list[Line]:
    """Return a line for each candidate that holds anything at any length."""
    lines = [
        Line(
            f"{answer.document.name}, {candidate.label}" if several else candidate.label,
            answer.facts.pair.limits.max_model_len,
            held_by_length(answer.facts, candidate),
        )
        for answer, candidate in bars
        if answer.facts is not None
    ]
    return [line for line in lines if line.held]


def draw_lengths(axes: "Axes", lines: Sequence[Line]) -> None:
    """Draw the lines, and what so many requests of a length need."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # noqa: PLC0415  heavy, and an extra

    for line, (colour, marker, style) in zip(lines, _LOOKS, strict=False):
        lengths, tokens = [each.max_model_len for each in line.held], [each.tokens for each in line.held]
        axes.plot(lengths, tokens, color=colour, marker=marker, markersize=4, linestyle=style, label=line.label)
        own = next((each for each in line.held if each.max_model_len == line.own_length), None)
        if own is not None:
            axes.plot(own.max_model_len, own.tokens, marker="o", markersize=12, fillstyle="none", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = [each for line in lines for each in line.held]
    axes.set_ylim(min(each.max_model_len for each in every), 3 * max(each.tokens for each in every))
    _draw_guides(axes, [each.max_model_len for each in every])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.tick_params("x", labelrotation=30)
    axes.set_xlabel("maxModelLen (tokens); ringed: as asked for")
    axes.set_ylabel("KV cache (tokens)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    left_out = len(lines) - _MOST_LINES
    axes.set_title(
        f"Tokens held by length{f' ({left_out} candidates left out)' if left_out > 0 else ''}", fontsize="small"
    )
    axes.legend(fontsize="small", loc="best")


def _draw_guides(axes: "Axes", lengths: Sequence[int]) -> None:
    """Draw what one request and more of each length need at once: where a line crosses one, no more fit."""
    ends, (low, high) = (min(lengths), max(lengths)), axes.get_ylim()
    for requests in _AT_ONCE:
        axes.plot(ends, [requests * each for each in ends], color=_GUIDE, linewidth=0.8, linestyle=(0, (1, 2)))
        words = f"{requests} request{'s' * (requests > 1)}"
        for end, side in ((ends[1], "right"), (ends[0], "left")):
            if low <= requests * end <= high:
                axes.annotate(words, (end, requests * end), (0, 4), textcoords="offset points", ha=side, fontsize=7)
                break
    axes.set_ylim(low, high)


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


SUFFIXES: Final = (".png", ".svg")

_MOST_BARS: Final = 40
"""More bars than that cannot be told apart."""

_FEW_BARS: Final = 4
_LINE_REACH: Final = 0.4
_BAR_WIDTH: Final = 0.62
_LABEL_SHARE: Final = 0.03
"""Parts below this share of the picture's height have no room for their number."""

_DOTS_PER_INCH: Final = 150
_LENGTHS_WIDTH_IN: Final = 5.5


class PlotError(Exception):
    """A picture that cannot be drawn, and what to do."""


@dataclass(frozen=True)
class _Part:
    """One colour of a bar."""

    label: str
    colour: str
    ink: str
    terms: tuple[str, ...]

    def gib(self, budget: Budget) -> float:
        size_bytes: int = sum(getattr(budget, term) for term in self.terms)
        return max(0, size_bytes) / GIB


# Colours that people with any colour vision can tell apart (Okabe and Ito, 2008).
_PARTS: Final = (
    _Part("target weights", "#0072B2", "white", ("target_weights_bytes",)),
    _Part("draft weights", "#56B4E9", "black", ("draft_weights_bytes",)),
    _Part(
        "state, activation, graphs, NCCL",
        "#E69F00",
        "black",
        ("state_bytes", "activation_bytes", "cuda_graphs_bytes", "non_torch_bytes"),
    ),
    _Part("KV cache", "#009E73", "white", ("available_kv_bytes",)),
)


_MARGIN_HATCH: Final = "////"
_OUTSIDE: Final = "#E5E5E5"
_TOO_MUCH: Final = "#B00020"


def draw(answers: Sequence[Answer], file: Path, *, matrix: bool) -> None:
    """Write a picture: a bar for each candidate, and what it holds by length; of a matrix all precisions and places."""
    if file.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{file}: no such format: end the name in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401, PLC0415  heavy, and an extra
    except ImportError as error:
        raise PlotError("matplotlib is not installed: pip install '.[plot]' in a clone") from error
    bars = [(answer, candidate) for answer in answers for candidate in (answer.matrix if matrix else answer.candidates)]
    if not bars:
        raise PlotError(f"{file}: there is no candidate to draw")
    figure = (_draw_matrix(answers, file) if matrix else None) or _draw_candidates(answers, bars, file, matrix=matrix)
    try:
        figure.savefig(file, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise PlotError(f"{file}: {error.strerror}: name a file that can be written") from error


def _draw_matrix(answers: Sequence[Answer], file: Path) -> "Figure | None":
    if (rows := rows_of(answers)) > MOST_ROWS:
        raise PlotError(f"{file}: {rows} rows are too many, {MOST_ROWS} are the most: plan fewer objects")
    return draw_matrix(answers)


def _draw_candidates(
    answers: Sequence[Answer], bars: Sequence[tuple[Answer, Candidate]], file: Path, *, matrix: bool
) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415  heavy, and an extra

    if len(bars) > _MOST_BARS:
        raise PlotError(f"{file}: {len(bars)} bars are too many, {_MOST_BARS} are the most: plan fewer objects")
    lines = [] if matrix else lengths_of(bars, several=len(answers) > 1)
    width = max(7, 2.5 + 1.35 * len(bars))
    # Without pyplot no display is needed and nothing is kept.
    if lines:
        figure = Figure(figsize=(width + _LENGTHS_WIDTH_IN, 5.5), layout="constrained")
        axes, lengths = figure.subplots(1, 2, width_ratios=(width, _LENGTHS_WIDTH_IN))
        draw_lengths(lengths, lines)
    else:
        figure = Figure(figsize=(width, 5.5), layout="constrained")
        axes = figure.add_subplot()
    _draw_bars(axes, bars, several=len(answers) > 1)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    _draw_title(figure, axes, answers, matrix=matrix)
    return figure


def _draw_title(figure: "Figure", axes: "Axes", answers: Sequence[Answer], *, matrix: bool) -> None:
    facts = answers[0].facts
    if len(answers) > 1 or facts is None:
        axes.set_title("Memory of each candidate")
        return
    name, _, details = heading(answers[0], facts, precisions=not matrix).partition("   ")
    figure.suptitle(name)
    axes.set_title(details, fontsize="small")


def _draw_bars(axes: "Axes", bars: Sequence[tuple[Answer, Candidate]], *, several: bool) -> None:
    budgets = [candidate.budget for _, candidate in bars]
    memory = [budget.total_bytes / GIB for budget in budgets]
    bottoms = [0.0] * len(bars)
    used = [sum(part.gib(budget) for part in _PARTS) for budget in budgets]
    top = max(*memory, *used)
    for part in _PARTS:
        heights = [part.gib(budget) for budget in budgets]
        if any(heights):
            _draw_part(axes, heights, bottoms, part, top)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    places = range(len(bars))
    rest = [max(0.0, all_of_it - taken) for all_of_it, taken in zip(memory, used, strict=True)]
    axes.bar(places, rest, bottom=bottoms, width=_BAR_WIDTH, color=_OUTSIDE, label="outside the budget", zorder=0)
    _draw_margins(axes, budgets)
    _draw_lines(axes, memory, "solid", "memory")
    _draw_lines(axes, [budget.requested_bytes / GIB for budget in budgets], "dashed", "budget")
    needed = _draw_needed(axes, budgets)
    top = max(top, *needed)
    for place, words, height in zip(places, map(_lacking, budgets), map(max, memory, used, needed), strict=True):
        if words:
            axes.text(place, height + top * 0.015, words, ha="center", va="bottom", color=_TOO_MUCH, fontsize="small")
    axes.set_xticks(places, [_bar_label(*bar, several=several) for bar in bars])
    if len(bars) > _FEW_BARS:
        axes.tick_params("x", labelsize="small")
    on_cpu = all(answer.facts is not None and answer.facts.on_cpu for answer, _ in bars)
    axes.set_ylabel("GiB" if on_cpu else "GiB per GPU")
    axes.set_ylim(0, top * 1.08)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_part(axes: "Axes", heights: Sequence[float], bottoms: Sequence[float], part: _Part, top: float) -> None:
    axes.bar(range(len(heights)), heights, bottom=bottoms, width=_BAR_WIDTH, color=part.colour, label=part.label)
    for place, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
        if height > _LABEL_SHARE * top:
            middle = bottom + height / 2
            box = {"facecolor": part.colour, "edgecolor": "none", "pad": 0.3}
            words = f"{height:.1f}"
            axes.text(
                place, middle, words, ha="center", va="center", color=part.ink, fontsize="small", bbox=box, zorder=5
            )


def _draw_margins(axes: "Axes", budgets: Sequence[Budget]) -> None:
    margins = [min(max(0, budget.available_kv_bytes), budget.margin_bytes) / GIB for budget in budgets]
    if any(margins):
        bottoms = [budget.requested_bytes / GIB - margin for budget, margin in zip(budgets, margins, strict=True)]
        axes.bar(
            range(len(budgets)),
            margins,
            bottom=bottoms,
            width=_BAR_WIDTH,
            color=_PARTS[-1].colour,
            hatch=_MARGIN_HATCH,
            edgecolor="white",
            linewidth=0,
            label="margin",
        )


def _draw_needed(axes: "Axes", budgets: Sequence[Budget]) -> list[float]:
    ends = [(budget.requested_bytes - budget.available_kv_bytes + budget.needed_kv_bytes) / GIB for budget in budgets]
    short = [budget.available_kv_bytes < budget.needed_kv_bytes for budget in budgets]
    places = [place for place, lacks in enumerate(short) if lacks]
    if places:
        heights = [ends[place] for place in places]
        left, right = [place - _LINE_REACH for place in places], [place + _LINE_REACH for place in places]
        axes.hlines(heights, left, right, colors=_TOO_MUCH, linestyles="dotted", linewidth=1.8, label="needed")
    return [end if lacks else 0.0 for end, lacks in zip(ends, short, strict=True)]


def _lacking(budget: Budget) -> str:
    if budget.available_kv_bytes < 0:
        return f"{-budget.available_kv_bytes / GIB:.1f} over the budget"
    lacking_bytes = budget.needed_kv_bytes - budget.available_kv_bytes
    return f"{lacking_bytes / GIB:.1f} too little KV cache" if lacking_bytes > 0 else ""


def _draw_lines(axes: "Axes", heights: Sequence[float], style: Literal["solid", "dashed"], label: str) -> None:
    left = [place - _LINE_REACH for place in range(len(heights))]
    right = [place + _LINE_REACH for place in range(len(heights))]
    axes.hlines(heights, left, right, colors="black", linestyles=style, linewidth=1.4, label=label)


def _bar_label(answer: Answer, candidate: Candidate, *, several: bool) -> str:
    name = f"{answer.document.name}\n" if several else ""
    # Two lines where one would run into the next bar's.
    place, comma, precisions = candidate.label.partition(", TP ")
    split, _, held = precisions.partition(", ")
    return "\n".join(filter(None, [f"{name}{place}{comma}{split}", held, candidate.verdict]))
