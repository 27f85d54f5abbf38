"""Read a vLLM engine's /metrics page: requests, KV cache, speculation and changed settings.

`read_exposition` parses only the requested samples, in time linear in the page. prometheus_client's parser takes
0.2 to 0.4 µs per character, half a second for the largest page that a hostile engine may send.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Final

from specdecode_operator.problems import shown
from specdecode_operator.vllm.logging_config import CHANGED_SETTINGS, STARTUP_TIMES
from specdecode_operator.vllm.profiles import EngineProfile
from specdecode_operator.vllm.settings_watch import KEY, LABEL, METRIC, PHASE, SPECULATION, TIMES, VALUE
from specdecode_operator.vllm.speculative_config import SPOKEN_KEYS

_MAX_LINES: Final = 40_000
"""Most lines of a page.

With 64 data-parallel ranks, the most that are served, vLLM 0.33 writes about 30,000: 378 series per rank, and their
creation times.
"""
_MAX_READ_LINES: Final = 8_000
"""Most lines with requested names. A rank has 73, plus one for each of up to 32 draft positions."""
_MAX_READ_CHARACTERS: Final = 2**20
"""Most characters in these lines: 64 ranks have about 800,000."""
_MAX_LINE_CHARACTERS: Final = 8 * 1024
"""Most characters in one requested line: the cache's configuration has 1,100."""
_MAX_COUNTER: Final = 2**53
"""Largest counter. A float above it cannot count by one, and the API server rejects it.
"""
_MOST_SETTING_VALUES: Final = 3
"""Most values kept of one setting. Ranks are configured alike, but a hostile pod may report any number.
"""

_LONGEST_START_S: Final = 86_400

CANARY_ANSWERS: Final = "specdecode:canary_answers_total"
CANARY_REFUSED: Final = "specdecode:canary_unsupported"
"""Metrics about canary answers, from the recorder in the engine (capture/recorder/canary_metrics.py)."""
HEAD_UPDATE: Final = "specdecode:draft_head_update"
HEAD_PAUSE: Final = "specdecode:draft_head_update_pause_seconds"
"""Metrics about updates of the draft head, from the recorder (capture/recorder/head_metrics.py)."""

_CANARY_VERDICTS: Final = ("right", "wrong", "unconfirmed", "failed")

ANSWERED_REASONS: Final = ("stop", "length")
"""Finish reasons of answered requests; the other reasons are abort, error and repetition."""

_HTTP_REQUESTS: Final = "http_requests_total"
"""Responses by status class, from prometheus_fastapi_instrumentator (vllm/entrypoints/serve/instrumentator/metrics.py).

The same in all versions. /metrics and /health are not counted.
"""

