"""Draw when each request waited, was prefilled and decoded; write that as a trace for Perfetto.

The trace, for ui.perfetto.dev, is in Chromium's Trace Event Format.
"""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from matplotlib.axes import Axes

from specdecode_operator.capture.report.capture_reader import Capture
from specdecode_operator.capture.report.capture_sums import Floats, RequestSums
from specdecode_operator.capture.report.drawing import (
    LeftOut,
    Picture,
    Series,
    counted,
    legend_above,
    measured,
    new_figure,
)

_MOST_ROWS: Final = 60
"""Requests in one picture, around the busiest time; more rows could not be read."""

_MOMENTS: Final = 400
_ROUNDING_S: Final = 1e-6
_STATES: Final = (("waiting", "#D55E00", "////"), ("prefill", "#F0E442", "\\\\\\\\"), ("decoding", "#0072B2", ""))


def timelines(series: Sequence[Series]) -> list[Picture | LeftOut]:
    """Draw each capture's requests, one picture a capture."""
    return [_timeline(each, "" if len(series) == 1 else f"-{place}") for place, each in enumerate(series, 1)]


def _timeline(each: Series, suffix: str) -> Picture | LeftOut:
    title = f"Timeline of requests{f': {each.label}' if suffix else ''}"
    rows = request_times(each.capture.requests, each.capture.zero_ms) / 1000
    rows = rows[~np.isnan(rows).any(axis=1)]
    if not len(rows):
        return LeftOut(title, "no request has its moment of arrival")
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    # Requests in flight at each arrival, that one included. A client that sends its next request at once does so when
    # its answer ended, up to the rounding of sums.
    ended = np.searchsorted(np.sort(rows[:, 3]) - _ROUNDING_S, rows[:, 0], side="right")
    in_flight = np.arange(1, len(rows) + 1) - ended
    first = max(0, min(int(np.argmax(in_flight)) - _MOST_ROWS // 2, len(rows) - _MOST_ROWS))
    drawn = rows[first : first + _MOST_ROWS]
    figure, (upper, lower) = new_figure(2, 1, height_in=5.4, height_ratios=(1, 2.2))
    _draw_states(upper, rows)
    _draw_rows(lower, drawn)
    if len(drawn) < len(rows):
        upper.axvspan(drawn[0, 0], drawn[:, 3].max(), color="#000000", alpha=0.13, linewidth=0, label="drawn below")
    lower.set_xlabel("time since the first arrival (s)")
    whole = f"\n({first + 1:,} to {first + len(drawn):,} of {len(rows):,})" if len(drawn) < len(rows) else ""
    lower.set_ylabel(f"requests in order of arrival{whole}")
    legend_above(figure, upper, columns=4)
    span_s, preemptions = float(rows[:, 3].max() - rows[0, 0]), sum(each.capture.requests.preemptions)
    waited, prefilled, decoded = (measured(float(each) * 1000) for each in np.diff(rows, axis=1).mean(axis=0))
    sentence = (
        f"{counted(len(rows), 'request')} in {measured(span_s)} s, at most {in_flight.max():,} at a time; on average "
        f"a request waited {waited} ms, was prefilled in {prefilled} ms and "
        f"decoded for {decoded} ms; {counted(preemptions, 'preemption')}."
    )
    return Picture(f"timeline{suffix}", title, (sentence,), figure, (each.capture,))


def request_times(requests: RequestSums, zero_ms: float) -> Floats:
    """Return a row a request: its arrival, when it was scheduled, its first token and its last, in ms."""
    arrival = np.asarray(requests.arrival_ms) - zero_ms
    first = arrival + np.asarray(requests.ttft_ms)
    scheduled = np.asarray(requests.scheduled_ms) - zero_ms
    scheduled = np.clip(np.where(np.isnan(scheduled), arrival, scheduled), arrival, first)
    return np.column_stack((arrival, scheduled, first, first + np.asarray(requests.decode_ms)))


def _draw_states(axes: Axes, rows: Floats) -> None:
    """Draw the number of requests in each state."""
    at = np.linspace(rows[0, 0], rows[:, 3].max(), _MOMENTS)
    passed = [np.searchsorted(np.sort(rows[:, column]), at, side="right") for column in range(4)]
    bottom = np.zeros(_MOMENTS)
    for state in (2, 1, 0):
        (name, colour, hatch), count = _STATES[state], passed[state] - passed[state + 1]
        if count.any():
            looks: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "#333333", "linewidth": 0}
            axes.fill_between(at, bottom, bottom + count, label=name, step="mid", **looks)
        bottom += count
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests at a time")
    axes.set_xlim(rows[0, 0], rows[:, 3].max())


def _draw_rows(axes: Axes, rows: Floats) -> None:
    places = np.arange(len(rows))
    thick = max(0.8, min(6.0, 180 / len(rows)))
    for state, (_, colour, _) in enumerate(_STATES):
        # The thickness distinguishes states in greyscale, too.
        width = thick * (0.5, 1.6, 1.0)[state]
        axes.hlines(places, rows[:, state], rows[:, state + 1], colors=colour, linewidth=width)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")


_US: Final = 1000.0
"""Microseconds, the unit of the format, in a millisecond."""

_PERFETTO_STATES: Final = ("waiting", "prefill", "decode")


def write_perfetto(captures: Sequence[Capture], file: Path) -> None:
    """Write a process for each capture: its requests in as few lanes as hold them, and its counters over time."""
    encoder = msgspec.json.Encoder()
    with file.open("wb") as stream:
        stream.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for place, event in enumerate(_events(captures)):
            stream.write(b",\n" if place else b"")
            stream.write(encoder.encode(event))
        stream.write(b"\n]}\n")


def _events(captures: Sequence[Capture]) -> Iterator[dict[str, Any]]:
    for process, capture in enumerate(captures, 1):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": capture.caption}}
        yield from _requests(capture, process)
        yield from _counters(capture, process)


def _requests(capture: Capture, process: int) -> Iterator[dict[str, Any]]:
    requests = capture.requests
    rows = request_times(requests, capture.zero_ms) * _US
    phases = list(requests.phases)
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for place in np.argsort(rows[:, 0], kind="stable"):
        row = [float(each) for each in rows[place]]
        if any(np.isnan(row)):
            continue
        while busy and busy[0][0] <= row[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy) + 1
        heapq.heappush(busy, (row[3], lane))
        about = {
            "prompt_tokens": requests.prompt_tokens[place],
            "output_tokens": requests.output_tokens[place],
            "preemptions": requests.preemptions[place],
            "phase": phases[requests.phase[place]],
        }
        yield _slice(f"request {place + 1}", row[0], row[3], process, lane) | {"args": about}
        for state, name in enumerate(_PERFETTO_STATES):
            if row[state + 1] > row[state]:
                yield _slice(name, row[state], row[state + 1], process, lane)


def _slice(name: str, start: float, end: float, process: int, lane: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": round(start, 1), "dur": round(end - start, 1), "pid": process, "tid": lane}


def _counters(capture: Capture, process: int) -> Iterator[dict[str, Any]]:
    """Yield one value per bin of time; without step statistics the tokens of decode steps alone."""

    def counter(name: str, time_ms: float, value: float) -> dict[str, Any]:
        time_us, shown = round(float(time_ms - capture.zero_ms) * _US, 1), round(float(value), 4)
        return {"ph": "C", "name": name, "ts": time_us, "pid": process, "tid": 0, "args": {"value": shown}}

    bursts = capture.requests.by_time
    for time_ms, (steps, tokens) in zip(bursts.times_ms, bursts.sums, strict=True):
        yield counter("tokens per decode step", time_ms, tokens / steps)
    if capture.steps is None:
        return
    bins = capture.steps.by_time
    for time_ms, sums in zip(bins.times_ms, bins.sums, strict=True):
        steps, drafted, accepted, usage, running, waiting, _ = (float(each) for each in sums)
        if drafted:
            yield counter("acceptance (%)", time_ms, 100 * accepted / drafted)
        yield counter("KV cache in use (%)", time_ms, 100 * usage / steps)
        yield counter("requests running", time_ms, running / steps)
        yield counter("requests waiting", time_ms, waiting / steps)
