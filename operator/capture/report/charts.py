"""Draw the charts of captures, and of a capture's arms against the first.

Each chart of captures is a function from the captures that have its figures to a figure and a sentence per capture.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from specdecode_operator.capture.comparison.comparison_file import Arm, Comparison, Load
from specdecode_operator.capture.files.totals import Quantiles
from specdecode_operator.capture.report.capture_reader import Capture
from specdecode_operator.capture.report.capture_sums import (
    LARGEST_BURST,
    ClientSums,
    Floats,
    StepSums,
    context_tokens,
    log_quantile,
)
from specdecode_operator.capture.report.drawing import (
    QUIET,
    STYLES,
    LeftOut,
    Picture,
    Series,
    Style,
    counted,
    legend_above,
    measured,
    new_figure,
    number,
    percent_axis,
    plain_log,
    whole_ticks,
)
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip

_POINTS_OVER_TIME: Final = 80
_FEWEST_DRAFTED: Final = 100
"""Fewest drafted tokens, or steps. With fewer, chance would move a share by more than 10 points."""

_FEW: Final = 2
_HEADROOM: Final = 1.15
_ACCEPTANCE: Final = "accepted drafted tokens"
_NO_STEPS: Final = "no request has more than one chunk, so there is no decode step"
_ONE_REQUEST: Final = "one request has no distribution"

Chart = Callable[[Sequence[Series]], Picture | LeftOut]
_Drawn = tuple[Figure, Callable[[Series], str], *tuple[str, ...]]
"""A figure, the words for a capture, and further sentences."""


def _chart(
    name: str, title: str, usable: Callable[[Series], object], why_not: str | Callable[[Sequence[Series]], str]
) -> Callable[[Callable[[list[Series]], _Drawn | str]], Chart]:
    """Make a chart of a function that draws usable captures, or returns why it cannot."""

    def chart_of(draw: Callable[[list[Series]], _Drawn | str]) -> Chart:
        @wraps(draw)
        def chart(series: Sequence[Series]) -> Picture | LeftOut:
            known = [each for each in series if usable(each)]
            drawn = draw(known) if known else why_not if isinstance(why_not, str) else why_not(series)
            if isinstance(drawn, str):
                return LeftOut(title, drawn)
            figure, words, *more = drawn
            if len(known) > 1 and not figure.legends:
                legend_above(figure, figure.axes[0])
            told = [words(each) for each in known]
            sentences = [f"{each.label}: {text}." for each, text in zip(known, told, strict=True)]
            if len(known) == 1:
                sentences = [f"{told[0][:1].upper()}{told[0][1:]}."]
            return Picture(name, title, (*sentences, *more), figure, tuple(each.capture for each in known))

        return chart

    return chart_of


def _steps(each: Series) -> StepSums:
    steps = each.capture.steps
    assert steps is not None  # noqa: S101  the caller has left the others out
    return steps


def _drafts(each: Series) -> bool:
    return each.capture.steps is not None and each.capture.steps.drafts > 0


def _no_drafts(series: Sequence[Series]) -> str:
    if not any(each.capture.speculates for each in series):
        return "nothing was drafted"
    return "step statistics (step-stats.jsonl), which contain the drafts, are missing"


def _has_bursts(each: Series) -> bool:
    return bool(each.capture.requests.bursts.any())


def _has_several_requests(each: Series) -> bool:
    return len(each.capture.requests) > 1


@_chart("acceptance-by-position", "Acceptance by position", _drafts, _no_drafts)
def by_position(known: list[Series]) -> _Drawn:
    """Draw how often the token at each position of a draft was accepted, by the engine's own counters."""
    figure, axes = new_figure()
    for each in known:
        shares = _steps(each).per_position
        label = f"{each.label} ({each.capture.identity.speculation})"
        axes.plot(range(1, len(shares) + 1), shares, label=label, **each.style.marked_line)
    percent_axis(axes, "drafts accepted up to here")
    axes.set_xlabel("position in the draft")
    whole_ticks(axes)
    legend_above(figure, axes)

    def words(each: Series) -> str:
        steps, shares = _steps(each), _steps(each).per_position
        return (
            f"{shares[0]:.0%} of the drafts were accepted at the first position, {shares[-1]:.0%} to the last of "
            f"{len(shares)}; {1 + steps.accepted / steps.drafts:.2f} tokens per verification"
        )

    return figure, words


