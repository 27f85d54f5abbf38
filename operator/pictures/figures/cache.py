"""KV cache and preemptions over time."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from specdecode_operator.pictures.figures.drawing import (
    LeftOut,
    Picture,
    Series,
    counted,
    legend_above,
    new_figure,
    per_series,
)
from specdecode_operator.pictures.seen.steps import StepSums

_POINTS: Final = 240
_HALF: Final = 0.5
_WAITING: Final = "#D55E00"
_PREEMPTED: Final = "#B00020"


def cache_use(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw how full the KV cache was, how many requests ran and waited, and when some were preempted."""
    title = "KV cache and preemptions"
    known = [(each, steps) for each in series if (steps := each.capture.steps) is not None]
    if not known:
        return LeftOut(title, "there are no step statistics (step-stats.jsonl)")
    figure, rows = new_figure(len(known), 1, height_in=1.3 + 2.1 * len(known), squeeze=False)
    for (each, steps), (axes,) in zip(known, rows, strict=True):
        _draw(axes, each, steps)
        if len(known) > 1:
            axes.set_title(each.label)
    rows[-1][0].set_xlabel("time since the first arrival (s)")
    legend_above(figure, *rows[:, 0], columns=5)
    steps_of = {each.label: steps for each, steps in known}
    sentence = per_series([each for each, _ in known], lambda each: _words(each, steps_of[each.label]))
    return Picture("kv-cache", title, sentence, figure, tuple(each.capture for each, _ in known))


def _draw(axes: Axes, each: Series, steps: StepSums) -> None:
    bins = steps.by_time.coarser(_POINTS)
    seconds = (bins.moments_ms - each.capture.zero_ms) / 1000
    count = bins.sums[:, 0]
    mean, most = bins.sums[:, 3] / count, bins.largest[:, 3]
    axes.plot(seconds, 100 * most, color=each.style.colour, linewidth=0.8, label="KV cache in use, most")
    axes.fill_between(seconds, 100 * mean, color=each.style.colour, alpha=0.25, label="KV cache in use, mean")
    axes.set_ylim(0, 100 if most.max() > _HALF else max(1.0, 115 * most.max()))
    axes.set_ylabel("KV cache in use (%)")
    preempted = bins.sums[:, 6] > 0
    if preempted.any():
        top = np.full(preempted.sum(), axes.get_ylim()[1] * 0.97)
        axes.plot(seconds[preempted], top, "v", color=_PREEMPTED, markersize=5, label="resumed after preemption")
    other = axes.twinx()
    other.spines["right"].set_visible(True)
    other.grid(visible=False)
    other.set_ylabel("requests")
    for column, name, colour, line in ((4, "running", "#000000", "--"), (5, "waiting", _WAITING, ":")):
        values = bins.sums[:, column] / count
        if values.any():
            other.plot(seconds, values, color=colour, linewidth=1.2, linestyle=line)
            axes.plot([], [], color=colour, linewidth=1.2, linestyle=line, label=f"requests {name} (right)")
    other.set_ylim(bottom=0)


def _words(each: Series, steps: StepSums) -> str:
    bins = steps.by_time
    most, waited = float(bins.largest[:, 3].max()), float(bins.largest[:, 5].max())
    preemptions = sum(each.capture.requests.preemptions)
    waiting = f"up to {counted(waited, 'request')} waited" if waited else "no request waited after a step"
    # An engine without a limit, as of forecasts of captures that do not say it, has none of it in use.
    used = f"at most {most:.1%} of the KV cache was in use" if most else "how full the KV cache was is not known"
    return f"{used}, {waiting}, {counted(preemptions, 'preemption')}"
