"""What a trace comes to: a row a request, and sums over all their bursts."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specdecode_operator.pictures.seen.sums import LOG_BINS, ByNumber, ByTime, Floats, Integers, log_bin
from specdecode_operator.replay.recording.recording import RecordedRequest

LARGEST_BURST: Final = 256
"""Tokens of a burst that are told apart: more are counted as so many."""

CONTEXT_BINS: Final = 128
CONTEXT_BINS_PER_OCTAVE: Final = 4
_BATCH_GAPS: Final = 200_000
"""Bursts that are added at once: arithmetic on arrays is worth its start."""

_MOST_PHASES: Final = 64
_MOST_TEMPERATURES: Final = 16
_HOTTEST: Final = 8.0
"""Far above what anybody samples at."""
_OTHER: Final = "(others)"


class RequestSums:
    """Every request's own figures in columns, and its bursts in sums.

    A burst is what one step gave one request: all chunks but the first, which prefill gives.
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
        self.by_time = ByTime(2)  # bursts, tokens
        self._pending: list[RecordedRequest] = []
        self._pending_gaps = 0

    def __len__(self) -> int:
        """Return how many requests there are."""
        return len(self.ttft_ms)

    def add(self, request: RecordedRequest) -> None:
        """Take a request in."""
        decode_ms, output_tokens = sum(request.gaps_ms), sum(request.chunk_tokens)
        self.arrival_ms.append(_moment(request.arrival_ms))
        self.scheduled_ms.append(_moment(request.scheduled_ms))
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
        self._add_temperature(request)
        self._pending.append(request)
        self._pending_gaps += len(request.gaps_ms)
        if self._pending_gaps >= _BATCH_GAPS:
            self.flush()

    def _add_temperature(self, request: RecordedRequest) -> None:
        """Add the bursts of a request but its last one, which the end of the answer may cut short."""
        at, inner = request.temperature, request.chunk_tokens[1:-1]
        if at is None or not inner or not 0 <= at <= _HOTTEST:
            return
        if at not in self.by_temperature and len(self.by_temperature) == _MOST_TEMPERATURES:
            return
        bursts, tokens = self.by_temperature.get(at, (0, 0))
        self.by_temperature[at] = bursts + len(inner), tokens + sum(inner)

    def flush(self) -> None:
        """Add what waits to the sums: to be called once all requests are in."""
        pending, self._pending, self._pending_gaps = [each for each in self._pending if each.gaps_ms], [], 0
        if not pending:
            return
        lengths = np.array([len(each.gaps_ms) for each in pending])
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        gaps_ms = _joined((each.gaps_ms for each in pending), np.float64)
        chunks = _joined((each.chunk_tokens for each in pending), np.int64)
        firsts = np.cumsum(lengths + 1) - lengths - 1
        bursts = np.delete(chunks, firsts)
        ones = np.ones(len(bursts))
        sizes = np.minimum(bursts, LARGEST_BURST)
        self.bursts += np.bincount(sizes, minlength=LARGEST_BURST + 1)
        np.add.at(self.gaps, (sizes, log_bin(gaps_ms)), 1)
        self.by_context.add(_context_bin(_before(pending, lengths, starts, chunks[firsts], bursts)), ones, bursts)
        elapsed_ms = np.cumsum(gaps_ms)
        elapsed_ms -= np.concatenate(([0.0], elapsed_ms))[starts]
        first_ms = np.array([_moment(each.arrival_ms) + each.ttft_ms for each in pending])
        self.by_time.add(np.repeat(first_ms, lengths) + elapsed_ms, ones, bursts)

    @property
    def mean_burst(self) -> float:
        """Tokens of a burst on average; nan without one."""
        steps = self.bursts.sum()
        return float(np.arange(len(self.bursts)) @ self.bursts / steps) if steps else float("nan")


def context_tokens(bins: Integers) -> Floats:
    """Return the middle of bins of context lengths."""
    return np.asarray(2 ** ((bins + 0.5) / CONTEXT_BINS_PER_OCTAVE))


def _context_bin(tokens: Integers) -> Integers:
    logs = np.log2(np.maximum(tokens, 1)) * CONTEXT_BINS_PER_OCTAVE
    return np.asarray(np.minimum(logs, CONTEXT_BINS - 1), dtype=np.int64)


def _before(
    pending: list[RecordedRequest], lengths: Integers, starts: Integers, first_tokens: Integers, bursts: Integers
) -> Integers:
    """Return the tokens that each burst came after: the prompt, and the output so far."""
    earlier = np.concatenate(([0], np.cumsum(bursts)))
    prompts = np.array([each.prompt_tokens for each in pending])
    return np.asarray(np.repeat(prompts + first_tokens, lengths) + earlier[:-1] - earlier[starts])


def _moment(value_ms: float | None) -> float:
    return float("nan") if value_ms is None else value_ms


def _joined(arrays: Iterable[Sequence[float]], kind: type[np.int64 | np.float64]) -> NDArray[Any]:
    return np.concatenate([np.asarray(each, dtype=kind) for each in arrays])