@_chart("acceptance-over-time", "Acceptance over time", _drafts, _no_drafts)
def over_time(known: list[Series]) -> _Drawn:
    """Draw the accepted share of the drafted tokens as the run went on."""
    figure, axes = new_figure()
    found: dict[str, Floats] = {}
    for each in known:
        bins = _steps(each).by_time.coarser(_POINTS_OVER_TIME)
        often = bins.sums[:, 1] >= _FEWEST_DRAFTED
        often = often if often.any() else bins.sums[:, 1] > 0
        shares = found[each.label] = bins.sums[often, 2] / bins.sums[often, 1]
        seconds = (bins.times_ms[often] - each.capture.zero_ms) / 1000
        axes.plot(seconds, shares, markersize=3, label=each.label, **each.style.marked_line)
    percent_axis(axes, _ACCEPTANCE, max(shares.max() for shares in found.values()) * _HEADROOM)
    axes.set_xlabel("time since the first arrival (s)")

    def words(each: Series) -> str:
        shares = found[each.label]
        return f"{_steps(each).acceptance or 0:.0%} overall, between {shares.min():.0%} and {shares.max():.0%}"

    return figure, words


@_chart("acceptance-by-concurrency", "Acceptance against concurrency", _drafts, _no_drafts)
def by_concurrency(known: list[Series]) -> _Drawn:
    """Draw the accepted share of the drafted tokens by the requests that the step left running."""

    def points(each: Series) -> tuple[Floats, Floats]:
        """Return means and shares of neighbouring batch sizes, in quarter octaves with enough drafted tokens."""
        drafted, accepted = _steps(each).by_running.sums.T
        running = np.arange(len(drafted))
        keys = np.floor(np.log2(np.maximum(running, 1)) * 4).astype(np.int64)
        weights = np.bincount(keys, drafted)
        if (often := weights >= _FEWEST_DRAFTED).any():
            means = np.bincount(keys, np.maximum(running, 1) * drafted)[often] / weights[often]
            return means, np.bincount(keys, accepted)[often] / weights[often]
        return np.array([running @ drafted / drafted.sum()]), np.array([accepted.sum() / drafted.sum()])

    def words(running: Floats, shares: Floats) -> str:
        more = f", {shares[-1]:.0%} with {number(running[-1])}" if len(running) > 1 else ""
        return f"{shares[0]:.0%} with {number(running[0])} running{more}"

    return _against(known, points, "requests running after the step", words, share=True)


@_chart(
    "acceptance-by-context",
    "Acceptance against context length",
    lambda each: each.capture.speculates and each.capture.requests.bursts.any(),
    "nothing was drafted",
)
def by_context(known: list[Series]) -> _Drawn:
    """Draw the drafted tokens that a step got accepted by the context it came after."""

    def points(each: Series) -> tuple[Floats, Floats]:
        sums = each.capture.requests.by_context.sums
        often = sums[:, 0] >= _FEWEST_DRAFTED
        bins = np.flatnonzero(often if often.any() else sums[:, 0] > 0)
        return context_tokens(bins), sums[bins, 1] / sums[bins, 0] - 1

    def words(x: Floats, y: Floats) -> str:
        return f"{y[0]:.2f} drafted tokens accepted per step after {x[0]:,.0f} tokens, {y[-1]:.2f} after {x[-1]:,.0f}"

    return _against(known, points, "tokens before the step: prompt and output so far", words)


_ONE_TEMPERATURE: Final = "no two requests with drafts have different temperatures"


@_chart(
    "acceptance-by-temperature",
    "Acceptance against temperature",
    lambda each: each.capture.speculates and each.capture.requests.by_temperature,
    _ONE_TEMPERATURE,
)
def by_temperature(known: list[Series]) -> _Drawn | str:
    """Draw the drafted tokens that a step got accepted by the temperature that its request asked for."""
    temperatures = sorted({at for each in known for at in each.capture.requests.by_temperature})
    if len(temperatures) < _FEW:
        return _ONE_TEMPERATURE

    def points(each: Series) -> tuple[Floats, Floats]:
        sums = sorted(each.capture.requests.by_temperature.items())
        return np.array([at for at, _ in sums]), np.array([tokens / bursts - 1 for _, (bursts, tokens) in sums])

    def words(x: Floats, y: Floats) -> str:
        return f"{y[0]:.2f} drafted tokens accepted per step at temperature {x[0]:g}, {y[-1]:.2f} at {x[-1]:g}"

    drawn = _against(known, points, "temperature of the request", words)
    drawn[0].axes[0].set_xticks(temperatures)
    return drawn


def _against(
    known: list[Series],
    points: Callable[[Series], tuple[Floats, Floats]],
    label: str,
    words: Callable[[Floats, Floats], str],
    *,
    share: bool = False,
) -> _Drawn:
    """Draw acceptance against another quantity, as a share or as tokens per step."""
    figure, axes = new_figure()
    found = {each.label: points(each) for each in known}
    for each in known:
        axes.plot(*found[each.label], label=each.label, **each.style.marked_line)
    highest = max(max(y) for _, y in found.values())
    if share:
        percent_axis(axes, _ACCEPTANCE, highest * _HEADROOM)
    else:
        axes.set_ylim(0, highest * 1.1 or 1)
        axes.set_ylabel("drafted tokens accepted\nper decode step")
    axes.set_xlabel(label)
    every = np.concatenate([x for x, _ in found.values()])
    if every.max() > 8 * max(every.min(), 1):
        plain_log(axes, "x")
    else:
        whole_ticks(axes)
    return figure, lambda each: words(*found[each.label])


