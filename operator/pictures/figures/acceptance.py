"""Acceptance: by position, over time, by the requests in a batch, the length of the context and the temperature."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from specdecode_operator.pictures.figures.drawing import (
    LeftOut,
    Picture,
    Series,
    legend_above,
    new_figure,
    number,
    per_series,
    percent_axis,
    plain_log,
    whole_ticks,
)
from specdecode_operator.pictures.seen.requests import context_tokens
from specdecode_operator.pictures.seen.steps import StepSums
from specdecode_operator.pictures.seen.sums import Floats

_POINTS_OVER_TIME: Final = 80
_FEWEST_DRAFTED: Final = 100
"""Drafted tokens, or steps: a share of fewer is left out, as chance alone would move it by more than 10 points."""

_FEW: Final = 2
_HEADROOM: Final = 1.15
_ACCEPTANCE: Final = "accepted drafted tokens"


def by_position(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw how often the token at each position of a draft was accepted, by the engine's own counters."""
    title = "Acceptance by position"
    known = _drafting(series)
    if isinstance(known, str):
        return LeftOut(title, known)
    figure, axes = new_figure()
    for each in known:
        shares = _steps(each).per_position
        style = each.style
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            label=f"{each.label} ({each.capture.identity.speculation})",
        )
    percent_axis(axes, "drafts accepted up to here")
    axes.set_xlabel("position in the draft")
    whole_ticks(axes)
    legend_above(figure, axes)
    words = per_series(known, _position_words)
    return Picture("acceptance-by-position", title, words, figure, tuple(each.capture for each in known))


def _position_words(each: Series) -> str:
    steps = _steps(each)
    shares = steps.per_position
    return (
        f"{shares[0]:.0%} of the drafts were accepted at the first position, {shares[-1]:.0%} to the last of "
        f"{len(shares)}; {1 + steps.accepted_tokens / steps.drafts:.2f} tokens a verification"
    )


