"""Tokens of a decode step, and the time that a step takes, whatever it gives."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from specdecode_operator.pictures.figures.drawing import (
    QUIET,
    LeftOut,
    Picture,
    Series,
    legend_above,
    measured,
    new_figure,
    per_series,
    percent_axis,
    whole_ticks,
)
from specdecode_operator.pictures.seen.requests import LARGEST_BURST
from specdecode_operator.pictures.seen.sums import log_quantile

_FEW_BARS: Final = 40
_FEWEST_SIZES: Final = 4
_ONE_PERCENT: Final = 0.01
_FEWEST_STEPS: Final = 5
"""Fewer steps of a size say nothing of its quantiles."""

_HIGHEST: Final = 3.5
"""Medians that fit into the figure: where steps stall, their P90 would press all else to the ground."""

_NO_STEPS: Final = "no request has more than one chunk, so there is no decode step"


def tokens_per_step(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw how many tokens decode steps gave each request: what was captured beside what was replayed."""
    title = "Tokens per decode step"
    known = [each for each in series if each.capture.requests.bursts.any()]
    if not known:
        return LeftOut(title, _NO_STEPS)
    figure, axes = new_figure()
    largest = max(int(np.flatnonzero(each.capture.requests.bursts)[-1]) for each in known)
    sizes = np.arange(1, largest + 1)
    width = 0.8 / len(known)
    highest = 0.0
    for place, each in enumerate(known):
        counts = each.capture.requests.bursts[1 : largest + 1]
        shares = counts / counts.sum()
        highest = max(highest, shares.max())
        offset = (place - (len(known) - 1) / 2) * width
        colours = {"color": each.style.colour, "hatch": each.style.hatch, "edgecolor": "white", "linewidth": 0}
        axes.bar(sizes + offset, shares, width * 0.94, label=each.label, **colours)
        if largest * len(known) <= _FEW_BARS:
            for size, share in zip(sizes, shares, strict=True):
                words = f"{100 * share:.0f}" if share >= _ONE_PERCENT else ("<1" if share else "")
                axes.text(size + offset, share, words, ha="center", va="bottom", fontsize=7.5)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel(f"tokens a step gave a request{f' ({LARGEST_BURST}: or more)' if largest == LARGEST_BURST else ''}")
    percent_axis(axes, "decode steps", highest * 1.08)
    _size_axis(axes, largest)
    if len(known) > 1:
        legend_above(figure, axes)
    sentence = per_series(known, _mean_words)
    return Picture("tokens-per-step", title, sentence, figure, tuple(each.capture for each in known))


def _size_axis(axes: Axes, largest: int) -> None:
    """Show sizes from 1 on; one alone gets no bar as wide as the figure."""
    axes.set_xlim(0.4, max(largest, _FEWEST_SIZES) + 0.6)
    whole_ticks(axes)


def _mean_words(each: Series) -> str:
    counts = each.capture.requests.bursts
    ones = counts[1] / counts.sum()
    return f"{each.capture.requests.mean_burst:.2f} tokens a step on average, {ones:.0%} of the steps gave one"


def step_time(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the time of a step by what it gave, and that time shared among its tokens."""
    title = "Step time against burst size"
    known = [each for each in series if each.capture.requests.bursts.any()]
    if not known:
        return LeftOut(title, _NO_STEPS)
    figure, axes = new_figure()
    slowest_ms = max(_median(each, size) for each in known for size in _sizes(each))
    for place, each in enumerate(known):
        _draw_times(axes, each, (place - (len(known) - 1) / 2) * min(0.18, 0.7 / len(known)))
    axes.plot([], [], color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)), label="gap / N: time a token (median)")
    cut = axes.get_ylim()[1] > _HIGHEST * slowest_ms
    words = f"P10 to P90 of the steps{', cut at the top' if cut else ''}"
    axes.plot([], [], color=QUIET, linewidth=5, alpha=0.4, label=words)
    axes.set_ylim(0, min(axes.get_ylim()[1], _HIGHEST * slowest_ms))
    axes.set_xlabel("burst size N: tokens a step gave a request")
    axes.set_ylabel("time of the step (ms)")
    _size_axis(axes, max(_sizes(each)[-1] for each in known))
    legend_above(figure, axes)
    sentence = per_series(known, _time_words)
    return Picture("step-time", title, sentence, figure, tuple(each.capture for each in known))


def _sizes(each: Series) -> list[int]:
    counts = each.capture.requests.bursts
    often = np.flatnonzero(counts >= _FEWEST_STEPS)
    return [int(size) for size in (often if len(often) else np.flatnonzero(counts))]


def _median(each: Series, size: int) -> float:
    return log_quantile(each.capture.requests.gaps[size], 0.5)


def _draw_times(axes: Axes, each: Series, offset: float) -> None:
    sizes = np.array(_sizes(each))
    gaps = each.capture.requests.gaps
    low, middle, high = (np.array([log_quantile(gaps[size], share) for size in sizes]) for share in (0.1, 0.5, 0.9))
    style = each.style
    axes.vlines(sizes + offset, low, high, colors=style.colour, linewidth=5, alpha=0.4)
    axes.plot(sizes + offset, middle, color=style.colour, marker=style.marker, linestyle=style.line, label=each.label)
    axes.plot(
        sizes + offset,
        middle / sizes,
        color=style.colour,
        marker=style.marker,
        markersize=3,
        markerfacecolor="white",
        linewidth=1.0,
        linestyle=(0, (4, 2)),
    )


def _time_words(each: Series) -> str:
    sizes = _sizes(each)
    first, last = sizes[0], sizes[-1]
    if first == last:
        return f"a step took {measured(_median(each, first))} ms (median), and gave {first} token{'s' * (first > 1)}"
    return (
        f"a step took {measured(_median(each, first))} ms (median) where it gave {first} and "
        f"{measured(_median(each, last))} ms where it gave {last}: {measured(_median(each, first) / first)} against "
        f"{measured(_median(each, last) / last)} ms a token"
    )