_FEW_BARS: Final = 40
_FEWEST_SIZES: Final = 4
_ONE_PERCENT: Final = 0.01
_FEWEST_STEPS: Final = 5
"""Steps of a size that its quantiles need."""

_HIGHEST: Final = 3.5
"""Height of the figure in medians: stalled steps' P90 would flatten all else."""


@_chart("tokens-per-step", "Tokens per decode step", _has_bursts, _NO_STEPS)
def tokens_per_step(known: list[Series]) -> _Drawn:
    """Draw the tokens per step and request, captured and replayed."""
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
    axes.set_xlabel(f"tokens per request and step{f' ({LARGEST_BURST}: or more)' if largest == LARGEST_BURST else ''}")
    percent_axis(axes, "decode steps", highest * 1.08)
    _size_axis(axes, largest)

    def words_of(each: Series) -> str:
        counts = each.capture.requests.bursts
        ones = counts[1] / counts.sum()
        mean = each.capture.requests.mean_burst
        return f"{mean:.2f} tokens per step on average; {ones:.0%} of the steps produced one token"

    return figure, words_of


def _size_axis(axes: Axes, largest: int) -> None:
    """Show sizes from 1 to at least 4, so that a single bar is not as wide as the figure."""
    axes.set_xlim(0.4, max(largest, _FEWEST_SIZES) + 0.6)
    whole_ticks(axes)


@_chart("step-time", "Step time against burst size", _has_bursts, _NO_STEPS)
def step_time(known: list[Series]) -> _Drawn:
    """Draw the time of a step by the tokens it gave, and that time per token."""

    def median(each: Series, size: int) -> float:
        return log_quantile(each.capture.requests.gaps[size], 0.5)

    figure, axes = new_figure()
    sizes_of: dict[str, list[int]] = {}
    for each in known:
        counts = each.capture.requests.bursts
        often = np.flatnonzero(counts >= _FEWEST_STEPS)
        sizes_of[each.label] = [int(size) for size in (often if len(often) else np.flatnonzero(counts))]
    slowest_ms = max(median(each, size) for each in known for size in sizes_of[each.label])
    for place, each in enumerate(known):
        offset = (place - (len(known) - 1) / 2) * min(0.18, 0.7 / len(known))
        sizes, gaps, style = np.array(sizes_of[each.label]), each.capture.requests.gaps, each.style
        low, middle, high = (np.array([log_quantile(gaps[size], share) for size in sizes]) for share in (0.1, 0.5, 0.9))
        axes.vlines(sizes + offset, low, high, colors=style.colour, linewidth=5, alpha=0.4)
        axes.plot(sizes + offset, middle, label=each.label, **style.marked_line)
        by_token = style.marked_line | {"linestyle": (0, (4, 2)), "linewidth": 1.0, "markerfacecolor": "white"}
        axes.plot(sizes + offset, middle / sizes, markersize=3, **by_token)
    axes.plot([], [], color=QUIET, linewidth=1.0, linestyle=(0, (4, 2)), label="time per token: step time / N (median)")
    cut = axes.get_ylim()[1] > _HIGHEST * slowest_ms
    legend = f"P10 to P90 of the steps{', cut at the top' if cut else ''}"
    axes.plot([], [], color=QUIET, linewidth=5, alpha=0.4, label=legend)
    axes.set_ylim(0, min(axes.get_ylim()[1], _HIGHEST * slowest_ms))
    axes.set_xlabel("burst size N: tokens per request and step")
    axes.set_ylabel("step time (ms)")
    _size_axis(axes, max(sizes[-1] for sizes in sizes_of.values()))
    legend_above(figure, axes)

    def words(each: Series) -> str:
        first, last = sizes_of[each.label][0], sizes_of[each.label][-1]
        short, long = median(each, first), median(each, last)
        if first == last:
            return f"a step took {measured(short)} ms (median) and produced {first} token{'s' * (first > 1)}"
        return (
            f"steps with {first} token{'s' * (first > 1)} took {measured(short)} ms (median), steps with {last} took "
            f"{measured(long)} ms: {measured(short / first)} and {measured(long / last)} ms per token"
        )

    return figure, words


Mask = NDArray[np.bool_]
"""Selection of requests."""

_CURVE_POINTS: Final = 200
_QUANTILES: Final = (0.5, 0.9, 0.99)
_MOST_LOADS: Final = 12
_LOAD_NAME: Final = 18
_CROWDED: Final = 44
"""Characters that fit under half a figure."""