_UNSET: Final = "None"
_WORD: Final = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_LABEL: Final = r'[a-zA-Z_]\w*+="[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SAMPLE: Final = re.compile(
    rf"[\w:]++[ \t]*+(?:\{{((?:{_LABEL}(?:,[ \t]*+|(?=\}})))*+)\}})?+[ \t]*+([^\s]++)(?:[ \t]++-?\d++)?+\s*+", re.ASCII
)
_NAMED_LABEL: Final = re.compile(r'(\w+)="([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.ASCII)


class UnreadableMetricsError(ValueError):
    """The text is not an engine's /metrics page, or holds an impossible number."""


class ExpositionError(UnreadableMetricsError):
    """The text is not in Prometheus format, or larger than an engine's page."""


@dataclass(frozen=True)
class Sample:
    """One sample; label values are not unescaped."""

    name: str
    labels: Mapping[str, str]
    value: float


_Samples = Mapping[str, list[Sample]]


@dataclass(frozen=True)
class Exposition:
    """Samples of the requested names, and the names that the page declares as gauges, even without a sample."""

    samples: list[Sample]
    gauges: frozenset[str]


def read_exposition(text: str, names: Collection[str]) -> Exposition:
    """Return the samples of these names.

    Raises ExpositionError if one of their lines is not in Prometheus format, or the page is larger than an engine's.
    """
    if text.count("\n") > _MAX_LINES:
        raise ExpositionError(_TOO_LARGE)
    known = {name: name for name in names}
    samples, gauges = [], set()
    lines = characters = 0
    for found in _lines_of(frozenset(known)).finditer(f"\n{text}") if known else ():
        line, name = found[0][1:], known[found[1]]
        lines, characters = lines + 1, characters + len(line)
        if lines > _MAX_READ_LINES or characters > _MAX_READ_CHARACTERS or len(line) > _MAX_LINE_CHARACTERS:
            raise ExpositionError(_TOO_LARGE)
        if not line.startswith("#"):
            samples.append(_sample(name, line))
        elif line.split()[3:] == ["gauge"]:
            gauges.add(name)
    return Exposition(samples, frozenset(gauges))


_TOO_LARGE: Final = "page exceeds the size of a vLLM metrics page; is this a vLLM endpoint?"


@lru_cache(maxsize=16)
def _lines_of(names: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern for all lines: one search of a page takes less than half the time of a match per line."""
    return re.compile(rf"\n(?:# TYPE )?({'|'.join(map(re.escape, sorted(names)))})(?![\w:]).*", re.ASCII)


def _sample(name: str, line: str) -> Sample:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        raise ExpositionError(f"not in Prometheus format: {shown(line)}")
    try:
        value = float(found[2])
    except ValueError as error:
        raise ExpositionError(f"not in Prometheus format: {name} is {shown(found[2])}") from error
    return Sample(name, dict(_NAMED_LABEL.findall(found[1] or "")), value)


@dataclass(frozen=True)
class SpeculationReading:
    """Speculation counters since the engine started, over all its ranks."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    """Accepted tokens by position in the proposal, first position first; length K."""

    @classmethod
    def total(cls, readings: Iterable["SpeculationReading"]) -> "SpeculationReading":
        """Sum the counters of several engines."""
        readings = list(readings)
        positions = zip_longest(*(reading.accepted_per_position for reading in readings), fillvalue=0)
        return cls(
            drafts=sum(reading.drafts for reading in readings),
            draft_tokens=sum(reading.draft_tokens for reading in readings),
            accepted_tokens=sum(reading.accepted_tokens for reading in readings),
            accepted_per_position=tuple(sum(position) for position in positions),
        )

    @property
    def acceptance_percent(self) -> int | None:
        """Accepted drafted tokens in percent; None before the first draft."""
        # Counters of a hostile engine may be inconsistent.
        return min(100, round(100 * self.accepted_tokens / self.draft_tokens)) if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Mean tokens per verification, the target's included (vllm/v1/spec_decode/metrics.py, SpecDecodingProm)."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def mean_draft_length(self) -> float | None:
        """Mean tokens per draft; None before the first draft."""
        return self.draft_tokens / self.drafts if self.drafts else None


@dataclass(frozen=True)
class CanaryReading:
    """Answers to canary prompts since an engine started, by verdict (capture/recorder/canary.py)."""

    right: int = 0
    wrong: int = 0
    unconfirmed: int = 0
    failed: int = 0
    wrong_prompts: int = 0
    """Number of prompts with a wrong answer."""
    unsupported: str | None = None
    """Reason why the engine rejects the questions; untrusted text."""

    @property
    def answers(self) -> int:
        """Answers that were judged."""
        return self.right + self.wrong + self.unconfirmed


HEAD_KEPT: Final = "kept"
HEAD_REVERTED: Final = "reverted"
"""Results of an update: the engine serves with the head; it had wrong answers with it, and serves with the earlier one.
Others are refused and failed."""


@dataclass(frozen=True)
class HeadUpdate:
    """Last update of the draft head since an engine started (capture/recorder/head_metrics.py); untrusted text."""

    sha256: str
    result: str
    reason: str
    pause_s: float


@dataclass(frozen=True)
class EngineReading:
    """Values of one scrape of one engine; None for each value that the engine does not report.

    With several data-parallel ranks behind one port, the KV cache is the smallest rank's, and the other values are
    sums.
    """

    num_gpu_blocks: int | None
    block_size: int | None
    kv_cache_tokens: int | None
    kv_cache_max_concurrency: float | None
    speculation: SpeculationReading | None
    """None without speculation: the engine then has no speculation counters."""
    generation_tokens: int
    requests_running: int
    requests_waiting: int
    changed_settings: frozenset[str] | None = None
    """Settings that the engine changed at its start, by the names in `CHANGED_SETTINGS`."""
    version: str | None = None
    decode_steps: int | None = None
    """Decode steps after the first token, summed over requests."""
    decode_seconds: float | None = None
    """Duration of these steps in seconds, summed over requests."""
    first_tokens: int | None = None
    """Requests that generated their first token."""
    canaries: CanaryReading | None = None
    """None if the engine was asked no canary prompt."""
    head_update: HeadUpdate | None = None
    """None if the engine has the head that it started with."""
    first_token_seconds: float | None = None
    """Time to the first token in seconds, summed over these requests."""
    prompt_tokens: int | None = None
    finished_requests: int | None = None
    answered_requests: int | None = None
    """Finished requests that ended with a stop or at the length limit."""
    server_errors: int | None = None
    """Responses with an HTTP status of 500 or more."""
    speculation_settings: Mapping[str, str] = field(default_factory=dict)
    """Speculative configuration that the engine logged at its start, by vLLM's keys."""
    startup_seconds: Mapping[str, float] = field(default_factory=dict)
    """Times of the start that the engine logged, by the phases in `STARTUP_TIMES`; the slowest rank's."""


@dataclass(frozen=True)
class Unreachable:
    """An engine without a reading, and the reason."""

    reason: str


Reading = EngineReading | Unreachable


def read_metrics(text: str, profile: EngineProfile) -> EngineReading:
    """Return the values of an engine's /metrics page; raise UnreadableMetricsError if it is not a vLLM page."""
    return reading_of(read_exposition(text, names_read(profile)), profile)


def reading_of(page: Exposition, profile: EngineProfile) -> EngineReading:
    """Return the values of a page that was parsed with the names of `names_read`, and possibly more.

    Raises UnreadableMetricsError if the page is not an engine's, or holds an impossible number.
    """
    names, asked = profile.metrics, names_read(profile)
    declared = page.gauges & {names.requests_running, names.requests_waiting}
    samples: defaultdict[str, list[Sample]] = defaultdict(list, {name: [] for name in declared})
    for sample in page.samples:
        if sample.name in asked:
            samples[sample.name].append(sample)
    if not samples.keys() - {_HTTP_REQUESTS}:
        raise UnreadableMetricsError(
            f"{names.generation_tokens} is missing: not a vLLM endpoint, or started with --disable-log-stats"
        )
    generated, speculation = _total(samples, names.generation_tokens), None
    if names.drafts in samples:
        accepted: defaultdict[int, int] = defaultdict(int)
        for sample in samples.get(names.accepted_tokens_per_position, []):
            position = int(_number(names.position_label, sample.labels.get(names.position_label, "")))
            accepted[position] += int(_checked(sample.name, sample.value))
        speculation = SpeculationReading(
            drafts=_total(samples, names.drafts),
            draft_tokens=_total(samples, names.draft_tokens),
            accepted_tokens=_total(samples, names.accepted_tokens),
            accepted_per_position=tuple(accepted[position] for position in sorted(accepted)),
        )
    cache = samples.get(names.cache_config, [])
    changed = {sample.labels.get(LABEL) for sample in samples.get(METRIC, []) if sample.value}
    finished = samples.get(names.finished_requests, [])
    answered = [each.value for each in finished if each.labels.get(names.finished_reason_label) in ANSWERED_REASONS]
    return EngineReading(
        num_gpu_blocks=_whole(_smallest(cache, names.num_gpu_blocks_label)),
        block_size=_whole(_smallest(cache, names.block_size_label)),
        kv_cache_tokens=_whole(_smallest(cache, names.kv_cache_tokens_label)),
        kv_cache_max_concurrency=_smallest(cache, names.kv_cache_max_concurrency_label),
        speculation=speculation,
        generation_tokens=generated,
        requests_running=_requests(samples, names.requests_running, generated),
        requests_waiting=_requests(samples, names.requests_waiting, generated),
        changed_settings=(
            frozenset(name for name in CHANGED_SETTINGS if name in changed) if METRIC in samples else None
        ),
        decode_steps=_total_if_any(samples, names.decode_steps),
        decode_seconds=_seconds_if_any(samples, names.decode_seconds),
        first_tokens=_total_if_any(samples, names.first_tokens),
        first_token_seconds=_seconds_if_any(samples, names.first_token_seconds),
        prompt_tokens=_total_if_any(samples, names.prompt_tokens),
        finished_requests=_total_if_any(samples, names.finished_requests),
        answered_requests=int(_sum(names.finished_requests, answered)) if finished else None,
        server_errors=_server_errors(samples),
        canaries=_canaries(samples),
        head_update=_head_update(samples),
        speculation_settings=_speculation_settings(samples.get(SPECULATION, [])),
        startup_seconds=_startup_seconds(samples.get(TIMES, [])),
    )


def names_read(profile: EngineProfile) -> frozenset[str]:
    """Return the metric names that `reading_of` needs."""
    names = profile.metrics
    return frozenset(
        (METRIC, SPECULATION, TIMES, CANARY_ANSWERS, CANARY_REFUSED, HEAD_UPDATE, HEAD_PAUSE, _HTTP_REQUESTS)
    ).union(
        (names.cache_config, names.drafts, names.draft_tokens, names.accepted_tokens),
        (names.accepted_tokens_per_position, names.generation_tokens, names.requests_running, names.requests_waiting),
        (names.decode_steps, names.decode_seconds, names.first_tokens),
        (names.first_token_seconds, names.prompt_tokens, names.finished_requests),
    )


def _server_errors(samples: _Samples) -> int | None:
    if _HTTP_REQUESTS not in samples:
        return None
    failed = [each.value for each in samples[_HTTP_REQUESTS] if each.labels.get("status", "").startswith("5")]
    return int(_sum(_HTTP_REQUESTS, failed))


def _canaries(samples: _Samples) -> CanaryReading | None:
    if not samples.get(CANARY_ANSWERS):
        return None
    counts: defaultdict[str, int] = defaultdict(int)
    wrong_prompts = set[str]()
    for sample in samples[CANARY_ANSWERS]:
        verdict, count = sample.labels.get("verdict", ""), int(_checked(sample.name, sample.value))
        counts[verdict] += count
        if verdict == "wrong" and count:
            wrong_prompts.add(sample.labels.get("prompt", ""))
    reasons = (each.labels.get("reason", "") for each in samples.get(CANARY_REFUSED, []) if each.value)
    return CanaryReading(
        **{verdict: int(_checked(CANARY_ANSWERS, counts[verdict])) for verdict in _CANARY_VERDICTS},
        wrong_prompts=len(wrong_prompts),
        unsupported=next(reasons, None),
    )


def _head_update(samples: _Samples) -> HeadUpdate | None:
    labels = next((each.labels for each in samples.get(HEAD_UPDATE, []) if each.value), None)
    if labels is None:
        return None
    pause_s = sum(_checked(each.name, each.value) for each in samples.get(HEAD_PAUSE, []))
    return HeadUpdate(labels.get("sha256", ""), labels.get("result", ""), labels.get("reason", ""), pause_s)


def _speculation_settings(samples: Iterable[Sample]) -> dict[str, str]:
    """Return the values of known keys, joined where ranks differ."""
    values: defaultdict[str, set[str]] = defaultdict(set)
    for sample in samples:
        key, value = sample.labels.get(KEY, ""), sample.labels.get(VALUE, "")
        if key in SPOKEN_KEYS and sample.value and _WORD.fullmatch(value):
            values[key].add(value)
    return {key: " or ".join(sorted(each)[:_MOST_SETTING_VALUES]) for key, each in values.items()}


def _startup_seconds(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the times of known phases, without times that no start takes: they are only shown."""
    times: dict[str, float] = {}
    for sample in samples:
        phase = sample.labels.get(PHASE, "")
        if phase in STARTUP_TIMES and 0 <= sample.value <= _LONGEST_START_S:
            times[phase] = max(times.get(phase, 0.0), sample.value)
    return times


def _requests(samples: _Samples, name: str, generated: int) -> int:
    """Return the sum over ranks of a gauge of requests; 0 if vLLM has declared it but not set it yet.

    With several API servers, metrics are in files (vllm/v1/metrics/prometheus.py), and prometheus_client declares such
    a gauge without a value until it is set (MultiProcessCollector, mostrecent). vLLM sets it in its first step.
    """
    return 0 if name in samples and not samples[name] and generated == 0 else _total(samples, name)


def _total(samples: _Samples, name: str) -> int:
    """Return the sum over ranks; raise an error for an absent metric, because 0 would be a false value."""
    if not samples.get(name):
        raise UnreadableMetricsError(f"{name} is missing")
    return int(_sum(name, (int(_checked(name, sample.value)) for sample in samples[name])))


def _total_if_any(samples: _Samples, name: str) -> int | None:
    return _total(samples, name) if samples.get(name) else None


def _seconds_if_any(samples: _Samples, name: str) -> float | None:
    found = samples.get(name)
    return _sum(name, (sample.value for sample in found)) if found else None


def _sum(name: str, values: Iterable[float]) -> float:
    return _checked(name, sum(_checked(name, value) for value in values))


def _smallest(samples: Iterable[Sample], label: str) -> float | None:
    """Return the smallest value over ranks of a numeric label of the cache's info metric."""
    texts = (sample.labels.get(label, _UNSET) for sample in samples)
    return min((_number(label, text) for text in texts if text != _UNSET), default=None)


def _number(label: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UnreadableMetricsError(f"label {label} is {text!r}, not a number") from error
    return _checked(label, value)


def _checked(name: str, value: float) -> float:
    if not 0 <= value <= _MAX_COUNTER:
        raise UnreadableMetricsError(f"{name} is {value}, which is impossible")
    return value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def answering_engines(readings: Mapping[str, Reading]) -> dict[str, EngineReading]:
    """Return the readings of engines that answered, by pod."""
    return {name: reading for name, reading in readings.items() if isinstance(reading, EngineReading)}