def over_time(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the accepted share of the drafted tokens as the run went on."""
    title = "Acceptance over time"
    known = _drafting(series)
    if isinstance(known, str):
        return LeftOut(title, known)
    figure, axes = new_figure()
    found: dict[str, Floats] = {}
    for each in known:
        bins = _steps(each).by_time.coarser(_POINTS_OVER_TIME)
        often = bins.sums[:, 1] >= _FEWEST_DRAFTED
        often = often if often.any() else bins.sums[:, 1] > 0
        shares = bins.sums[often, 2] / bins.sums[often, 1]
        found[each.label] = shares
        seconds = (bins.moments_ms[often] - each.capture.zero_ms) / 1000
        style = each.style
        axes.plot(
            seconds, shares, color=style.colour, marker=style.marker, markersize=3, linestyle=style.line,
            label=each.label,
        )  # fmt: skip
    percent_axis(axes, _ACCEPTANCE, max(shares.max() for shares in found.values()) * _HEADROOM)
    axes.set_xlabel("time since the first arrival (s)")
    if len(known) > 1:
        legend_above(figure, axes)

    def words(each: Series) -> str:
        shares = found[each.label]
        return f"{_steps(each).acceptance or 0:.0%} overall, between {shares.min():.0%} and {shares.max():.0%}"

    return Picture(
        "acceptance-over-time", title, per_series(known, words), figure, tuple(each.capture for each in known)
    )


def by_concurrency(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the accepted share of the drafted tokens by the requests that the step left running."""
    title = "Acceptance against concurrency"
    known = _drafting(series)
    if isinstance(known, str):
        return LeftOut(title, known)

    def points(each: Series) -> tuple[Floats, Floats]:
        sums = _steps(each).by_running.sums
        return _grouped(np.arange(len(sums), dtype=np.float64), sums[:, 0], sums[:, 1])

    return _against(
        "acceptance-by-concurrency",
        title,
        known,
        points,
        "requests running after the step",
        _concurrency_words,
    )


def _concurrency_words(running: Floats, shares: Floats) -> str:
    more = f", {shares[-1]:.0%} with {number(running[-1])}" if len(running) > 1 else ""
    return f"{shares[0]:.0%} with {number(running[0])} running{more}"


def by_context(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the drafted tokens that a step got accepted by the context it came after."""
    title = "Acceptance against context length"
    known = [each for each in series if each.capture.speculates and each.capture.requests.bursts.any()]
    if not known:
        return LeftOut(title, "nothing was drafted")

    def points(each: Series) -> tuple[Floats, Floats]:
        sums = each.capture.requests.by_context.sums
        often = sums[:, 0] >= _FEWEST_DRAFTED
        bins = np.flatnonzero(often if often.any() else sums[:, 0] > 0)
        return context_tokens(bins), sums[bins, 1] / sums[bins, 0] - 1

    return _against(
        "acceptance-by-context",
        title,
        known,
        points,
        "tokens before the step: prompt and output so far",
        lambda x, y: (
            f"{y[0]:.2f} drafted tokens accepted a step after {x[0]:,.0f} tokens, {y[-1]:.2f} after {x[-1]:,.0f}"
        ),
        share=False,
    )


def by_temperature(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the drafted tokens that a step got accepted by the temperature that its request asked for."""
    title = "Acceptance against temperature"
    known = [each for each in series if each.capture.speculates and each.capture.requests.by_temperature]
    temperatures = sorted({at for each in known for at in each.capture.requests.by_temperature})
    if len(temperatures) < _FEW:
        return LeftOut(title, "no two requests with drafts have different temperatures")

    def points(each: Series) -> tuple[Floats, Floats]:
        sums = sorted(each.capture.requests.by_temperature.items())
        return np.array([at for at, _ in sums]), np.array([tokens / bursts - 1 for _, (bursts, tokens) in sums])

    picture = _against(
        "acceptance-by-temperature",
        title,
        known,
        points,
        "temperature of the request",
        lambda x, y: f"{y[0]:.2f} drafted tokens accepted a step at temperature {x[0]:g}, {y[-1]:.2f} at {x[-1]:g}",
        share=False,
    )
    picture.figure.axes[0].set_xticks(temperatures)
    return picture


def _against(  # noqa: PLR0913, PLR0917  what such a picture is made of
    name: str,
    title: str,
    known: Sequence[Series],
    points: Callable[[Series], tuple[Floats, Floats]],
    label: str,
    words: Callable[[Floats, Floats], str],
    *,
    share: bool = True,
) -> Picture:
    figure, axes = new_figure()
    found = {each.label: points(each) for each in known}
    for each in known:
        style = each.style
        axes.plot(*found[each.label], color=style.colour, marker=style.marker, linestyle=style.line, label=each.label)
    if share:
        percent_axis(axes, _ACCEPTANCE, max(max(y) for _, y in found.values()) * _HEADROOM)
    else:
        axes.set_ylim(0, max(max(y) for _, y in found.values()) * 1.1 or 1)
        axes.set_ylabel("drafted tokens accepted\nper decode step")
    axes.set_xlabel(label)
    every = np.concatenate([x for x, _ in found.values()])
    if every.max() > 8 * max(every.min(), 1):
        plain_log(axes, "x")
    else:
        whole_ticks(axes)
    if len(known) > 1:
        legend_above(figure, axes)
    sentence = per_series(known, lambda each: words(*found[each.label]))
    return Picture(name, title, sentence, figure, tuple(each.capture for each in known))


def _grouped(values: Floats, drafted: Floats, accepted: Floats) -> tuple[Floats, Floats]:
    """Return means and shares of neighbouring values, as many together as chance asks for, in octaves of four."""
    used = np.flatnonzero(drafted > 0)
    keys = np.floor(np.log2(np.maximum(values[used], 1)) * 4).astype(np.int64)
    x, y = [], []
    for key in np.unique(keys):
        those = used[keys == key]
        weight = drafted[those].sum()
        if weight >= _FEWEST_DRAFTED:
            x.append(float(np.maximum(values[those], 1) @ drafted[those] / weight))
            y.append(float(accepted[those].sum() / weight))
    if not x:
        return np.array([float(values[used] @ drafted[used] / drafted.sum())]), np.array(
            [accepted.sum() / drafted.sum()]
        )
    return np.array(x), np.array(y)


def _steps(each: Series) -> StepSums:
    steps = each.capture.steps
    assert steps is not None  # noqa: S101  _drafting has left the others out
    return steps


def _drafting(series: Sequence[Series]) -> list[Series] | str:
    """Return the captures whose step statistics tell of drafts; else why there are none."""
    known = [each for each in series if each.capture.steps is not None and each.capture.steps.drafts]
    if known:
        return known
    if not any(each.capture.speculates for each in series):
        return "nothing was drafted"
    return "there are no step statistics (step-stats.jsonl), and only they tell what was drafted"