@_chart("latency", "TTFT and TPOT", _has_several_requests, _ONE_REQUEST)
def distributions(known: list[Series]) -> _Drawn:
    """Draw the shares of requests by the time to their first token, and by the time of a further one."""
    figure, (left, right) = new_figure(1, 2, sharey=True)
    for axes, name in ((left, "TTFT"), (right, "TPOT")):
        for each in known:
            _curve(axes, _times_ms(each)[name], each)
        _finish_curves(axes, f"{name} at the engine (ms)")
    percent_axis(left, "requests that took at most this long")

    def words(each: Series) -> str:
        return ", ".join(
            f"{name} P50 {measured(quantiles[0])}, P99 {measured(quantiles[2])} ms"
            for name, values in _times_ms(each).items()
            if len(values)
            for quantiles in [np.quantile(values, _QUANTILES)]
        )

    return figure, words


@_chart("lengths", "Prompt and output lengths", _has_several_requests, _ONE_REQUEST)
def lengths(known: list[Series]) -> _Drawn:
    """Draw the shares of requests by the tokens of their prompts, and of their outputs."""
    figure, (left, right) = new_figure(1, 2, sharey=True)

    def tokens_of(each: Series, name: str) -> Floats:
        return np.asarray(getattr(each.capture.requests, f"{name}_tokens"))

    for axes, name in ((left, "prompt"), (right, "output")):
        for each in known:
            _curve(axes, tokens_of(each, name), each)
        _finish_curves(axes, f"tokens of the {name}")
        if axes.get_xscale() == "linear":
            whole_ticks(axes)
    percent_axis(left, "requests that had at most this many")

    def words(each: Series) -> str:
        return ", ".join(
            f"{name}s P50 {quantiles[0]:,.0f}, P99 {quantiles[2]:,.0f} tokens"
            for name in ("prompt", "output")
            for quantiles in [np.quantile(tokens_of(each, name), _QUANTILES)]
        )

    return figure, words


def _times_ms(each: Series) -> dict[str, Floats]:
    """Return TTFT of all requests, and TPOT of those with two tokens or more."""
    tpot_ms = np.asarray(each.capture.requests.tpot_ms)
    return {"TTFT": np.asarray(each.capture.requests.ttft_ms), "TPOT": tpot_ms[~np.isnan(tpot_ms)]}


def _curve(axes: Axes, values: Floats, each: Series, label: str | None = None, line: str | None = None) -> None:
    if not len(values):
        return
    shares = np.linspace(0, 1, _CURVE_POINTS)
    style = each.style
    axes.plot(
        np.maximum(np.quantile(values, shares), 1e-3),
        shares,
        color=style.colour,
        linestyle=line or style.line,
        marker=style.marker,
        markevery=_CURVE_POINTS // 8,
        markersize=4,
        markerfacecolor="white" if line else style.colour,
        label=each.label if label is None else label,
    )


