"""Draws the memory of each candidate as stacked bars, and what its KV cache holds; needs the extra `plot`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from specdecode_operator.cli.plan.answers import Answer, Candidate
from specdecode_operator.cli.plan.text import heading
from specdecode_operator.sizing.base.units import GIB
from specdecode_operator.sizing.memory.budget import Budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
        """Return its height; what is left for the KV cache may be less than nothing, which has none."""
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
    """Write a picture: a bar for each candidate, and what it holds by length; of a matrix all precisions and places.

    Raises
    ------
    PlotError
        When the format is unknown, matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
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
    from specdecode_operator.cli.plan.plot_matrix import MOST_ROWS, draw_matrix, rows_of  # noqa: PLC0415

    if (rows := rows_of(answers)) > MOST_ROWS:
        raise PlotError(f"{file}: {rows} rows are too many, {MOST_ROWS} are the most: plan fewer objects")
    return draw_matrix(answers)


def _draw_candidates(
    answers: Sequence[Answer], bars: Sequence[tuple[Answer, Candidate]], file: Path, *, matrix: bool
) -> "Figure":
    from matplotlib.figure import Figure  # noqa: PLC0415  heavy, and an extra

    from specdecode_operator.cli.plan.plot_lengths import draw_lengths, lengths_of  # noqa: PLC0415

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
    """One colour of all bars, each with its number where it has room; numbers cover the lines that cross them."""
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
    """Hatch what the verdict keeps back of the KV cache because estimates err."""
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
    """Mark where the KV cache would end that is needed at least, on bars that do not hold it; return those ends."""
    ends = [(budget.requested_bytes - budget.available_kv_bytes + budget.needed_kv_bytes) / GIB for budget in budgets]
    short = [budget.available_kv_bytes < budget.needed_kv_bytes for budget in budgets]
    places = [place for place, lacks in enumerate(short) if lacks]
    if places:
        heights = [ends[place] for place in places]
        left, right = [place - _LINE_REACH for place in places], [place + _LINE_REACH for place in places]
        axes.hlines(heights, left, right, colors=_TOO_MUCH, linestyles="dotted", linewidth=1.8, label="needed")
    return [end if lacks else 0.0 for end, lacks in zip(ends, short, strict=True)]


def _lacking(budget: Budget) -> str:
    """Return what a bar is short of, in words; nothing where it holds what is needed."""
    if budget.available_kv_bytes < 0:
        return f"{-budget.available_kv_bytes / GIB:.1f} over the budget"
    lacking_bytes = budget.needed_kv_bytes - budget.available_kv_bytes
    return f"{lacking_bytes / GIB:.1f} too little KV cache" if lacking_bytes > 0 else ""


def _draw_lines(axes: "Axes", heights: Sequence[float], style: Literal["solid", "dashed"], label: str) -> None:
    """One short line over each bar."""
    left = [place - _LINE_REACH for place in range(len(heights))]
    right = [place + _LINE_REACH for place in range(len(heights))]
    axes.hlines(heights, left, right, colors="black", linestyles=style, linewidth=1.4, label=label)


def _bar_label(answer: Answer, candidate: Candidate, *, several: bool) -> str:
    name = f"{answer.document.name}\n" if several else ""
    # Two lines where one would run into the next bar's.
    place, comma, precisions = candidate.label.partition(", TP ")
    split, _, held = precisions.partition(", ")
    return "\n".join(filter(None, [f"{name}{place}{comma}{split}", held, candidate.verdict]))
