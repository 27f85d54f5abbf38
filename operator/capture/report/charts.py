"""TTFT and TPOT: distributions, quantiles by load, and what the client saw of them."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

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
    plain_log,
)
from specdecode_operator.pictures.seen.client import ClientSums
from specdecode_operator.pictures.seen.sums import Floats
from specdecode_operator.problems import shown

Mask = NDArray[np.bool_]
"""Which of the requests."""

_CURVE_POINTS: Final = 200
_QUANTILES: Final = (0.5, 0.9, 0.99)
_MOST_LOADS: Final = 12
_LOAD_NAME: Final = 18
_CROWDED: Final = 44
"""Letters that stand side by side under half a figure."""

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

    return Picture("latency", title, per_series(known, words), figure, tuple(each.capture for each in known))


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
    sentence = per_series(known, lambda each: _load_words(each, loads[each.label], names, where))
    return Picture("latency-by-load", title, (*sentence, *more), figure, tuple(each.capture for each in known))


def _phases(each: Series) -> dict[str, Mask]:
    """Return which requests each phase has, in the order in which phases began."""
    requests = each.capture.requests
    numbers, arrivals = np.asarray(requests.phase), np.nan_to_num(np.asarray(requests.arrival_ms))
    found: dict[str, Mask] = {}
    for name, place in requests.phases.items():
        key = "(none)" if name is None else shown(name, _LOAD_NAME)
        # Names that are the same as far as they are shown are one load.
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
    axes.plot(x, middle, color=style.colour, marker=style.marker, linestyle=style.line, label=each.label)
    axes.plot(x, most, color=style.colour, marker=style.marker, markerfacecolor="white", linestyle="")
    axes.plot(x, nearly_all, color=style.colour, marker="_", markersize=9, linestyle="")


def _zero_or_log(axes: Axes) -> None:
    """Begin at 0, unless loads lie so far apart that the small ones could not be read."""
    values = [float(value) for line in axes.lines for value in np.asarray(line.get_ydata()) if value > 0]
    if values and max(values) > 20 * min(values):
        plain_log(axes, "y")
    else:
        # With room above: that of the library is a share of how far they lie apart, which may be next to nothing.
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

    sentence = per_series(known, _client_words)
    return Picture("client-ttft", title, sentence, figure, tuple(each.capture for each in known))


def _client_words(each: Series) -> str:
    client = each.capture.client or ClientSums()
    outcomes = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in client.outcomes.items())
    seen, given = float(np.median(client.ttft_ms)), float(np.median(ttft_ms(each)))
    return f"the client's median is {measured(seen)} ms, the engine's {measured(given)} ms; {outcomes}"