def _finish_curves(axes: Axes, label: str) -> None:
    for share in _QUANTILES:
        axes.axhline(share, color=QUIET, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set_xlabel(label)
    if axes.lines and len(axes.lines) > len(_QUANTILES):
        plain_log(axes, "x")


@_chart("latency-by-load", "TTFT and TPOT by load", _has_several_requests, _ONE_REQUEST)
def by_load(known: list[Series]) -> _Drawn:
    """Draw P50, P90 and P99 of each phase, or of each number of requests in flight if there are no phases."""
    by_phase = all(set(each.capture.requests.phases) != {None} for each in known)
    loads = {each.label: (_phases(each) if by_phase else _octaves(each)) for each in known}
    names = list(dict.fromkeys(name for found in loads.values() for name in found))
    if not by_phase:
        names.sort(key=lambda name: int(name.partition(" to ")[0].replace(",", "")))
    left_out = len(names) - _MOST_LOADS
    names = names[:_MOST_LOADS]
    crowded = len(names) * max(map(len, names)) > _CROWDED
    figure, (left, right) = new_figure(1, 2, height_in=3.8 if crowded else 3.4)
    for axes, name in ((left, "TTFT"), (right, "TPOT")):
        for place, each in enumerate(known):
            values = np.asarray(each.capture.requests.ttft_ms if name == "TTFT" else each.capture.requests.tpot_ms)
            offset = (place - (len(known) - 1) / 2) * min(0.2, 0.8 / len(known))
            points = []
            for at, load in enumerate(names):
                those = values[loads[each.label][load]] if load in loads[each.label] else values[:0]
                those = those[~np.isnan(those)]
                if len(those):
                    points.append((at + offset, *np.quantile(those, _QUANTILES)))
            if points:
                x, middle, most, nearly_all = np.array(points).T
                style = each.style
                axes.vlines(x, middle, nearly_all, colors=style.colour, linewidth=1.2)
                axes.plot(x, middle, label=each.label, **style.marked_line)
                axes.plot(x, most, color=style.colour, marker=style.marker, markerfacecolor="white", linestyle="")
                axes.plot(x, nearly_all, color=style.colour, marker="_", markersize=9, linestyle="")
        axes.set_xticks(range(len(names)), names, rotation=35 if crowded else 0, ha="right" if crowded else "center")
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xlabel("phase of the workload" if by_phase else "requests in flight at arrival")
        axes.set_ylabel(f"{name} at the engine (ms)")
        axes.grid(visible=False, axis="x")
        _zero_or_log(axes)
    left.plot([], [], color=QUIET, marker="o", linestyle="", label="P50")
    left.plot([], [], color=QUIET, marker="o", markerfacecolor="white", linestyle="", label="P90")
    left.plot([], [], color=QUIET, marker="_", markersize=9, linestyle="", label="P99")
    legend_above(figure, left, columns=6)

    def words(each: Series) -> str:
        values, own = np.asarray(each.capture.requests.ttft_ms), loads[each.label]
        found = {name: np.quantile(values[own[name]], _QUANTILES) for name in names if name in own}
        worst = max(found, key=lambda name: float(found[name][2]))
        load = f"in phase {worst}" if by_phase else f"with {worst} requests in flight"
        median, _, slowest = map(measured, found[worst])
        return f"by P99, first tokens were slowest {load}: TTFT P50 {median}, P99 {slowest} ms"

    return figure, words, *([f"{left_out} further loads are not drawn."] if left_out > 0 else [])


def _phases(each: Series) -> dict[str, Mask]:
    """Return the requests of each phase, in the order in which phases began."""
    requests = each.capture.requests
    numbers, arrivals = np.asarray(requests.phase), np.nan_to_num(np.asarray(requests.arrival_ms))
    found: dict[str, Mask] = {}
    for name, place in requests.phases.items():
        key = "(none)" if name is None else shown(name, _LOAD_NAME)
        # Names that are equal when shortened are one load.
        found[key] = found.get(key, np.zeros(len(numbers), dtype=bool)) | (numbers == place)
    return dict(sorted(found.items(), key=lambda item: float(arrivals[item[1]].min()) if item[1].any() else 0.0))


def _octaves(each: Series) -> dict[str, Mask]:
    concurrency = np.maximum(np.asarray(each.capture.requests.concurrency), 1)
    octaves = np.floor(np.log2(concurrency)).astype(np.int64)
    return {
        f"{2**octave:,} to {2 ** (octave + 1) - 1:,}" if octave else "1": np.asarray(octaves == octave)
        for octave in (int(each) for each in np.unique(octaves))
    }


def _zero_or_log(axes: Axes) -> None:
    """Start at 0, unless the small loads would become unreadable."""
    values = [float(value) for line in axes.lines for value in np.asarray(line.get_ydata()) if value > 0]
    if values and max(values) > 20 * min(values):
        plain_log(axes, "y")
    else:
        # With room above: the library's margin is a share of the spread, which may be nearly 0.
        axes.set_ylim(0, 1.05 * max(values, default=1))


def _no_client(series: Sequence[Series]) -> str:
    if all(each.capture.identity.live is not None for each in series):
        return "live traffic has no load generator, so the times at clients are not known"
    why = "client.jsonl is missing" if all(each.capture.client is None for each in series) else _ONE_REQUEST
    return f"{why}, so the times at clients are not known"


@_chart(
    "client-ttft",
    "TTFT at the client and at the engine",
    lambda each: each.capture.client is not None and len(each.capture.client.ttft_ms) > 1,
    _no_client,
)
def client_ttft(known: list[Series]) -> _Drawn:
    """Draw TTFT as clients saw it over HTTP, next to TTFT at the engine."""
    figure, axes = new_figure()
    for each in known:
        client = each.capture.client
        _curve(axes, np.asarray(client.ttft_ms if client else ()), each, "", ":")
        _curve(axes, _times_ms(each)["TTFT"], each)
    axes.plot([], [], color=QUIET, marker="o", markersize=4, label="at the engine")
    axes.plot([], [], color=QUIET, marker="o", markersize=4, markerfacecolor="white", linestyle=":", label="over HTTP")
    _finish_curves(axes, "TTFT (ms)")
    percent_axis(axes, "requests, cumulative")
    legend_above(figure, axes)

    def words(each: Series) -> str:
        client = each.capture.client or ClientSums()
        outcomes = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in client.outcomes.items())
        seen, given = float(np.median(client.ttft_ms)), float(np.median(_times_ms(each)["TTFT"]))
        return f"the client's median is {measured(seen)} ms, the engine's {measured(given)} ms; {outcomes}"

    return figure, words


