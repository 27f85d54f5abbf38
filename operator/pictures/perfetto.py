"""Requests and counters as a trace that ui.perfetto.dev opens (Trace Event Format of Chromium)."""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from specdecode_operator.pictures.figures.timeline import moments
from specdecode_operator.pictures.seen.capture import Capture

_US: Final = 1000.0
"""Microseconds in a millisecond: the format counts in them."""

_STATES: Final = ("waiting", "prefill", "decode")
_COUNTERS_LANE: Final = 0


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
    rows = moments(requests, capture.zero_ms) * _US
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
        for state, name in enumerate(_STATES):
            if row[state + 1] > row[state]:
                yield _slice(name, row[state], row[state + 1], process, lane)


def _slice(name: str, start: float, end: float, process: int, lane: int) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": round(start, 1), "dur": round(end - start, 1), "pid": process, "tid": lane}


def _counters(capture: Capture, process: int) -> Iterator[dict[str, Any]]:
    """Yield one value a bin of time; without step statistics the tokens of decode steps alone."""
    bursts = capture.requests.by_time
    for moment_ms, (steps, tokens) in zip(bursts.moments_ms, bursts.sums, strict=True):
        yield _counter("tokens per decode step", moment_ms - capture.zero_ms, tokens / steps, process)
    if capture.steps is None:
        return
    bins = capture.steps.by_time
    for moment_ms, sums in zip(bins.moments_ms, bins.sums, strict=True):
        steps, drafted, accepted, usage, running, waiting, _ = (float(each) for each in sums)
        since_zero_ms = moment_ms - capture.zero_ms
        if drafted:
            yield _counter("acceptance (%)", since_zero_ms, 100 * accepted / drafted, process)
        yield _counter("KV cache in use (%)", since_zero_ms, 100 * usage / steps, process)
        yield _counter("requests running", since_zero_ms, running / steps, process)
        yield _counter("requests waiting", since_zero_ms, waiting / steps, process)


def _counter(name: str, moment_ms: float, value: float, process: int) -> dict[str, Any]:
    return {
        "ph": "C", "name": name, "ts": round(float(moment_ms) * _US, 1), "pid": process, "tid": _COUNTERS_LANE,
        "args": {"value": round(float(value), 4)},
    }  # fmt: skip
