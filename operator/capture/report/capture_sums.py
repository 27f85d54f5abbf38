"""Add up the requests and steps of a capture in bounded memory, for charts.

Sums are by whole number, over time, or by size on a log scale.
"""

from array import array
from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.capture.files.formats import ClientRecord
from specdecode_operator.capture.files.totals import DraftTotals
from specdecode_operator.capture.files.trace_rules import StepLine
from specdecode_operator.capture.trace_reader import RecordedRequest

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_TIME_BINS: Final = 4096
_FIRST_WIDTH_MS: Final = 16.0
_FURTHEST_MS: Final = 1e15
"""30,000 years: a later timestamp is an error."""

_LEAST_MS: Final = 0.001
_PER_DECADE: Final = 500
"""Quantiles of a log histogram err by half a bin: 0.23 %."""
_DECADES: Final = 10
LOG_BINS: Final = _PER_DECADE * _DECADES


class ByNumber:
    """Sums by a whole number, such as the requests in a batch; all numbers above the largest count as it."""

    def __init__(self, largest: int, columns: int) -> None:
        self.sums: Floats = np.zeros((largest + 1, columns))

    def add(self, numbers: Integers, *columns: Floats | Integers) -> None:
        """Add the values that belong to some numbers."""
        length = len(self.sums)
        clipped = np.minimum(numbers, length - 1)
        for column, values in enumerate(columns):
            self.sums[:, column] += np.bincount(clipped, weights=values, minlength=length)