_GIB: Final = 2**30
_MOST_BYTES: Final = 2**50
_BAR: Final = 0.6
_LABEL_SHARE: Final = 0.045
_KV: Final = ("KV cache", "#009E73", "")
_REST: Final = ("without the KV cache", "#BBBBBB", "\\\\\\\\")
_PARTS: Final = (
    (("target weights", "#0072B2", ""), ("targetWeightsBytes",)),
    (("draft weights", "#56B4E9", "xxxx"), ("draftWeightsBytes",)),
    (
        ("state, activation, graphs, NCCL", "#E69F00", "////"),
        ("stateBytes", "activationBytes", "cudaGraphsBytes", "nonTorchBytes"),
    ),
    (_KV, ("availableKvBytes",)),
)


def _memory(each: Series) -> Mapping[str, float]:
    """Return the terms of a plan in bytes; empty if they are missing or implausible."""
    per_gpu = each.capture.identity.plan.get("perGpu")
    if not isinstance(per_gpu, dict):
        return {}
    values = [per_gpu.get(term) for term in ("requestedBytes", *(term for _, terms in _PARTS for term in terms))]
    return per_gpu if all(isinstance(each, int) and abs(each) < _MOST_BYTES for each in values) else {}


@_chart(
    "budget",
    "Memory: the plan against the engine",
    _memory,
    "no manifest holds the plan of the deployment that was captured",
)
def budgets(known: list[Series]) -> _Drawn:
    """Draw the plan's budget by term, next to the engine's report."""
    figure, axes = new_figure(height_in=1.7 + 0.75 * len(known))
    names: list[str] = []

    def bar(parts: Sequence[tuple[tuple[str, str, str], float]], whole: float) -> None:
        left = 0.0
        for (name, colour, hatch), size in parts:
            if size <= 0:
                continue
            label = name if name not in axes.get_legend_handles_labels()[1] else None
            looks = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.barh(len(names), size, _BAR, left, label=label, **looks)
            if size > _LABEL_SHARE * whole:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
                text = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box}
                axes.text(left + size / 2, len(names), measured(size), **text)
            left += size

    for each in known:
        memory, identity = _memory(each), each.capture.identity
        requested = memory["requestedBytes"] / _GIB
        bar([(looks, sum(memory[term] for term in terms) / _GIB) for looks, terms in _PARTS], requested)
        names.append(f"{each.label}\nplan" if len(known) > 1 else "plan")
        if identity.kv_cache_tokens is not None:
            # The tokens of the engine's KV cache times the plan's bytes per token.
            planned = identity.plan.get("kvCacheTokens")
            reported = 0.0
            if isinstance(planned, int) and planned > 0:
                reported = identity.kv_cache_tokens / planned * memory["availableKvBytes"] / _GIB
            bar([(_REST, max(0.0, requested - reported)), (_KV, reported)], requested)
            names.append("engine")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    on_gpu = all(each.capture.identity.plan.get("product") != "CPU" for each in known)
    axes.set_xlabel("memory of one GPU (GiB)" if on_gpu else "memory (GiB)")
    legend_above(figure, axes)

    def words(each: Series) -> str:
        planned, reported = each.capture.identity.plan.get("kvCacheTokens"), each.capture.identity.kv_cache_tokens
        if not isinstance(planned, int) or planned <= 0 or reported is None:
            return "the capture does not contain the engine's own figure, so only the plan is shown"
        change = f"{reported / planned - 1:+.1%}"
        return f"the plan has {planned:,} tokens of KV cache, the engine reported {reported:,} ({change})"

    return figure, words


_POINTS: Final = 240
_HALF: Final = 0.5
_WAITING: Final = "#D55E00"
_PREEMPTED: Final = "#B00020"


@_chart(
    "kv-cache",
    "KV cache and preemptions",
    lambda each: each.capture.steps is not None,
    "there are no step statistics (step-stats.jsonl)",
)
def cache_use(known: list[Series]) -> _Drawn:
    """Draw the use of the KV cache, running and waiting requests, and preemptions."""
    figure, rows = new_figure(len(known), 1, height_in=1.3 + 2.1 * len(known), squeeze=False)
    for each, (axes,) in zip(known, rows, strict=True):
        bins = _steps(each).by_time.coarser(_POINTS)
        seconds = (bins.times_ms - each.capture.zero_ms) / 1000
        count, colour = bins.sums[:, 0], each.style.colour
        mean, most = bins.sums[:, 3] / count, bins.largest[:, 3]
        axes.plot(seconds, 100 * most, color=colour, linewidth=0.8, label="KV cache in use, most")
        axes.fill_between(seconds, 100 * mean, color=colour, alpha=0.25, label="KV cache in use, mean")
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
        for column, name, of_line, line in ((4, "running", "#000000", "--"), (5, "waiting", _WAITING, ":")):
            values = bins.sums[:, column] / count
            if values.any():
                other.plot(seconds, values, color=of_line, linewidth=1.2, linestyle=line)
                axes.plot([], [], color=of_line, linewidth=1.2, linestyle=line, label=f"requests {name} (right)")
        other.set_ylim(bottom=0)
        if len(known) > 1:
            axes.set_title(each.label)
    rows[-1][0].set_xlabel("time since the first arrival (s)")
    legend_above(figure, *rows[:, 0], columns=5)

    def words(each: Series) -> str:
        bins = _steps(each).by_time
        most, waited = float(bins.largest[:, 3].max()), float(bins.largest[:, 5].max())
        waiting = f"up to {counted(waited, 'request')} waited" if waited else "no request waited after a step"
        # A forecast of a capture without the size of the KV cache reports no use of it.
        used = f"at most {most:.1%} of the KV cache was in use" if most else "how full the KV cache was is not known"
        return f"{used}, {waiting}, {counted(sum(each.capture.requests.preemptions), 'preemption')}"

    return figure, words


