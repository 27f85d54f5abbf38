"""Plot a plan (extra `plot`): memory of each candidate, free KV cache, and the precision matrix."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from specdecode_operator.cli.plan.answers import (
    DOES_NOT_FIT,
    TIGHT,
    Answer,
    Candidate,
    precision_pair,
    short_names,
    shown_precisions,
)
from specdecode_operator.cli.plan.text import heading
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.sizing.arithmetic import GIB
from specdecode_operator.sizing.devices import find_device
from specdecode_operator.sizing.errors import SizingError
from specdecode_operator.sizing.memory.budget import Budget, estimate
from specdecode_operator.sizing.placement import place_phrase
from specdecode_operator.sizing.quantization_matrix import MatrixRow

_SUFFIXES: Final = (".png", ".svg")
_DOTS_PER_INCH: Final = 150

# Bars
_MOST_BARS: Final = 40
"""Limit for readable bars."""
_FEW_BARS: Final = 4
_LINE_REACH: Final = 0.4
_BAR_WIDTH: Final = 0.62
_LABEL_SHARE: Final = 0.03
"""Share of the picture's height below which a part has no room for its number."""
# Label, colour, ink and terms. Colour-blind people can distinguish these colours (Okabe and Ito, 2008).
_PARTS: Final = (
    ("target weights", "#0072B2", "white", ("target_weights_bytes",)),
    ("draft weights", "#56B4E9", "black", ("draft_weights_bytes",)),
    ("LoRA adapters", "#CC79A7", "black", ("adapters_bytes",)),
    (
        "state, activation, graphs, NCCL",
        "#E69F00",
        "black",
        ("state_bytes", "activation_bytes", "cuda_graphs_bytes", "non_torch_bytes"),
    ),
    ("KV cache", "#009E73", "white", ("available_kv_bytes",)),
)
_HATCH: Final = "////"
_OUTSIDE: Final = "#E5E5E5"
_TOO_MUCH: Final = "#B00020"

# Tokens by length
_LENGTHS_WIDTH_IN: Final = 5.5
_SHORTEST: Final = 1024
_OCTAVES: Final = 24
# The same colours, with markers and line styles for print. More lines would not be distinguishable.
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
"""Numbers of full-length requests with a guide line."""
_GUIDE: Final = "#888888"

# Precisions
_MOST_ROWS: Final = 100
"""Limit for all objects, so that the picture fits on a screen."""
_CELL_WIDTH_IN: Final = 1.1
_CELL_HEIGHT_IN: Final = 0.26
_DARK: Final = 0.55
"""Share of the colour scale below which numbers are white."""
_NO_PLACE: Final = "#EFEFEF"
_NOTE: Final = "hatched: does not fit    ~ tight    * vLLM rejects it, or it needs a checkpoint that the spec lacks"


class PlotError(Exception):
    """Error of drawing, with a fix."""


class _Line(NamedTuple):
    """KV cache capacity of one candidate by maxModelLen."""

    label: str
    own_length: int  # maxModelLen of the object
    held: list[tuple[int, int]]  # maxModelLen and tokens


