"""Draw all charts of some captures, as one self-contained HTML page or as files, all or none."""

import heapq
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from matplotlib.axes import Axes

from specdecode_operator.capture.comparison.comparison_file import Comparison
from specdecode_operator.capture.report.capture_reader import Arms, Capture, arms_of, captures_below, read_capture
from specdecode_operator.capture.report.capture_sums import Floats, RequestSums, log_quantile
from specdecode_operator.capture.report.charts import CHARTS, budgets, pictures_of
from specdecode_operator.capture.report.drawing import (
    STYLES,
    LeftOut,
    Picture,
    Series,
    counted,
    inline_svg,
    legend_above,
    looks,
    measured,
    new_figure,
    series_of,
    write_alone,
)
from specdecode_operator.problems import printable
from specdecode_operator.version import __version__

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
        return LeftOut(title, "the requests have no arrival times")
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
    """Yield one value per bin of time; without step statistics, only the tokens of decode steps."""

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


_QUANTILES: Final = (50, 90, 99)


@dataclass(frozen=True)
class Measure:
    """One figure with its unit; shares are from 0 to 1."""

    value: float | str
    unit: str = ""


def measures_of(capture: Capture) -> dict[str, Measure]:
    """Return the known figures of a capture, by name."""
    identity, requests, steps = capture.identity, capture.requests, capture.steps
    tokens = int(np.sum(requests.output_tokens, dtype=np.float64))
    found = {
        "model": Measure(identity.model or "not known"),
        "GPU": Measure(identity.gpu or "not known"),
        "vLLM": Measure(identity.vllm or "not known"),
        "config hash": Measure(identity.config_hash or "not known"),
        "speculation": Measure(identity.speculation),
        "requests": Measure(len(requests)),
        "output tokens": Measure(tokens),
    }
    if shown := temperatures_text(requests):
        found["temperatures"] = Measure(shown)
    rows = request_times(requests, 0.0)
    rows = rows[~np.isnan(rows).any(axis=1)]
    if len(rows) and (seconds := float(rows[:, 3].max() - rows[:, 0].min()) / 1000) > 0:
        found["output tokens per second"] = Measure(tokens / seconds, "1/s")
    if requests.bursts.any():
        found["tokens per decode step"] = Measure(requests.mean_burst)
    if steps is not None and steps.acceptance is not None:
        found["acceptance"] = Measure(steps.acceptance, "share")
    for name, column in (("TTFT", requests.ttft_ms), ("TPOT", requests.tpot_ms)):
        values = np.asarray(column)
        values = values[~np.isnan(values)]
        if len(values):
            for share, value in zip(_QUANTILES, np.percentile(values, _QUANTILES), strict=True):
                found[f"{name} P{share}"] = Measure(float(value), "ms")
    gaps = requests.gaps.sum(axis=0)
    if gaps.any():
        for share in _QUANTILES:
            found[f"ITL P{share}"] = Measure(log_quantile(gaps, share / 100), "ms")
    return found


_MOST_TEMPERATURES: Final = 4


def temperatures_text(requests: RequestSums) -> str:
    """Return the most frequent temperatures of requests, each with its share; empty if none is known."""
    counts, total = requests.temperatures, requests.temperatures.total()
    named = [(at, count) for at, count in counts.most_common() if at is not None][:_MOST_TEMPERATURES]
    parts = [f"{at:g} ({count / total:.0%})" for at, count in named]
    rest = total - sum(count for _, count in named)
    return ", ".join([*parts, *([f"others ({rest / total:.0%})"] if rest else [])])


# Names in files are untrusted: the page loads nothing and runs no script.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_FEW: Final = 2
_STYLE: Final = """
:root { color-scheme: light; }
body { font: .95rem/1.5 "DejaVu Sans", Verdana, sans-serif; color: #222; background: #fff; margin: 0 auto;
  padding: 1.5rem; max-width: 60rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
section { margin: 2.4rem 0 0; break-inside: avoid; } section p { margin: 0 0 .2rem; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
figcaption, footer, .quiet { color: #555; font-size: .8rem; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #ccc; vertical-align: top; }
th:first-child, td:first-child { text-align: left; font-weight: normal; color: #555; min-width: 6rem; }
td .quiet { display: block; white-space: nowrap; }
.wide { overflow-x: auto; } th.words, td.words { text-align: left; }
th + th, td + td { min-width: 4.6rem; }
.warning { border-left: 4px solid #d55e00; padding: .2rem .7rem; margin: .5rem 0; }
nav { columns: 3 14rem; font-size: .85rem; margin: 1rem 0; } nav a { display: block; color: #005a8f; }
@media print {
  :root { font-size: 11px; } body { max-width: none; padding: 0; } nav { display: none; }
  .wide { overflow: visible; } .wide table { font-size: .75rem; }
  .wide th, .wide td { min-width: 0; padding: .15rem .3rem; }
}
"""