Drawn = Sequence[tuple[Arm, Style]]


class _Places:
    """Positions of loads: by the baseline's running requests, or side by side if their requests differ."""

    def __init__(self, baseline: Sequence[Load]) -> None:
        self.apart = any(each.asks for each in baseline)
        self._phases = [each.phase for each in baseline]
        self._running = {each.phase: each.running for each in baseline}

    def of(self, load: Load, beside: float = 0.0) -> float | None:
        """Return the position of a load, with an offset."""
        if self.apart:
            return self._phases.index(load.phase) + 0.08 * beside
        running = self._running[load.phase]
        return running * (1 + 0.04 * beside) if running else None

    def finish(self, figure: Figure, axes: Axes, arms: Drawn) -> None:
        """Label the axis, and mark crossovers."""
        for arm, style in arms:
            if arm.crossover_running is not None:
                axes.axvline(arm.crossover_running, color=style.colour, linewidth=1, linestyle=":")
        if self.apart:
            _name_phases(axes, self._phases)
        else:
            axes.set_xlabel("concurrent requests in the baseline")
            plain_log(axes, "x")
        legend_above(figure, axes)


def _name_phases(axes: Axes, phases: Sequence[str]) -> None:
    axes.set_xticks(range(len(phases)), [clip(printable(each), 18) for each in phases], rotation=35, ha="right")
    axes.set_xlim(-0.6, len(phases) - 0.4)


def pictures_of(comparison: Comparison, captures: Sequence[Capture]) -> Iterator[Picture | LeftOut]:
    """Return the pictures of a comparison, in the order in which they are read."""
    arms = list(zip(comparison.arms, STYLES, strict=False))
    for name, title, draw in (
        ("arms-verdict", "Verdict by load", partial(_verdicts, comparison.level)),
        ("arms-goodput", "Goodput by load", _goodput),
        ("arms-latency", "Latency of the arms by load", _latency),
        ("arms-acceptance", "Acceptance of the arms", _acceptance),
    ):
        drawn = draw(arms)
        if isinstance(drawn, str):
            yield LeftOut(title, drawn)
        else:
            yield Picture(name, title, tuple(drawn[1]), drawn[0], tuple(captures))


_ArmsDrawn = tuple[Figure, Sequence[str]] | str
"""A figure with its sentences, or the reason why it is missing."""


def _verdicts(level: float, arms: Drawn) -> _ArmsDrawn:
    baseline, *others = arms
    places = _Places(baseline[0].loads)
    figure, axes = new_figure()
    drawn = 0
    for place, (arm, style) in enumerate(others):
        for index, load in enumerate(arm.loads):
            compared, at = load.compared, places.of(load, place - (len(others) - 1) / 2)
            if compared is None or compared.ratio is None or at is None:
                continue
            drawn += 1
            middle = 100 * (compared.ratio - 1)
            ends = [[0.0], [0.0]]
            if compared.low is not None and compared.high is not None:
                ends = [[middle - 100 * (compared.low - 1)], [100 * (compared.high - 1) - middle]]
            axes.errorbar(
                [at],
                [middle],
                yerr=np.maximum(ends, 0),
                color=style.colour,
                marker=style.marker,
                markerfacecolor="white" if compared.verdict == "Inconclusive" else style.colour,
                capsize=4,
                label=printable(arm.name) if index == 0 or drawn == 1 else None,
            )
    if not drawn:
        return "no load could be compared"
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.set_ylabel(f"goodput against {printable(baseline[0].name)} (%)")
    places.finish(figure, axes, others)
    return figure, [
        *(f"{printable(arm.name)}: {arm.verdict}: {printable(arm.message)}." for arm, _ in others),
        f"Bars are intervals of {level:.0%} over all loads of an arm; hollow marks are Inconclusive.",
    ]