def draw(answers: Sequence[Answer], file: Path, *, matrix: bool) -> None:
    """Write a picture: a bar and the tokens by length for each candidate, or with ``matrix`` a heat map of precisions.

    Raise PlotError if the format is unknown, there is no candidate, or the file cannot be written.
    """
    if file.suffix.lower() not in _SUFFIXES:
        raise PlotError(f"{file}: unknown format; use a name that ends in {' or '.join(_SUFFIXES)}")
    bars = [(answer, candidate) for answer in answers for candidate in (answer.matrix if matrix else answer.candidates)]
    if not bars:
        raise PlotError(f"{file}: no object has a candidate to draw")
    figure = (_draw_matrix(answers, file) if matrix else None) or _draw_candidates(answers, bars, file, matrix=matrix)
    try:
        figure.savefig(file, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise PlotError(f"{file}: {error.strerror}; name a file in a writable folder") from error


def _draw_candidates(
    answers: Sequence[Answer], bars: Sequence[tuple[Answer, Candidate]], file: Path, *, matrix: bool
) -> Figure:
    if len(bars) > _MOST_BARS:
        raise PlotError(f"{file}: {len(bars)} bars exceed the maximum of {_MOST_BARS}; plan fewer objects")
    several = len(answers) > 1
    lines = [] if matrix else _lengths_of(bars, several=several)
    width = max(7, 2.5 + 1.35 * len(bars))
    # Figure without pyplot needs no display and keeps no global state.
    if lines:
        figure = Figure(figsize=(width + _LENGTHS_WIDTH_IN, 5.5), layout="constrained")
        axes, lengths = figure.subplots(1, 2, width_ratios=(width, _LENGTHS_WIDTH_IN))
        _draw_lengths(lengths, lines)
    else:
        figure = Figure(figsize=(width, 5.5), layout="constrained")
        axes = figure.add_subplot()
    _draw_bars(axes, [candidate.budget for _, candidate in bars])
    labels = []
    for answer, candidate in bars:
        # Two lines, because one line would overlap the next label.
        place, comma, precisions = candidate.label.partition(", TP ")
        split, _, held = precisions.partition(", ")
        name = f"{answer.document.name}\n" if several else ""
        labels.append("\n".join(filter(None, [f"{name}{place}{comma}{split}", held, candidate.verdict])))
    axes.set_xticks(range(len(bars)), labels)
    if len(bars) > _FEW_BARS:
        axes.tick_params("x", labelsize="small")
    on_cpu = all(answer.facts is not None and answer.facts.on_cpu for answer, _ in bars)
    axes.set_ylabel("GiB" if on_cpu else "GiB per GPU")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    facts = answers[0].facts
    if several or facts is None:
        axes.set_title("Memory of each candidate")
    else:
        name, _, details = heading(answers[0], facts, precisions=not matrix).partition("   ")
        figure.suptitle(name)
        axes.set_title(details, fontsize="small")
    return figure


def _draw_bars(axes: Axes, budgets: Sequence[Budget]) -> None:
    places = range(len(budgets))
    reach = ([place - _LINE_REACH for place in places], [place + _LINE_REACH for place in places])
    memory, requested = ([getattr(each, f"{name}_bytes") / GIB for each in budgets] for name in ("total", "requested"))
    # Memory left for the KV cache may be negative.
    parts = [[max(0, sum(getattr(each, term) for term in terms)) / GIB for each in budgets] for *_, terms in _PARTS]
    used = [sum(heights) for heights in zip(*parts, strict=True)]
    top, bottoms = max(*memory, *used), [0.0] * len(budgets)
    for (label, colour, ink, _), heights in zip(_PARTS, parts, strict=True):
        if any(heights):
            axes.bar(places, heights, bottom=bottoms, width=_BAR_WIDTH, color=colour, label=label)
        for place, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
            if height > _LABEL_SHARE * top:
                # A box keeps crossing lines off the number.
                box = {"facecolor": colour, "edgecolor": "none", "pad": 0.3}
                style: Any = {"ha": "center", "va": "center", "color": ink, "fontsize": "small"}
                axes.text(place, bottom + height / 2, f"{height:.1f}", bbox=box, zorder=5, **style)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    rest = [max(0.0, whole - taken) for whole, taken in zip(memory, used, strict=True)]
    axes.bar(places, rest, bottom=bottoms, width=_BAR_WIDTH, color=_OUTSIDE, label="outside the budget", zorder=0)
    # The margin is the end of the KV cache.
    margins = [min(max(0, each.available_kv_bytes), each.margin_bytes) / GIB for each in budgets]
    if any(margins):
        bottoms = [end - margin for end, margin in zip(requested, margins, strict=True)]
        hatched: Any = {"color": _PARTS[-1][1], "hatch": _HATCH, "edgecolor": "white", "linewidth": 0}
        axes.bar(places, margins, bottom=bottoms, width=_BAR_WIDTH, label="margin", **hatched)
    axes.hlines(memory, *reach, colors="black", linestyles="solid", linewidth=1.4, label="memory")
    axes.hlines(requested, *reach, colors="black", linestyles="dashed", linewidth=1.4, label="budget")
    # End of the needed KV cache, on bars where it does not fit
    lacking = [each.needed_kv_bytes - each.available_kv_bytes for each in budgets]
    ends = {place: requested[place] + lacking[place] / GIB for place in places if lacking[place] > 0}
    if ends:
        left, right = [place - _LINE_REACH for place in ends], [place + _LINE_REACH for place in ends]
        dotted: Any = {"colors": _TOO_MUCH, "linestyles": "dotted", "linewidth": 1.8, "label": "needed"}
        axes.hlines([*ends.values()], left, right, **dotted)
    top = max(top, *ends.values(), 0.0)
    for place, budget in enumerate(budgets):
        words = f"{lacking[place] / GIB:.1f} GiB too little KV cache" if lacking[place] > 0 else ""
        if budget.available_kv_bytes < 0:
            words = f"{-budget.available_kv_bytes / GIB:.1f} GiB over the budget"
        if words:
            height = max(memory[place], used[place], ends.get(place, 0.0)) + top * 0.015
            axes.text(place, height, words, ha="center", va="bottom", color=_TOO_MUCH, fontsize="small")
    axes.set_ylim(0, top * 1.08)


def _lengths_of(bars: Sequence[tuple[Answer, Candidate]], *, several: bool) -> list[_Line]:
    """Return a line for each candidate that holds tokens at any length; none for a CPU."""
    lines = []
    for answer, candidate in bars:
        facts = answer.facts
        if facts is None or facts.on_cpu:
            continue
        device = find_device(candidate.product, facts.spec.accelerator.memory_gib_per_gpu)
        if device is None:
            continue
        pair = facts.at(candidate.target_precision, candidate.draft_precision, candidate.budget.fewer_seqs).pair
        own, held = pair.limits.max_model_len, []
        longest = max(own, pair.target.max_position_embeddings)
        lengths = {own, *(_SHORTEST << octave for octave in range(_OCTAVES) if _SHORTEST << octave <= longest)}
        for length in sorted(lengths):
            sized = replace(pair, limits=replace(pair.limits, max_model_len=length))
            try:
                tokens = estimate(sized, device, candidate.split).kv_cache_tokens
            except SizingError:
                continue
            if tokens > 0:
                held.append((length, tokens))
        label = f"{answer.document.name}, {candidate.label}" if several else candidate.label
        if held:
            lines.append(_Line(label, facts.pair.limits.max_model_len, held))
    return lines


def _draw_lengths(axes: Axes, lines: Sequence[_Line]) -> None:
    for line, (colour, marker, style) in zip(lines, _LOOKS, strict=False):
        axes.plot(
            *zip(*line.held, strict=True), color=colour, marker=marker, markersize=4, linestyle=style, label=line.label
        )
        for length, tokens in line.held:
            if length == line.own_length:
                axes.plot(length, tokens, marker="o", markersize=12, fillstyle="none", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths, held = zip(*(each for line in lines for each in line.held), strict=True)
    ends, low, high = (min(lengths), max(lengths)), min(lengths), 3 * max(held)
    for requests in _AT_ONCE:
        # Where a candidate's line crosses a guide, no more requests of that length fit.
        axes.plot(ends, [requests * each for each in ends], color=_GUIDE, linewidth=0.8, linestyle=(0, (1, 2)))
        words = f"{requests} request{'s' * (requests > 1)}"
        for end, side in ((ends[1], "right"), (ends[0], "left")):
            if low <= requests * end <= high:
                axes.annotate(words, (end, requests * end), (0, 4), textcoords="offset points", ha=side, fontsize=7)
                break
    axes.set_ylim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.tick_params("x", labelrotation=30)
    axes.set_xlabel("maxModelLen (tokens); circle: the value in the manifest")
    axes.set_ylabel("KV cache (tokens)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    left_out = len(lines) - len(_LOOKS)
    more = f" ({left_out} candidates left out)" if left_out > 0 else ""
    axes.set_title(f"KV cache capacity by maxModelLen{more}", fontsize="small")
    axes.legend(fontsize="small", loc="best")


def _draw_matrix(answers: Sequence[Answer], file: Path) -> Figure | None:
    """Return a figure with a heat map per object; None if no object was sized in every precision, as on CPU."""
    maps = [(each, each.facts, rows) for each in answers if each.facts and (rows := shown_precisions(each, each.facts))]
    heights = [len(set(map(_precisions, rows))) for *_, rows in maps]
    if sum(heights) > _MOST_ROWS:
        raise PlotError(f"{file}: {sum(heights)} rows exceed the maximum of {_MOST_ROWS}; plan fewer objects")
    if not maps:
        return None
    width = max(len(set(map(_place, rows))) for *_, rows in maps)
    size = (max(9.0, 3.6 + _CELL_WIDTH_IN * width), 0.4 + sum(1.4 + _CELL_HEIGHT_IN * rows for rows in heights))
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(maps), 1, squeeze=False, height_ratios=[5 + rows for rows in heights])[:, 0]
    for axes, (answer, facts, rows) in zip(places, maps, strict=True):
        _draw_map(figure, axes, rows, facts)
        axes.set_title(heading(answer, facts, precisions=False), fontsize="small")
    figure.supxlabel(_NOTE, fontsize="small")
    return figure


def _precisions(row: MatrixRow) -> str:
    return f"{precision_pair(row, ' / ')}, {row.kv_cache_dtype}"


def _place(row: MatrixRow) -> tuple[str, int, int, str]:
    return row.product, row.gpus, row.nodes, row.split.label


def _draw_map(figure: Figure, axes: Axes, rows: Sequence[MatrixRow], facts: Facts) -> None:
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
        bar = figure.colorbar(ScalarMappable(norm, "cividis"), ax=axes, pad=0.01, aspect=30)
        bar.set_label(f"requests of {facts.pair.limits.max_model_len:,} tokens at once", fontsize="small")
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        bar.ax.yaxis.set_minor_locator(NullLocator())
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.3g}"))
        bar.outline.set_visible(False)


def _draw_cell(axes: Axes, row: MatrixRow, x: int, y: int, norm: Normalize) -> None:
    corner, fits = (x - 0.5, y - 0.5), row.verdict.value != DOES_NOT_FIT
    if fits:
        share = float(norm(row.concurrency))
        # Lighter cells hold more requests, also in greyscale.
        cell = Rectangle(corner, 1, 1, facecolor=colormaps["cividis"](share), edgecolor="white")
        ink = "white" if share < _DARK else "black"
        words = f"{'~' * (row.verdict.value == TIGHT)}{row.concurrency:,.1f}{'*' * (not row.launchable)}"
        axes.text(x, y, words, ha="center", va="center", color=ink, fontsize="small")
    else:
        cell = Rectangle(corner, 1, 1, facecolor="white", edgecolor="#999999", hatch=_HATCH, linewidth=0.4)
    axes.add_patch(cell)
