"""Read a vLLM engine's /metrics page: requests, KV cache, speculation and changed settings.

`read_exposition` parses only the requested samples, in time linear in the page. prometheus_client's parser takes
0.2 to 0.4 µs per character, half a second for the largest page that a hostile engine may send.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import Final

from specdecode_operator.problems import shown
from specdecode_operator.vllm.logging_config import CHANGED_SETTINGS
from specdecode_operator.vllm.profiles import EngineProfile, MetricNames
from specdecode_operator.vllm.settings_watch import KEY, LABEL, METRIC, SPECULATION, VALUE
from specdecode_operator.vllm.speculative_config import SPOKEN_KEYS

_MOST_LINES: Final = 40_000
"""Of a page: with 64 data-parallel ranks, as many as are served, vLLM 0.33 has some 30,000 (378 series a rank, and
when each was made)."""
_MOST_READ_LINES: Final = 8_000
"""Of these, with the names that are asked for: a rank has 66, and one for each of up to 32 draft positions."""
_MOST_READ_CHARACTERS: Final = 2**20
"""In these: 64 ranks have some 750,000."""
_LONGEST_LINE: Final = 8 * 1024
"""Of those that are read; that of the cache's configuration has 1,100."""

_LABEL: Final = r'[a-zA-Z_]\w*+="[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SAMPLE: Final = re.compile(
    rf"[\w:]++[ \t]*+(?:\{{((?:{_LABEL}(?:,[ \t]*+|(?=\}})))*+)\}})?+[ \t]*+([^\s]++)(?:[ \t]++-?\d++)?+\s*+", re.ASCII
)
_NAMED_LABEL: Final = re.compile(r'(\w+)="([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.ASCII)


class ExpositionError(ValueError):
    """The text is not what an engine's /metrics says."""


@dataclass(frozen=True)
class Sample:
    """One line; labels are as they stand there, nothing is unescaped."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Exposition:
    """What a page says under the names that are asked for."""

    samples: list[Sample]
    gauges: frozenset[str]


def read_exposition(text: str, names: Collection[str]) -> Exposition:
    """Return the samples of these names.

    Raises
    ------
    ExpositionError
        A line of them is not in Prometheus format, or there is more than engines say.
    """
    known = {name: name for name in names}
    samples, gauges = [], set()
    for name, line in _asked(text, frozenset(known)) if known else ():
        if not line.startswith("#"):
            samples.append(_sample(known[name], line))
        elif line.split()[3:] == ["gauge"]:
            gauges.add(known[name])
    return Exposition(samples, frozenset(gauges))


def _asked(text: str, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    if text.count("\n") > _MOST_LINES:
        raise ExpositionError("more is said than an engine has to say: this is not vLLM")
    lines = characters = 0
    for found in _lines_of(names).finditer(f"\n{text}"):
        line = found[0][1:]
        lines, characters = lines + 1, characters + len(line)
        if lines > _MOST_READ_LINES or characters > _MOST_READ_CHARACTERS or len(line) > _LONGEST_LINE:
            raise ExpositionError("more is said than an engine has to say: this is not vLLM")
        yield found[1], line


@lru_cache(maxsize=16)
def _lines_of(names: frozenset[str]) -> re.Pattern[str]:
    """Return what finds their lines: one search through a page takes less than half of the time of one a line."""
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


_UNSET = "None"
"""How vLLM writes a setting that has no value, as a label."""

_WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_MOST_VALUES = 3
"""Of one setting: ranks of an engine are configured alike, and pods may say anything."""

_Samples = Mapping[str, list[Sample]]


class UnreadableMetricsError(ValueError):
    """The text is not what an engine's /metrics says."""


@dataclass(frozen=True)
class SpeculationReading:
    """Speculation counters since the engine started, over all its ranks."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    """The same by place in the proposal, first place first; K long."""

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
        """Accepted share of the drafted tokens; None before the first draft."""
        if self.draft_tokens == 0:
            return None
        # Counters of a hostile engine need not fit each other, and the API server takes no number of any size.
        return min(100, round(100 * self.accepted_tokens / self.draft_tokens))

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens emitted a verification on average; None before the first.

        1 + accepted / drafts, the 1 being the target's own token
        (vllm/v1/spec_decode/metrics.py SpecDecodingProm).
        """
        if self.drafts == 0:
            return None
        return 1 + self.accepted_tokens / self.drafts

    @property
    def mean_draft_length(self) -> float | None:
        """Tokens of a draft on average; None before the first."""
        return self.draft_tokens / self.drafts if self.drafts else None


@dataclass(frozen=True)
class EngineReading:
    """What one scrape of one engine says.

    With several data-parallel ranks behind one port, the KV cache is that of
    the smallest rank, and the rest are sums.
    """

    # What the engine allocated; None where it does not say.
    num_gpu_blocks: int | None
    block_size: int | None
    kv_cache_tokens: int | None
    kv_cache_max_concurrency: float | None
    speculation: SpeculationReading | None
    """None where the engine does not speculate: it then has no such counters."""
    generation_tokens: int
    """Since the engine started."""
    requests_running: int
    requests_waiting: int
    changed_settings: frozenset[str] | None = None
    """What the engine changed by itself at its start, by the names that are known; None where it does not say."""
    version: str | None = None
    """As the engine says it at /version; None where it does not."""
    decode_steps: int | None = None
    """Steps of single requests after their first token; None where the engine does not say."""
    decode_seconds: float | None = None
    """Time that these took, of all requests together."""
    first_tokens: int | None = None
    """Of the generated tokens, those that were a request's first."""
    speculation_settings: Mapping[str, str] = field(default_factory=dict)
    """How the engine said at its start that it speculates, by vLLM's keys; empty where it does not say."""


@dataclass(frozen=True)
class Unreachable:
    """An engine that gave no reading, and why."""

    reason: str


Reading = EngineReading | Unreachable


def read_metrics(text: str, profile: EngineProfile) -> EngineReading:
    """Return what the text of an engine's /metrics says.

    Raises
    ------
    UnreadableMetricsError
        It is not in Prometheus format, not an engine's, or holds a number that cannot be.
    """
    try:
        page = read_exposition(text, names_read(profile))
    except ExpositionError as error:
        raise UnreadableMetricsError(str(error)) from error
    return reading_of(page, profile)


def reading_of(page: Exposition, profile: EngineProfile) -> EngineReading:
    """Return what a page says that was read under `names_read`, and maybe under other names, too.

    Raises
    ------
    UnreadableMetricsError
        It is not an engine's, or holds a number that cannot be.
    """
    names = profile.metrics
    samples = _by_name(page, profile)
    if not samples:
        msg = f"{names.generation_tokens} and all like it are missing: this is not vLLM, or it has --disable-log-stats"
        raise UnreadableMetricsError(msg)
    concurrency = _smallest_label(samples, names, names.kv_cache_max_concurrency_label)
    generated = _total(samples, names.generation_tokens)
    return EngineReading(
        num_gpu_blocks=_whole(_smallest_label(samples, names, names.num_gpu_blocks_label)),
        block_size=_whole(_smallest_label(samples, names, names.block_size_label)),
        kv_cache_tokens=_whole(_smallest_label(samples, names, names.kv_cache_tokens_label)),
        kv_cache_max_concurrency=concurrency,
        speculation=_speculation(samples, names),
        generation_tokens=generated,
        requests_running=_requests(samples, names.requests_running, generated),
        requests_waiting=_requests(samples, names.requests_waiting, generated),
        changed_settings=_changed_settings(samples),
        decode_steps=_total(samples, names.decode_steps) if samples.get(names.decode_steps) else None,
        decode_seconds=_seconds(samples, names.decode_seconds),
        first_tokens=_total(samples, names.first_tokens) if samples.get(names.first_tokens) else None,
        speculation_settings=_speculation_settings(samples),
    )


def names_read(profile: EngineProfile) -> frozenset[str]:
    """Return the names under which a reading looks."""
    names = profile.metrics
    return frozenset((METRIC, SPECULATION)).union(
        (names.cache_config, names.drafts, names.draft_tokens, names.accepted_tokens),
        (names.accepted_tokens_per_position, names.generation_tokens, names.requests_running, names.requests_waiting),
        (names.decode_steps, names.decode_seconds, names.first_tokens),
    )


def _by_name(page: Exposition, profile: EngineProfile) -> _Samples:
    names, asked = profile.metrics, names_read(profile)
    declared = page.gauges & {names.requests_running, names.requests_waiting}
    samples: defaultdict[str, list[Sample]] = defaultdict(list, {name: [] for name in declared})
    for sample in page.samples:
        if sample.name in asked:
            samples[sample.name].append(sample)
    return samples


def _speculation(samples: _Samples, names: MetricNames) -> SpeculationReading | None:
    if names.drafts not in samples:
        return None
    return SpeculationReading(
        drafts=_total(samples, names.drafts),
        draft_tokens=_total(samples, names.draft_tokens),
        accepted_tokens=_total(samples, names.accepted_tokens),
        accepted_per_position=_per_position(samples, names),
    )


def _per_position(samples: _Samples, names: MetricNames) -> tuple[int, ...]:
    accepted: defaultdict[int, int] = defaultdict(int)
    for sample in samples.get(names.accepted_tokens_per_position, []):
        position = _whole(_number(names.position_label, sample.labels.get(names.position_label, "")))
        accepted[position or 0] += _count(sample)
    return tuple(accepted[position] for position in sorted(accepted))


def _changed_settings(samples: _Samples) -> frozenset[str] | None:
    if METRIC not in samples:
        return None
    said = {sample.labels.get(LABEL) for sample in samples[METRIC] if sample.value}
    return frozenset(name for name in CHANGED_SETTINGS if name in said)


def _speculation_settings(samples: _Samples) -> dict[str, str]:
    said: defaultdict[str, set[str]] = defaultdict(set)
    for sample in samples.get(SPECULATION, []):
        key, value = sample.labels.get(KEY, ""), sample.labels.get(VALUE, "")
        if key in SPOKEN_KEYS and sample.value and _WORD.fullmatch(value):
            said[key].add(value)
    return {key: " or ".join(sorted(values)[:_MOST_VALUES]) for key, values in said.items()}


def _requests(samples: _Samples, name: str, generated: int) -> int:
    """Return the sum over ranks of a gauge of requests, which is 0 before the first of them.

    Several API servers count in files (vllm/v1/metrics/prometheus.py), and prometheus_client declares a gauge of such
    files without a value until somebody sets it (MultiProcessCollector, mostrecent). vLLM does so with its first step.
    """
    if name in samples and not samples[name] and generated == 0:
        return 0
    return _total(samples, name)


def _total(samples: _Samples, name: str) -> int:
    """Return the sum over ranks; an absent metric is an error, because 0 would be a claim."""
    if not samples.get(name):
        msg = f"{name} is missing"
        raise UnreadableMetricsError(msg)
    return int(_checked(name, sum(_count(sample) for sample in samples[name])))


def _seconds(samples: _Samples, name: str) -> float | None:
    if not samples.get(name):
        return None
    return _checked(name, sum(_checked(name, sample.value) for sample in samples[name]))


def _count(sample: Sample) -> int:
    return int(_checked(sample.name, sample.value))


def _smallest_label(samples: _Samples, names: MetricNames, label: str) -> float | None:
    texts = [sample.labels.get(label, _UNSET) for sample in samples.get(names.cache_config, [])]
    return min((_number(label, text) for text in texts if text != _UNSET), default=None)


def _number(label: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        msg = f"label {label} is {text!r}, not a number"
        raise UnreadableMetricsError(msg) from error
    return _checked(label, value)


_LARGEST = 2**53
"""Beyond it a floating-point counter no longer counts, and the API server takes no such number either."""


def _checked(name: str, value: float) -> float:
    if not 0 <= value <= _LARGEST:
        msg = f"{name} is {value}, which cannot be"
        raise UnreadableMetricsError(msg)
    return value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def answering_engines(readings: Mapping[str, Reading]) -> dict[str, EngineReading]:
    """Return the readings of engines that answered, by pod."""
    return {name: reading for name, reading in readings.items() if isinstance(reading, EngineReading)}
