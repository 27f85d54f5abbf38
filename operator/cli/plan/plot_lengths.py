"""Draws how many tokens the KV cache of candidates holds, by the length that requests may have."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from specdecode_operator.cli.plan.answers import Answer, Candidate
from specdecode_operator.cli.plan.lengths import Held, held_by_length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