class ByTime:
    """Sums and maxima over time, in bins of one width, which doubles when there are too many."""

    def __init__(self, columns: int, most: int = MOST_TIME_BINS) -> None:
        self.width_ms = _FIRST_WIDTH_MS
        self._most = most
        self._keys: Integers = np.empty(0, dtype=np.int64)
        self.sums: Floats = np.empty((0, columns))  # a row per bin
        self.largest: Floats = np.empty((0, columns))

    def add(self, times_ms: Floats, *columns: Floats | Integers) -> None:
        """Add values by their timestamps; those beyond the longest run are left out."""
        sane = np.abs(times_ms) <= _FURTHEST_MS
        if not sane.any():
            return
        values = np.column_stack(columns).astype(np.float64)[sane]
        keys = np.floor(times_ms[sane] / self.width_ms).astype(np.int64)
        self._merge(
            np.concatenate((self._keys, keys)),
            np.concatenate((self.sums, values)),
            np.concatenate((self.largest, values)),
        )
        while len(self._keys) > self._most:
            self.width_ms *= 2
            self._merge(self._keys // 2, self.sums, self.largest)

    def _merge(self, keys: Integers, sums: Floats, largest: Floats) -> None:
        self._keys, places = np.unique(keys, return_inverse=True)
        columns = range(sums.shape[1])
        self.sums = np.column_stack([np.bincount(places, weights=sums[:, column]) for column in columns])
        self.largest = np.full(self.sums.shape, -np.inf)
        np.maximum.at(self.largest, places, largest)

    def coarser(self, most: int) -> "ByTime":
        """Return the same in fewer, wider bins."""
        found = ByTime(self.sums.shape[1], most)
        found.width_ms, found._keys = self.width_ms, self._keys
        found.sums, found.largest = self.sums, self.largest
        # By the span, not by the number of bins: a picture shows all of it.
        while len(found._keys) and found._keys[-1] - found._keys[0] >= most:
            found.width_ms *= 2
            found._merge(found._keys // 2, found.sums, found.largest)
        return found

    @property
    def times_ms(self) -> Floats:
        """The middle of each bin with values."""
        return np.asarray((self._keys + 0.5) * self.width_ms, dtype=np.float64)


def log_bin(values_ms: Floats) -> Integers:
    """Return the bin of each duration on a log scale."""
    logs = np.log10(np.maximum(values_ms, _LEAST_MS) / _LEAST_MS)
    return np.asarray(np.minimum(logs * _PER_DECADE, LOG_BINS - 1), dtype=np.int64)


def log_quantile(counts: Floats, share: float) -> float:
    """Return the duration that a share of all counted ones does not exceed, in ms."""
    cumulated = np.cumsum(counts)
    place = int(np.searchsorted(cumulated, share * cumulated[-1]))
    return float(_LEAST_MS * 10 ** ((min(place, LOG_BINS - 1) + 0.5) / _PER_DECADE))


_LONGEST_MS: Final = 86_400_000.0
"""A day: a longer time to the first token is an error."""


class ClientSums:
    """TTFT of whole answers over HTTP, and outcomes of all requests, without warm-up."""

    def __init__(self) -> None:
        self.ttft_ms = array("d")
        self.outcomes: Counter[str] = Counter()

    def add(self, record: ClientRecord) -> None:
        """Add a request."""
        if record.warmup:
            return
        self.outcomes[record.outcome] += 1
        if record.outcome == "completed" and record.ttft_ms is not None and 0 <= record.ttft_ms <= _LONGEST_MS:
            self.ttft_ms.append(record.ttft_ms)


LARGEST_BURST: Final = 256
"""Larger bursts count as this size."""

CONTEXT_BINS: Final = 128
CONTEXT_BINS_PER_OCTAVE: Final = 4
_BATCH_GAPS: Final = 200_000
"""Bursts that are added together, which pays for the overhead of array arithmetic."""

_MOST_PHASES: Final = 64
_MOST_TEMPERATURES: Final = 16
_HOTTEST: Final = 8.0
"""Far above any temperature in use."""
_OTHER: Final = "(others)"


class RequestSums:
    """Every request's own figures in columns, and its bursts in sums.

    A burst is the tokens that one step gave one request: each chunk but the first, which prefill gives.
    """

    def __init__(self) -> None:
        self.arrival_ms, self.scheduled_ms = array("d"), array("d")  # nan where unknown
        self.ttft_ms, self.decode_ms, self.tpot_ms = array("d"), array("d"), array("d")  # tpot: nan of one token
        self.prompt_tokens, self.output_tokens, self.preemptions = array("q"), array("q"), array("q")
        self.concurrency, self.phase = array("q"), array("q")
        self.phases: dict[str | None, int] = {}
        self.bursts: Integers = np.zeros(LARGEST_BURST + 1, dtype=np.int64)
        self.gaps: Integers = np.zeros((LARGEST_BURST + 1, LOG_BINS), dtype=np.int64)  # by burst and length
        self.by_context = ByNumber(CONTEXT_BINS - 1, 2)  # bursts, tokens; by bins of `context_tokens`
        self.by_temperature: dict[float, tuple[int, int]] = {}  # bursts, tokens; without the last one of a request
        self.temperatures: Counter[float | None] = Counter()  # requests; None: further temperatures
        self.by_time = ByTime(2)  # bursts, tokens
        self._pending: list[RecordedRequest] = []
        self._pending_gaps = 0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.ttft_ms)

    def add(self, request: RecordedRequest) -> None:
        """Add a request."""
        decode_ms, output_tokens = sum(request.gaps_ms), sum(request.chunk_tokens)
        self.arrival_ms.append(_or_nan(request.arrival_ms))
        self.scheduled_ms.append(_or_nan(request.scheduled_ms))
        self.ttft_ms.append(request.ttft_ms)
        self.decode_ms.append(decode_ms)
        self.tpot_ms.append(decode_ms / (output_tokens - 1) if output_tokens > 1 else float("nan"))
        for column, value in (
            (self.prompt_tokens, request.prompt_tokens),
            (self.output_tokens, output_tokens),
            (self.preemptions, request.preemptions),
            (self.concurrency, request.concurrency),
        ):
            column.append(max(-(2**62), min(value, 2**62)))
        name = request.phase if request.phase in self.phases or len(self.phases) < _MOST_PHASES else _OTHER
        self.phase.append(self.phases.setdefault(name, len(self.phases)))
        if request.temperature is not None:
            named = request.temperature in self.temperatures or len(self.temperatures) < _MOST_TEMPERATURES
            self.temperatures[request.temperature if named else None] += 1
        at, inner = request.temperature, request.chunk_tokens[1:-1]  # the answer's end may cut the last burst short
        known = at in self.by_temperature or len(self.by_temperature) < _MOST_TEMPERATURES
        if at is not None and inner and 0 <= at <= _HOTTEST and known:
            bursts, tokens = self.by_temperature.get(at, (0, 0))
            self.by_temperature[at] = bursts + len(inner), tokens + sum(inner)
        self._pending.append(request)
        self._pending_gaps += len(request.gaps_ms)
        if self._pending_gaps >= _BATCH_GAPS:
            self.flush()

    def flush(self) -> None:
        """Add pending requests to the sums; call it after the last request."""
        pending, self._pending, self._pending_gaps = [each for each in self._pending if each.gaps_ms], [], 0
        if not pending:
            return
        lengths = np.array([len(each.gaps_ms) for each in pending])
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        gaps_ms = np.concatenate([np.asarray(each.gaps_ms, dtype=np.float64) for each in pending])
        chunks = np.concatenate([np.asarray(each.chunk_tokens, dtype=np.int64) for each in pending])
        firsts = np.cumsum(lengths + 1) - lengths - 1
        bursts = np.delete(chunks, firsts)
        ones = np.ones(len(bursts))
        sizes = np.minimum(bursts, LARGEST_BURST)
        self.bursts += np.bincount(sizes, minlength=LARGEST_BURST + 1)
        np.add.at(self.gaps, (sizes, log_bin(gaps_ms)), 1)
        # Tokens before each burst: the prompt, and the output so far.
        earlier = np.concatenate(([0], np.cumsum(bursts)))
        prompts = np.array([each.prompt_tokens for each in pending])
        before = np.repeat(prompts + chunks[firsts], lengths) + earlier[:-1] - earlier[starts]
        bins = np.minimum(np.log2(np.maximum(before, 1)) * CONTEXT_BINS_PER_OCTAVE, CONTEXT_BINS - 1)
        self.by_context.add(np.asarray(bins, dtype=np.int64), ones, bursts)
        elapsed_ms = np.cumsum(gaps_ms)
        elapsed_ms -= np.concatenate(([0.0], elapsed_ms))[starts]
        first_ms = np.array([_or_nan(each.arrival_ms) + each.ttft_ms for each in pending])
        self.by_time.add(np.repeat(first_ms, lengths) + elapsed_ms, ones, bursts)

    @property
    def mean_burst(self) -> float:
        """Tokens of a burst on average; nan without one."""
        steps = self.bursts.sum()
        return float(np.arange(len(self.bursts)) @ self.bursts / steps) if steps else float("nan")


def context_tokens(bins: Integers) -> Floats:
    """Return the middle of bins of context lengths."""
    return np.asarray(2 ** ((bins + 0.5) / CONTEXT_BINS_PER_OCTAVE))


def _or_nan(value_ms: float | None) -> float:
    return float("nan") if value_ms is None else value_ms


_LARGEST_BATCH: Final = 8192
MOST_POSITIONS: Final = 256
_BATCH_STEPS: Final = 20_000


class StepSums(DraftTotals):
    """Sums over all steps of all engines."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.by_running = ByNumber(_LARGEST_BATCH, 2)  # draft tokens, accepted tokens
        # Steps, draft tokens, accepted tokens, KV cache usage, running, waiting, preempted.
        self.by_time = ByTime(7)
        self._pending: list[tuple[float, ...]] = []

    def add(self, line: StepLine) -> None:
        """Add a step."""
        scheduler = line.scheduler
        drafting = scheduler.spec_decoding_stats
        drafted, accepted = (drafting.num_draft_tokens, drafting.num_accepted_tokens) if drafting else (0, 0)
        self.steps += 1
        if drafting is not None and drafted:
            self.add_drafts(drafting, MOST_POSITIONS)
        running, waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
        usage = max(0.0, min(scheduler.kv_cache_usage, 1.0))
        preempted = scheduler.prefix_cache_stats.preempted_requests
        self._pending.append((line.ts_ms, drafted, accepted, usage, running, waiting, preempted))
        if len(self._pending) >= _BATCH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Add pending steps to the sums; call it after the last step."""
        if not self._pending:
            return
        rows = np.array(self._pending, dtype=np.float64)
        self._pending = []
        times_ms, drafted, accepted, usage, running, waiting, preempted = rows.T
        self.by_time.add(times_ms, np.ones(len(rows)), drafted, accepted, usage, running, waiting, preempted)
        self.by_running.add(np.minimum(running, _LARGEST_BATCH).astype(np.int64), drafted, accepted)