def _goodput(arms: Drawn) -> _ArmsDrawn:
    places = _Places(arms[0][0].loads)
    figure, axes = new_figure()
    for arm, style in arms:
        points = sorted(
            (at, each.goodput) for each in arm.loads if (at := places.of(each)) is not None and each.goodput is not None
        )
        if points:
            looks = style.marked_line | ({"linestyle": ""} if places.apart else {})
            axes.plot(*zip(*points, strict=True), label=printable(arm.name), **looks)
    if not axes.lines:
        return "no request was answered"
    axes.set_ylim(bottom=0)
    axes.set_ylabel("goodput (tokens/s)")
    places.finish(figure, axes, arms)
    words = []
    for arm, _ in arms:
        loads = [f"{measured(each.goodput)} tokens/s in {printable(each.phase)}" for each in arm.loads if each.goodput]
        turns = arm.crossover_running
        stops = "" if turns is None else f"; it pays off up to about {turns:g} running requests"
        words.append(f"{printable(arm.name)}: {', '.join(loads[:_MOST_LOADS]) or 'nothing'}{stops}.")
    return figure, words


def _latency(arms: Drawn) -> _ArmsDrawn:
    phases = [each.phase for each in arms[0][0].loads][:_MOST_LOADS]
    figure, panels = new_figure(1, 3, height_in=3.4)
    drawn = False
    for axes, name in zip(panels, ("ttft_ms", "tpot_ms", "latency_ms"), strict=True):
        for place, (arm, style) in enumerate(arms):
            loads = {each.phase: each for each in arm.loads}
            offset = (place - (len(arms) - 1) / 2) * min(0.2, 0.8 / len(arms))
            for index, phase in enumerate(phases):
                found: Quantiles | None = getattr(loads.get(phase), name, None)
                if found is None:
                    continue
                drawn, at, colour = True, index + offset, style.colour
                p50, p90, p95, p99 = (max(each, 1e-3) for each in (found.p50, found.p90, found.p95, found.p99))
                label = printable(arm.name) if index == 0 else None
                axes.plot([at, at], [p50, p99], color=colour, linewidth=1)
                axes.plot([at, at], [p90, p95], color=colour, marker="_", linewidth=0)
                axes.plot([at], [p50], color=colour, marker=style.marker, linewidth=0, label=label)
                axes.plot([at], [p99], color=colour, marker=style.marker, linewidth=0, markerfacecolor="white")
        _name_phases(axes, phases)
        axes.set_ylabel(f"{name.removesuffix('_ms').replace('ttft', 'TTFT').replace('tpot', 'TPOT')} (ms)")
        plain_log(axes, "y")
    if not drawn:
        return "no request was answered"
    legend_above(figure, panels[0])
    words = []
    for arm, _ in arms:
        told = [
            f"TPOT P50 {measured(each.tpot_ms.p50)}, P99 {measured(each.tpot_ms.p99)} ms in {printable(each.phase)}"
            for each in arm.loads
            if each.tpot_ms is not None
        ]
        words.append(f"{printable(arm.name)}: {', '.join(told[:_MOST_LOADS]) or 'nothing'}.")
    return figure, [*words, "Marks are P50, ticks P90 and P95, hollow marks P99, as the client saw them."]


def _acceptance(arms: Drawn) -> _ArmsDrawn:
    drafting = [(printable(arm.name), style, arm.drafting) for arm, style in arms if arm.drafting is not None]
    if not drafting:
        return "nothing was drafted"
    figure, (left, right) = new_figure(1, 2)
    words = []
    for name, style, found in drafting:
        left.plot(range(1, len(found.per_position) + 1), found.per_position, label=name, **style.marked_line)
        each = found.per_request
        if each is not None and each.requests:
            shares = [count / each.requests for count in (*each.histogram, each.histogram[-1])]
            right.step(np.linspace(0, 1, 11), shares, where="post", color=style.colour, linestyle=style.line)
        most = "" if found.largest_block_efficiency is None else f" of {found.largest_block_efficiency}"
        spread = "" if each is None else f"; by request P10 {each.p10:.0%}, P50 {each.p50:.0%}, P90 {each.p90:.0%}"
        words.append(
            f"{name}: {found.acceptance:.0%} of the drafted tokens, {found.block_efficiency:.2f}{most} tokens per "
            f"verification{spread}."
        )
    percent_axis(left, "drafts accepted up to here")
    left.set_xlabel("position in the draft")
    whole_ticks(left)
    percent_axis(right, "requests", max((float(np.max(line.get_ydata())) for line in right.lines), default=1.0))
    right.set_xlabel("acceptance of a request, as if each step drafted K")
    legend_above(figure, left)
    return figure, words


CHARTS: Final = (
    tokens_per_step,
    step_time,
    by_position,
    over_time,
    by_concurrency,
    by_context,
    by_temperature,
    distributions,
    by_load,
    lengths,
    client_ttft,
    cache_use,
)
"""Charts of one or several captures, in the order in which they are read."""
