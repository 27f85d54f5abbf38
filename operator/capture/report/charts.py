"""Draw the charts of one capture: acceptance, tokens per step, step time, latency, GPU memory and KV cache.

Acceptance is drawn by position, time, batch size, context and temperature. TTFT and TPOT are drawn as distributions
and as quantiles by load, with the client's view of TTFT beside them. The planned GPU memory is drawn against what the
engine reported, and preemptions with the use of the KV cache over time.

Arms of a capture are drawn against the first: verdict and goodput by load, latency, acceptance.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
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
    picture_of,
    plain_log,
    whole_ticks,
)
from specdecode_operator.problems import printable, shown
from specdecode_operator.redaction import clip

_POINTS_OVER_TIME: Final = 80
_FEWEST_DRAFTED: Final = 100
"""Drafted tokens, or steps: with fewer, chance alone would move a share by more than 10 points."""

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
        label = f"{each.label} ({each.capture.identity.speculation})"
        axes.plot(range(1, len(shares) + 1), shares, label=label, **each.style.marked_line)
    percent_axis(axes, "drafts accepted up to here")
    axes.set_xlabel("position in the draft")
    whole_ticks(axes)
    legend_above(figure, axes)

    def words(each: Series) -> str:
        steps = _steps(each)
        shares = steps.per_position
        return (
            f"{shares[0]:.0%} of the drafts were accepted at the first position, {shares[-1]:.0%} to the last of "
            f"{len(shares)}; {1 + steps.accepted_tokens / steps.drafts:.2f} tokens a verification"
        )

    return picture_of("acceptance-by-position", title, known, words, figure)


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
        axes.plot(seconds, shares, markersize=3, label=each.label, **each.style.marked_line)
    percent_axis(axes, _ACCEPTANCE, max(shares.max() for shares in found.values()) * _HEADROOM)
    axes.set_xlabel("time since the first arrival (s)")
    if len(known) > 1:
        legend_above(figure, axes)

    def words(each: Series) -> str:
        shares = found[each.label]
        return f"{_steps(each).acceptance or 0:.0%} overall, between {shares.min():.0%} and {shares.max():.0%}"

    return picture_of("acceptance-over-time", title, known, words, figure)


def by_concurrency(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the accepted share of the drafted tokens by the requests that the step left running."""
    title = "Acceptance against concurrency"
    known = _drafting(series)
    if isinstance(known, str):
        return LeftOut(title, known)

    def points(each: Series) -> tuple[Floats, Floats]:
        sums = _steps(each).by_running.sums
        return _grouped(np.arange(len(sums), dtype=np.float64), sums[:, 0], sums[:, 1])

    def words(running: Floats, shares: Floats) -> str:
        more = f", {shares[-1]:.0%} with {number(running[-1])}" if len(running) > 1 else ""
        return f"{shares[0]:.0%} with {number(running[0])} running{more}"

    label = "requests running after the step"
    return _against("acceptance-by-concurrency", title, known, points, label, words)


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

    def words(x: Floats, y: Floats) -> str:
        return f"{y[0]:.2f} drafted tokens accepted a step after {x[0]:,.0f} tokens, {y[-1]:.2f} after {x[-1]:,.0f}"

    label = "tokens before the step: prompt and output so far"
    return _against("acceptance-by-context", title, known, points, label, words, share=False)


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

    def words(x: Floats, y: Floats) -> str:
        return f"{y[0]:.2f} drafted tokens accepted a step at temperature {x[0]:g}, {y[-1]:.2f} at {x[-1]:g}"

    label = "temperature of the request"
    picture = _against("acceptance-by-temperature", title, known, points, label, words, share=False)
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
        axes.plot(*found[each.label], label=each.label, **each.style.marked_line)
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
    return picture_of(name, title, known, lambda each: words(*found[each.label]), figure)


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
    assert steps is not None  # noqa: S101  the caller has left the others out
    return steps


def _drafting(series: Sequence[Series]) -> list[Series] | str:
    """Return the captures whose step statistics have drafts, or the reason why there are none."""
    known = [each for each in series if each.capture.steps is not None and each.capture.steps.drafts]
    if known:
        return known
    if not any(each.capture.speculates for each in series):
        return "nothing was drafted"
    return "there are no step statistics (step-stats.jsonl), and only they tell what was drafted"


_FEW_BARS: Final = 40
_FEWEST_SIZES: Final = 4
_ONE_PERCENT: Final = 0.01
_FEWEST_STEPS: Final = 5
"""Steps of a size that its quantiles need."""

