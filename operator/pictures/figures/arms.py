"""The arms of a capture against the first: verdict and goodput by load, latency, acceptance."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from specdecode_operator.capture.comparison.result import Arm, Comparison, Load
from specdecode_operator.capture.validation.quantiles import Quantiles
from specdecode_operator.pictures.figures.drawing import (
    QUIET,
    STYLES,
    LeftOut,
    Picture,
    Style,
    legend_above,
    measured,
    new_figure,
    percent_axis,
    plain_log,
    whole_ticks,
)
from specdecode_operator.pictures.seen.capture import Capture
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_MOST_LOADS: Final = 12
_TENTHS: Final = 10
_VERDICT: Final = "Verdict by load"
_GOODPUT: Final = "Goodput by load"
_LATENCY: Final = "Latency of the arms by load"
_ACCEPTANCE: Final = "Acceptance of the arms"

Drawn = Sequence[tuple[Arm, Style]]


class _Places:
    """Where loads stand: by the requests running in the baseline, or one beside the other where each asks its own."""

    def __init__(self, baseline: Sequence[Load]) -> None:
        self.apart = any(each.asks for each in baseline)
        self._phases = [each.phase for each in baseline]
        self._running = {each.phase: each.running for each in baseline}

    def of(self, load: Load, beside: float = 0.0) -> float | None:
        """Return the place of a load, a little to a side."""
        if self.apart:
            return self._phases.index(load.phase) + 0.08 * beside
        running = self._running[load.phase]
        return running * (1 + 0.04 * beside) if running else None

    def finish(self, axes: Axes) -> None:
        """Name the places."""
        if self.apart:
            _name_phases(axes, self._phases)
            return
        axes.set_xlabel("requests running at once in the baseline")
        plain_log(axes, "x")


def _name_phases(axes: Axes, phases: Sequence[str]) -> None:
    axes.set_xticks(range(len(phases)), [clip(printable(each), 18) for each in phases], rotation=35, ha="right")
    axes.set_xlim(-0.6, len(phases) - 0.4)


def pictures_of(comparison: Comparison, captures: Sequence[Capture]) -> Iterator[Picture | LeftOut]:
    """Return the pictures of a comparison, in the order in which they are read."""
    arms = list(zip(comparison.arms, STYLES, strict=False))
    for draw in (_verdicts, _goodput, _latency, _acceptance):
        yield draw(arms, comparison, tuple(captures))


def _verdicts(arms: Drawn, comparison: Comparison, captures: tuple[Capture, ...]) -> Picture | LeftOut:
    baseline, *others = arms
    places = _Places(baseline[0].loads)
    figure, axes = new_figure()
    drawn = 0
    for place, (arm, style) in enumerate(others):
        for number, load in enumerate(arm.loads):
            compared, at = load.compared, places.of(load, place - (len(others) - 1) / 2)
            if compared is None or compared.ratio is None or at is None:
                continue
            drawn += 1
            middle = 100 * (compared.ratio - 1)
            if compared.low is not None and compared.high is not None:
                ends = [[middle - 100 * (compared.low - 1)], [100 * (compared.high - 1) - middle]]
            else:
                ends = [[0.0], [0.0]]
            axes.errorbar(
                [at],
                [middle],
                yerr=np.maximum(ends, 0),
                color=style.colour,
                marker=style.marker,
                markerfacecolor="white" if compared.verdict == "Inconclusive" else style.colour,
                capsize=4,
                label=_name(arm) if number == 0 or drawn == 1 else None,
            )
    if not drawn:
        return LeftOut(_VERDICT, "no load could be compared")
    axes.axhline(0, color=QUIET, linewidth=1)
    _crossings(axes, others)
    places.finish(axes)
    axes.set_ylabel(f"goodput against {_name(baseline[0])} (%)")
    legend_above(figure, axes)
    words = (
        *(f"{_name(arm)}: {arm.verdict}: {printable(arm.message)}." for arm, _ in others),
        f"Bars are intervals of {comparison.level:.0%} over all loads of an arm; hollow marks are Inconclusive.",
    )
    return Picture("arms-verdict", _VERDICT, words, figure, captures)


def _goodput(arms: Drawn, comparison: Comparison, captures: tuple[Capture, ...]) -> Picture | LeftOut:
    places = _Places(comparison.arms[0].loads)
    figure, axes = new_figure()
    for arm, style in arms:
        points = sorted(
            (at, each.goodput) for each in arm.loads if (at := places.of(each)) is not None and each.goodput is not None
        )
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=style.colour,
                marker=style.marker,
                linestyle="" if places.apart else style.line,
                label=_name(arm),
            )
    if not axes.lines:
        return LeftOut(_GOODPUT, "no request was answered")
    _crossings(axes, arms)
    axes.set_ylim(bottom=0)
    places.finish(axes)
    axes.set_ylabel("goodput (tokens/s)")
    legend_above(figure, axes)
    return Picture("arms-goodput", _GOODPUT, tuple(map(_goodput_words, comparison.arms)), figure, captures)


def _goodput_words(arm: Arm) -> str:
    loads = [f"{measured(each.goodput)} tokens/s in {printable(each.phase)}" for each in arm.loads if each.goodput]
    turns = "" if arm.crossover_running is None else f"; it stops paying above about {arm.crossover_running:g} running"
    return f"{_name(arm)}: {', '.join(loads[:_MOST_LOADS]) or 'nothing'}{turns}."


def _crossings(axes: Axes, arms: Drawn) -> None:
    for arm, style in arms:
        if arm.crossover_running is not None:
            axes.axvline(arm.crossover_running, color=style.colour, linewidth=1, linestyle=":")


def _latency(arms: Drawn, comparison: Comparison, captures: tuple[Capture, ...]) -> Picture | LeftOut:
    phases = [each.phase for each in comparison.arms[0].loads][:_MOST_LOADS]
    figure, panels = new_figure(1, 3, height_in=3.4)
    drawn = False
    for axes, name in zip(panels, ("ttft_ms", "tpot_ms", "latency_ms"), strict=True):
        for place, (arm, style) in enumerate(arms):
            loads = {each.phase: each for each in arm.loads}
            offset = (place - (len(arms) - 1) / 2) * min(0.2, 0.8 / len(arms))
            for number, phase in enumerate(phases):
                found = _quantiles(loads.get(phase), name)
                if found is not None:
                    drawn = True
                    _bar(axes, number + offset, found, style, _name(arm) if number == 0 else None)
        _name_phases(axes, phases)
        axes.set_ylabel(f"{name.removesuffix('_ms').replace('ttft', 'TTFT').replace('tpot', 'TPOT')} (ms)")
        plain_log(axes, "y")
    if not drawn:
        return LeftOut(_LATENCY, "no request was answered")
    legend_above(figure, panels[0])
    words = (
        *(_latency_words(arm) for arm in comparison.arms),
        "Marks are P50, ticks P90 and P95, hollow marks P99, as the client saw them.",
    )
    return Picture("arms-latency", _LATENCY, words, figure, captures)


def _quantiles(load: Load | None, name: str) -> Quantiles | None:
    found: Quantiles | None = getattr(load, name, None)
    return found


def _bar(axes: Axes, at: float, found: Quantiles, style: Style, label: str | None) -> None:
    low, high = (max(each, 1e-3) for each in (found.p50, found.p99))
    axes.plot([at, at], [low, high], color=style.colour, linewidth=1)
    axes.plot([at, at], [max(found.p90, 1e-3), max(found.p95, 1e-3)], color=style.colour, marker="_", linewidth=0)
    axes.plot([at], [low], color=style.colour, marker=style.marker, linewidth=0, label=label)
    axes.plot([at], [high], color=style.colour, marker=style.marker, linewidth=0, markerfacecolor="white")


def _latency_words(arm: Arm) -> str:
    found = [
        f"TPOT P50 {measured(each.tpot_ms.p50)}, P99 {measured(each.tpot_ms.p99)} ms in {printable(each.phase)}"
        for each in arm.loads
        if each.tpot_ms is not None
    ]
    return f"{_name(arm)}: {', '.join(found[:_MOST_LOADS]) or 'nothing'}."


def _acceptance(arms: Drawn, _: Comparison, captures: tuple[Capture, ...]) -> Picture | LeftOut:
    drafting = [(arm, style, arm.drafting) for arm, style in arms if arm.drafting is not None]
    if not drafting:
        return LeftOut(_ACCEPTANCE, "nothing was drafted")
    figure, (left, right) = new_figure(1, 2)
    words = []
    for arm, style, found in drafting:
        left.plot(
            range(1, len(found.per_position) + 1),
            found.per_position,
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            label=_name(arm),
        )
        each = found.per_request
        if each is not None and each.requests:
            right.step(
                [place / _TENTHS for place in range(_TENTHS + 1)],
                [count / each.requests for count in (*each.histogram, each.histogram[-1])],
                where="post",
                color=style.colour,
                linestyle=style.line,
            )
        most = "" if found.largest_block_efficiency is None else f" of {found.largest_block_efficiency}"
        spread = "" if each is None else f"; by request P10 {each.p10:.0%}, P50 {each.p50:.0%}, P90 {each.p90:.0%}"
        words.append(
            f"{_name(arm)}: {found.acceptance:.0%} of the drafted tokens, {found.block_efficiency:.2f}{most} tokens a "
            f"verification{spread}."
        )
    percent_axis(left, "drafts accepted up to here")
    left.set_xlabel("position in the draft")
    whole_ticks(left)
    highest = max(
        (line.get_ydata()[place] for line in right.lines for place in range(len(line.get_ydata()))), default=1.0
    )
    percent_axis(right, "requests", float(highest))
    right.set_xlabel("acceptance of a request, as if each step drafted K")
    legend_above(figure, left)
    return Picture("arms-acceptance", _ACCEPTANCE, tuple(words), figure, captures)


def _name(arm: Arm) -> str:
    return printable(arm.name)