def page(
    series: Sequence[Series],
    drawn: Sequence[Picture | LeftOut],
    warnings: Sequence[str],
    comparison: Comparison | None = None,
) -> str:
    """Return the page. Untrusted text is escaped, and the policy stops scripts."""
    names = list(dict.fromkeys(each.capture.identity.name for each in series))
    title = " and ".join(names) if len(names) <= _FEW else f"{len(names)} captures"
    pictures = [each for each in drawn if isinstance(each, Picture)]
    links = "".join(f'<a href="#{each.name}">{escape(each.title)}</a>' for each in pictures)
    missing = [each for each in drawn if isinstance(each, LeftOut)]
    left_out = "".join(f"<li>{escape(each.title)}: {escape(each.why)}.</li>" for each in missing)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Capture report: {escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<header><h1>{escape(title)}</h1>",
        *(f'<p class="quiet">{escape(each.capture.caption)}</p>' for each in series),
        *(f'<p class="warning">{escape(each)}</p>' for each in warnings),
        _verdicts(comparison) if comparison is not None else "",
        _figures(series),
        f"</header><nav>{links}</nav><main>",
    ]
    for picture in pictures:
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in picture.sentences)
        captions = "<br>".join(escape(each.caption) for each in picture.captures)
        parts.append(
            f'<section id="{picture.name}"><h2>{escape(picture.title)}</h2>{sentences}'
            f"<figure>{inline_svg(picture)}<figcaption>{captions}</figcaption></figure></section>"
        )
    parts += [
        f"<section><h2>Left out</h2><ul>{left_out}</ul></section>" if left_out else "",
        f"</main><footer><p>specdecode capture report {escape(__version__)}</p></footer></body></html>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _table(head: str, rows: str) -> str:
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _verdicts(comparison: Comparison) -> str:
    """Return a table of each arm's verdict against the first."""
    rows = "".join(
        f"<tr><td>{escape(arm.name)}</td><td>{escape(arm.verdict or 'baseline')}</td>"
        f"<td>{escape(arm.outputs.outputs if arm.outputs is not None else '')}</td>"
        f'<td class="words">{escape(printable(arm.message))}</td></tr>'
        for arm in comparison.arms
    )
    return _table("<th>arm</th><th>verdict</th><th>outputs</th><th class='words'>against the baseline</th>", rows)


def _figures(series: Sequence[Series]) -> str:
    """Return the figures of all captures, one per column, with the changes from the first one."""
    columns = [measures_of(each.capture) for each in series]
    rows = ""
    for name in dict.fromkeys(name for column in columns for name in column):
        cells = "".join(_cell(column.get(name), columns[0].get(name)) for column in columns)
        rows += f"<tr><td>{escape(name)}</td>{cells}</tr>"
    return _table("<th></th>" + "".join(f"<th>{escape(each.label)}</th>" for each in series), rows)


def _cell(measure: Measure | None, first: Measure | None) -> str:
    if measure is None:
        return "<td>not known</td>"
    value, share = measure.value, measure.unit == "share"
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    shown = f"{measured(value) if isinstance(value, float) else f'{value:,}'} {measure.unit}".strip()
    shown = f"{100 * value:.1f} %" if share else shown
    base = first.value if first is not None and first is not measure else None
    if isinstance(base, float | int) and base:
        change = f"{100 * (value - base):+.1f} points" if share else f"{100 * (value / base - 1):+.1f} %"
        shown += f' <span class="quiet">({change.replace("-", "−")})</span>'  # noqa: RUF001  a minus
    return f"<td>{shown}</td>"


MOST_CAPTURES: Final = len(STYLES)


class ReportError(Exception):
    """A report cannot be made; the message has a fix."""


@dataclass(frozen=True)
class Outputs:
    """Paths of the outputs; None: not wanted."""

    page: Path
    png: Path | None = None  # folder
    svg: Path | None = None  # folder
    perfetto: Path | None = None


@dataclass(frozen=True)
class Report:
    """The pictures and warnings of a report."""

    pictures: Sequence[Picture]
    left_out: Sequence[LeftOut]
    warnings: Sequence[str]


def make_report(captured: Sequence[Path], replayed: Sequence[Path], outputs: Outputs) -> Report:
    """Read captures, and draw and write the report.

    Raises
    ------
    ReportError
        If there are more captures than can be distinguished, or a file cannot be written.
    RecordingError
        If a capture cannot be read.
    """
    for folder in (outputs.png, outputs.svg):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ReportError(f"{printable(str(folder))}: is not a folder: name one for the charts")
    found = [(path, arms_of(path)) for path in captured]
    arms = [each for _, each in found if each is not None]
    folders = [
        (folder, False) for path, each in found for folder in (captures_below(path) if each is None else each.folders)
    ]
    folders += [(folder, True) for path in replayed for folder in captures_below(path)]
    if len(folders) > MOST_CAPTURES and not arms:
        raise ReportError(f"{len(folders)} captures cannot be distinguished in a chart: name at most {MOST_CAPTURES}")
    # Fails before anything is read and drawn if the page cannot be written.
    with _written(outputs.page) as partial:
        captures = [read_capture(folder, replayed=is_replay) for folder, is_replay in folders[:MOST_CAPTURES]]
        report = _drawn(captures, arms, partial, outputs)
        if outputs.perfetto is not None:
            with _written(outputs.perfetto) as traced:
                write_perfetto(captures, traced)
    return report


def _drawn(captures: Sequence[Capture], arms: Sequence[Arms], file: Path, outputs: Outputs) -> Report:
    series = series_of(captures)
    comparison = next((each.comparison for each in arms if each.comparison is not None), None)
    warnings = [*(warning for each in captures for warning in each.warnings), *_doubts(captures, arms)]
    with looks():
        drawn = [
            *(pictures_of(comparison, captures) if comparison is not None else ()),
            *(draw(series) for draw in CHARTS),
        ]
        drawn += [*timelines(series), budgets(series)]
        # The page first: a figure that is written alone gets its title drawn into it.
        file.write_text(page(series, drawn, warnings, comparison), encoding="utf-8")
        pictures = [each for each in drawn if isinstance(each, Picture)]
        folders = [(folder, suffix) for folder, suffix in ((outputs.svg, ".svg"), (outputs.png, ".png")) if folder]
        for picture in pictures if folders else ():
            try:
                for folder, _ in folders:
                    folder.mkdir(parents=True, exist_ok=True)
                write_alone(picture, [folder / f"{picture.name}{suffix}" for folder, suffix in folders])
            except OSError as error:
                raise _cannot_write(folders[0][0], error) from error
    return Report(pictures, [each for each in drawn if isinstance(each, LeftOut)], warnings)


def _doubts(captures: Sequence[Capture], arms: Sequence[Arms]) -> Iterator[str]:
    """Yield which arms are not drawn, the doubts about their comparison, and settings that differ without arms."""
    for what in () if arms else ("model", "speculation"):
        values = dict.fromkeys(getattr(each.identity, what) or "not known" for each in captures)
        if len(values) > 1:
            yield f"The captures have different settings: {what} is {' and '.join(values)}."
    compared = [(each.folders, each.comparison) for each in arms if each.comparison is not None]
    yield from (printable(each.warning) for each in arms if each.warning is not None)
    if len(compared) > 1:
        yield "Only the arms of the first capture are compared: name one capture."
    for folders, comparison in compared[:1]:
        if len(folders) > MOST_CAPTURES:
            yield f"The capture has {len(folders)} arms: {MOST_CAPTURES} are drawn, all are in the table."
        yield from comparison.notes


@contextmanager
def _written(file: Path) -> Iterator[Path]:
    """Yield a temporary file next to the target, which replaces it at the end."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise _cannot_write(file, error) from error
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        # The mode of any new file: mkstemp allows only the owner to read it.
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        partial.replace(file)
    except OSError as error:
        raise _cannot_write(file, error) from error
    finally:
        partial.unlink(missing_ok=True)


def _cannot_write(file: Path, error: OSError) -> ReportError:
    return ReportError(f"{printable(str(file))}: {error.strerror}: name a path that can be written")