_HIGHEST: Final = 3.5
"""Height of the figure in medians: stalled steps' P90 would flatten all else."""

_NO_STEPS: Final = "no request has more than one chunk, so there is no decode step"


def tokens_per_step(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw how many tokens decode steps gave each request, captured beside replayed."""
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

    def words_of(each: Series) -> str:
        counts = each.capture.requests.bursts
        ones = counts[1] / counts.sum()
        return f"{each.capture.requests.mean_burst:.2f} tokens a step on average, {ones:.0%} of the steps gave one"

    return picture_of("tokens-per-step", title, known, words_of, figure)


def _size_axis(axes: Axes, largest: int) -> None:
    """Show sizes from 1 to at least 4, so that a single bar is not as wide as the figure."""
    axes.set_xlim(0.4, max(largest, _FEWEST_SIZES) + 0.6)
    whole_ticks(axes)


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
    return picture_of("step-time", title, known, _time_words, figure)


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
    axes.plot(sizes + offset, middle, label=each.label, **style.marked_line)
    by_token = style.marked_line | {"linestyle": (0, (4, 2)), "linewidth": 1.0, "markerfacecolor": "white"}
    axes.plot(sizes + offset, middle / sizes, markersize=3, **by_token)


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


Mask = NDArray[np.bool_]
"""Which of the requests."""

_CURVE_POINTS: Final = 200
_QUANTILES: Final = (0.5, 0.9, 0.99)
_MOST_LOADS: Final = 12
_LOAD_NAME: Final = 18
_CROWDED: Final = 44
"""Characters that fit under half a figure."""

_FEWEST_REQUESTS: Final = 2
_ONE_REQUEST: Final = "one request has no distribution"


def distributions(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw what share of the requests had their first token, and a further one, in how much time."""
    title = "TTFT and TPOT"
    known = [each for each in series if len(each.capture.requests) >= _FEWEST_REQUESTS]
    if not known:
        return LeftOut(title, _ONE_REQUEST)
    figure, (left, right) = new_figure(1, 2, sharey=True)
    for axes, name, values_of in ((left, "TTFT", ttft_ms), (right, "TPOT", tpot_ms)):
        for each in known:
            _curve(axes, values_of(each), each)
        _finish_curves(axes, f"{name} at the engine (ms)")
    percent_axis(left, "requests that took at most so long")
    if len(known) > 1:
        legend_above(figure, left)

    def words(each: Series) -> str:
        return ", ".join(
            f"{name} P50 {measured(quantiles[0])}, P99 {measured(quantiles[2])} ms"
            for name, values in (("TTFT", ttft_ms(each)), ("TPOT", tpot_ms(each)))
            if len(values)
            for quantiles in [np.quantile(values, _QUANTILES)]
        )

    return picture_of("latency", title, known, words, figure)


def ttft_ms(each: Series) -> Floats:
    """Return the times to the first token."""
    return np.asarray(each.capture.requests.ttft_ms)


def tpot_ms(each: Series) -> Floats:
    """Return the times a further token of all requests with two or more."""
    values = np.asarray(each.capture.requests.tpot_ms)
    return np.asarray(values[~np.isnan(values)], dtype=np.float64)


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


def by_load(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw P50, P90 and P99 of each phase, or of each number of requests in flight where there are no phases."""
    title = "TTFT and TPOT by load"
    known = [each for each in series if len(each.capture.requests) >= _FEWEST_REQUESTS]
    if not known:
        return LeftOut(title, _ONE_REQUEST)
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
            requests = each.capture.requests
            values = np.asarray(requests.ttft_ms if name == "TTFT" else requests.tpot_ms)
            offset = (place - (len(known) - 1) / 2) * min(0.2, 0.8 / len(known))
            _draw_quantiles(axes, values, loads[each.label], names, each, offset)
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
    more = (f"{left_out} further loads are not drawn.",) if left_out > 0 else ()
    where = "in phase" if by_phase else "with so many requests in flight:"

    def words(each: Series) -> str:
        return _load_words(each, loads[each.label], names, where)

    return picture_of("latency-by-load", title, known, words, figure, *more)


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


def _draw_quantiles(  # noqa: PLR0913, PLR0917  where, what, and how
    axes: Axes, values: Floats, loads: dict[str, Mask], names: Sequence[str], each: Series, offset: float
) -> None:
    style = each.style
    points = []
    for place, name in enumerate(names):
        those = values[loads[name]] if name in loads else values[:0]
        those = those[~np.isnan(those)]
        if len(those):
            points.append((place + offset, *np.quantile(those, _QUANTILES)))
    if not points:
        return
    x, middle, most, nearly_all = np.array(points).T
    axes.vlines(x, middle, nearly_all, colors=style.colour, linewidth=1.2)
    axes.plot(x, middle, label=each.label, **style.marked_line)
    axes.plot(x, most, color=style.colour, marker=style.marker, markerfacecolor="white", linestyle="")
    axes.plot(x, nearly_all, color=style.colour, marker="_", markersize=9, linestyle="")


def _zero_or_log(axes: Axes) -> None:
    """Start at 0, unless the loads differ so much that the small ones could not be read."""
    values = [float(value) for line in axes.lines for value in np.asarray(line.get_ydata()) if value > 0]
    if values and max(values) > 20 * min(values):
        plain_log(axes, "y")
    else:
        # With room above: the library's margin is a share of the spread, which may be nearly 0.
        axes.set_ylim(0, 1.05 * max(values, default=1))


def _load_words(each: Series, loads: dict[str, Mask], names: Sequence[str], where: str) -> str:
    values = np.asarray(each.capture.requests.ttft_ms)
    worst = max(
        (name for name in names if name in loads), key=lambda name: float(np.quantile(values[loads[name]], 0.99))
    )
    quantiles = np.quantile(values[loads[worst]], _QUANTILES)
    return (
        f"by P99, first tokens were slowest {where} {worst}: "
        f"TTFT P50 {measured(quantiles[0])}, P99 {measured(quantiles[2])} ms"
    )


def client_ttft(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw TTFT as clients saw it over HTTP beside that at the engine."""
    title = "TTFT at the client and at the engine"
    known = [each for each in series if each.capture.client is not None and len(each.capture.client.ttft_ms) > 1]
    if not known:
        why = "no client.jsonl is there" if all(each.capture.client is None for each in series) else _ONE_REQUEST
        return LeftOut(title, f"{why}, so what clients saw is not known")
    figure, axes = new_figure()
    for each in known:
        client = each.capture.client
        _curve(axes, np.asarray(client.ttft_ms if client else ()), each, "", ":")
        _curve(axes, ttft_ms(each), each)
    axes.plot([], [], color=QUIET, marker="o", markersize=4, label="at the engine")
    axes.plot([], [], color=QUIET, marker="o", markersize=4, markerfacecolor="white", linestyle=":", label="over HTTP")
    _finish_curves(axes, "TTFT (ms)")
    percent_axis(axes, "requests that took\nat most so long")
    legend_above(figure, axes)

    def words(each: Series) -> str:
        client = each.capture.client or ClientSums()
        outcomes = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in client.outcomes.items())
        seen, given = float(np.median(client.ttft_ms)), float(np.median(ttft_ms(each)))
        return f"the client's median is {measured(seen)} ms, the engine's {measured(given)} ms; {outcomes}"

    return picture_of("client-ttft", title, known, words, figure)


_GIB: Final = 2**30
_MOST_BYTES: Final = 2**50
_BAR: Final = 0.6
_LABEL_SHARE: Final = 0.045
_KV: Final = ("KV cache", "#009E73", "", ("availableKvBytes",))
_PARTS: Final = (
    ("target weights", "#0072B2", "", ("targetWeightsBytes",)),
    ("draft weights", "#56B4E9", "xxxx", ("draftWeightsBytes",)),
    (
        "state, activation, graphs, NCCL",
        "#E69F00",
        "////",
        ("stateBytes", "activationBytes", "cudaGraphsBytes", "nonTorchBytes"),
    ),
    _KV,
)
_REST: Final = ("all but the KV cache", "#BBBBBB", "\\\\\\\\")


def budgets(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw the plan's budget term by term, beside what the engine reported."""
    title = "Memory: the plan against the engine"
    known = [each for each in series if _memory(each) is not None]
    if not known:
        return LeftOut(title, "no manifest holds the plan of the deployment that was captured")
    figure, axes = new_figure(height_in=1.7 + 0.75 * len(known))
    names: list[str] = []
    for each in known:
        memory = _memory(each) or {}
        requested, left = memory["requestedBytes"] / _GIB, 0.0
        for *part, terms in _PARTS:
            size = max(0.0, sum(memory[term] for term in terms) / _GIB)
            _draw_part(axes, len(names), left, size, part, requested)
            left += size
        names.append(f"{each.label}\nplan" if len(known) > 1 else "plan")
        if each.capture.identity.kv_cache_tokens is not None:
            reported = _reported_gib(each, memory)
            rest = max(0.0, requested - reported)
            _draw_part(axes, len(names), 0.0, rest, _REST, requested)
            _draw_part(axes, len(names), rest, reported, _KV[:3], requested)
            names.append("engine")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(left=0)
    on_gpu = all(each.capture.identity.plan.get("product") != "CPU" for each in known)
    axes.set_xlabel("memory of one GPU (GiB)" if on_gpu else "memory (GiB)")
    legend_above(figure, axes)
    return picture_of("budget", title, known, _budget_words, figure)


def _memory(each: Series) -> Mapping[str, float] | None:
    """Return the terms of a plan in bytes; None if they are missing or implausible."""
    per_gpu = each.capture.identity.plan.get("perGpu")
    needed = {"requestedBytes", *(term for *_, terms in _PARTS for term in terms)}
    if not isinstance(per_gpu, dict):
        return None
    values = [per_gpu.get(term) for term in needed]
    return per_gpu if all(isinstance(each, int) and abs(each) < _MOST_BYTES for each in values) else None


def _draw_part(  # noqa: PLR0913, PLR0917  where, how wide, and how
    axes: Axes, place: int, left: float, size: float, looks: Sequence[Any], whole: float
) -> None:
    name, colour, hatch = looks
    if size <= 0:
        return
    given = axes.get_legend_handles_labels()[1]
    label = name if name not in given else None
    axes.barh(place, size, _BAR, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
    if size > _LABEL_SHARE * whole:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes.text(left + size / 2, place, measured(size), ha="center", va="center", fontsize=8, bbox=box)


def _reported_gib(each: Series, memory: Mapping[str, float]) -> float:
    """Return the size of the engine's KV cache on a GPU: its tokens times the plan's bytes per token."""
    identity = each.capture.identity
    planned, tokens = identity.plan.get("kvCacheTokens"), identity.kv_cache_tokens or 0
    if not isinstance(planned, int) or planned <= 0:
        return 0.0
    return tokens / planned * memory["availableKvBytes"] / _GIB


def _budget_words(each: Series) -> str:
    identity = each.capture.identity
    planned, reported = identity.plan.get("kvCacheTokens"), identity.kv_cache_tokens
    if not isinstance(planned, int) or planned <= 0 or reported is None:
        return "the engine's own figure is not in the capture, so the plan stands alone"
    return (
        f"planned were {planned:,} tokens of KV cache, the engine reported {reported:,} ({reported / planned - 1:+.1%})"
    )


_POINTS: Final = 240
_HALF: Final = 0.5
_WAITING: Final = "#D55E00"
_PREEMPTED: Final = "#B00020"


def cache_use(series: Sequence[Series]) -> Picture | LeftOut:
    """Draw how full the KV cache was, how many requests ran and waited, and when some were preempted."""
    title = "KV cache and preemptions"
    known = [each for each in series if each.capture.steps is not None]
    if not known:
        return LeftOut(title, "there are no step statistics (step-stats.jsonl)")
    figure, rows = new_figure(len(known), 1, height_in=1.3 + 2.1 * len(known), squeeze=False)
    for each, (axes,) in zip(known, rows, strict=True):
        _draw_cache(axes, each)
        if len(known) > 1:
            axes.set_title(each.label)
    rows[-1][0].set_xlabel("time since the first arrival (s)")
    legend_above(figure, *rows[:, 0], columns=5)
    return picture_of("kv-cache", title, known, _cache_words, figure)


def _draw_cache(axes: Axes, each: Series) -> None:
    bins = _steps(each).by_time.coarser(_POINTS)
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


def _cache_words(each: Series) -> str:
    bins = _steps(each).by_time
    most, waited = float(bins.largest[:, 3].max()), float(bins.largest[:, 5].max())
    preemptions = sum(each.capture.requests.preemptions)
    waiting = f"up to {counted(waited, 'request')} waited" if waited else "no request waited after a step"
    # A forecast of a capture without the size of the KV cache reports no use of it.
    used = f"at most {most:.1%} of the KV cache was in use" if most else "how full the KV cache was is not known"
    return f"{used}, {waiting}, {counted(preemptions, 'preemption')}"


Drawn = Sequence[tuple[Arm, Style]]


class _Places:
    """Positions of loads: by the baseline's running requests, or side by side if each asks different things."""

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

    def finish(self, axes: Axes) -> None:
        """Label the axis."""
        if self.apart:
            _name_phases(axes, self._phases)
        else:
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
                label=_name(arm) if index == 0 or drawn == 1 else None,
            )
    if not drawn:
        return LeftOut("Verdict by load", "no load could be compared")
    axes.axhline(0, color=QUIET, linewidth=1)
    _crossings(axes, others)
    places.finish(axes)
    axes.set_ylabel(f"goodput against {_name(baseline[0])} (%)")
    legend_above(figure, axes)
    words = (
        *(f"{_name(arm)}: {arm.verdict}: {printable(arm.message)}." for arm, _ in others),
        f"Bars are intervals of {comparison.level:.0%} over all loads of an arm; hollow marks are Inconclusive.",
    )
    return Picture("arms-verdict", "Verdict by load", words, figure, captures)


def _goodput(arms: Drawn, comparison: Comparison, captures: tuple[Capture, ...]) -> Picture | LeftOut:
    places = _Places(comparison.arms[0].loads)
    figure, axes = new_figure()
    for arm, style in arms:
        points = sorted(
            (at, each.goodput) for each in arm.loads if (at := places.of(each)) is not None and each.goodput is not None
        )
        if points:
            looks = style.marked_line | ({"linestyle": ""} if places.apart else {})
            axes.plot(*zip(*points, strict=True), label=_name(arm), **looks)
    if not axes.lines:
        return LeftOut("Goodput by load", "no request was answered")
    _crossings(axes, arms)
    axes.set_ylim(bottom=0)
    places.finish(axes)
    axes.set_ylabel("goodput (tokens/s)")
    legend_above(figure, axes)
    return Picture("arms-goodput", "Goodput by load", tuple(map(_goodput_words, comparison.arms)), figure, captures)


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
            for index, phase in enumerate(phases):
                found: Quantiles | None = getattr(loads.get(phase), name, None)
                if found is not None:
                    drawn = True
                    _bar(axes, index + offset, found, style, _name(arm) if index == 0 else None)
        _name_phases(axes, phases)
        axes.set_ylabel(f"{name.removesuffix('_ms').replace('ttft', 'TTFT').replace('tpot', 'TPOT')} (ms)")
        plain_log(axes, "y")
    if not drawn:
        return LeftOut("Latency of the arms by load", "no request was answered")
    legend_above(figure, panels[0])
    words = (
        *(_latency_words(arm) for arm in comparison.arms),
        "Marks are P50, ticks P90 and P95, hollow marks P99, as the client saw them.",
    )
    return Picture("arms-latency", "Latency of the arms by load", words, figure, captures)


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
    title = "Acceptance of the arms"
    drafting = [(arm, style, arm.drafting) for arm, style in arms if arm.drafting is not None]
    if not drafting:
        return LeftOut(title, "nothing was drafted")
    figure, (left, right) = new_figure(1, 2)
    words = []
    for arm, style, found in drafting:
        positions = range(1, len(found.per_position) + 1)
        left.plot(positions, found.per_position, label=_name(arm), **style.marked_line)
        each = found.per_request
        if each is not None and each.requests:
            shares = [count / each.requests for count in (*each.histogram, each.histogram[-1])]
            right.step(np.linspace(0, 1, 11), shares, where="post", color=style.colour, linestyle=style.line)
        most = "" if found.largest_block_efficiency is None else f" of {found.largest_block_efficiency}"
        spread = "" if each is None else f"; by request P10 {each.p10:.0%}, P50 {each.p50:.0%}, P90 {each.p90:.0%}"
        words.append(
            f"{_name(arm)}: {found.acceptance:.0%} of the drafted tokens, {found.block_efficiency:.2f}{most} tokens a "
            f"verification{spread}."
        )
    percent_axis(left, "drafts accepted up to here")
    left.set_xlabel("position in the draft")
    whole_ticks(left)
    percent_axis(right, "requests", max((float(np.max(line.get_ydata())) for line in right.lines), default=1.0))
    right.set_xlabel("acceptance of a request, as if each step drafted K")
    legend_above(figure, left)
    return Picture("arms-acceptance", title, tuple(words), figure, captures)


def _name(arm: Arm) -> str:
    return printable(arm.name)


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
    client_ttft,
    cache_use,
)
"""Charts of one or several captures, in the order in which they are read."""
