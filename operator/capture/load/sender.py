"""Send the requests of a phase and log each in client.jsonl with its times and outcome."""

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path
from queue import SimpleQueue
from random import Random

from specdecode_operator.api.capture import Phase, TemperatureShare
from specdecode_operator.capture.files.formats import CLIENT, PART_SUFFIX, ClientRecord, Outcome, encode
from specdecode_operator.capture.load.engine_client import CompletionRequest, EngineClient, Exchange
from specdecode_operator.capture.load.prompts import Prompt, PromptSource
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE, RunSettings


class TemperatureMix:
    """Temperatures of the requests.

    The shares hold exactly in every block of requests, not only on average. A block is as short as the shares allow,
    and shuffled by the seed.
    """

    def __init__(self, shares: Sequence[TemperatureShare], seed: int) -> None:
        unit = gcd(*(share.share_percent for share in shares))
        self._block = [float(share.temperature) for share in shares for _ in range(share.share_percent // unit)]
        self._seed = seed
        self._shuffled = lru_cache(maxsize=64)(self._shuffle)

    def at(self, phase: str, index: int) -> float:
        """Return the temperature of a request."""
        number, place = divmod(index, len(self._block))
        return self._shuffled(phase, number)[place]

    def _shuffle(self, phase: str, number: int) -> list[float]:
        block = list(self._block)
        Random(f"{self._seed}/{phase}/{number}/temperatures").shuffle(block)  # noqa: S311 - not for secrets
        return block


class ClientLog:
    """Writer of the attempt's client.jsonl.part.

    A line is written when its request ends, so a crash loses no ended request. `close` sorts the lines by send time.
    A thread writes, because a slow volume must not delay the schedule. If a line cannot be written, the thread calls
    ``on_failure`` with the reason and drops all further lines.
    """

    def __init__(self, folder: Path, on_failure: Callable[[str], None]) -> None:
        self.path = folder / (CLIENT + PART_SUFFIX)
        self._on_failure = on_failure
        self._lines: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
        self._places: list[tuple[float, int, int]] = []  # send time, offset in the file, length
        self._failure: str | None = None
        self._file = self.path.open("xb", buffering=0)
        self._thread = threading.Thread(target=self._write_all, name="client-log", daemon=True)
        self._thread.start()

    def add(self, sent_s: float, record: ClientRecord) -> None:
        """Write the line of an ended request."""
        self._lines.put((sent_s, encode(record) + b"\n"))

    async def close(self) -> None:
        """Write the remaining lines, sort the file by send time and flush it to disk."""
        self._lines.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._failure is not None:
            raise OSError(self._failure)
        await asyncio.to_thread(self._sort)

    def _write_all(self) -> None:
        with self._file:
            try:
                while (item := self._lines.get()) is not None:
                    self._append(*item)
                os.fsync(self._file.fileno())
            except OSError as error:
                self._failure = f"{self.path}: {error.strerror}"
                self._on_failure(self._failure)

    def _append(self, sent_s: float, line: bytes) -> None:
        offset = self._file.tell()
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, "the volume took only part of a line")
        self._places.append((sent_s, offset, len(line)))

    def _sort(self) -> None:
        sorted_path = self.path.with_name(f"{self.path.name}.sorted")
        try:
            with self.path.open("rb") as source, sorted_path.open("wb") as target:
                for _, offset, length in sorted(self._places):
                    source.seek(offset)
                    target.write(source.read(length))
                target.flush()
                os.fsync(target.fileno())
            sorted_path.replace(self.path)
        finally:
            sorted_path.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Sending:
    """State that all requests of a run share."""

    client: EngineClient
    log: ClientLog
    zero_s: float  # on the monotonic clock

    def since_zero_ms(self, time_s: float) -> float:
        """Convert a time of the monotonic clock to ms since the run's zero."""
        return _ms(time_s - self.zero_s)


@dataclass(frozen=True, kw_only=True)
class RunParts(Sending):
    """State that all phases of a run share."""

    settings: RunSettings
    prompts: PromptSource


@dataclass(frozen=True)
class Turn:
    """Turn of a conversation; both numbers count from 0."""

    session: int
    turn: int


@dataclass(frozen=True)
class Prepared:
    """A request that is encoded before its time."""

    phase: str
    index: int
    request: CompletionRequest
    wire: bytes
    turn: Turn | None = None


class Sender:
    """Sends requests and logs them."""

    def __init__(self, parts: Sending) -> None:
        self.tally: Counter[Outcome] = Counter()
        self._parts = parts

    async def send(self, prepared: Prepared, scheduled_s: float) -> Exchange:
        """Send a request at a monotonic time, or immediately if it is late; log and return the exchange."""
        request, parts = prepared.request, self._parts
        exchange = await parts.client.send(prepared.wire, scheduled_s, keep_answer=request.keep_answer)
        if exchange.withdrawn:
            return exchange
        assert exchange.outcome is not None  # noqa: S101 - it has ended
        # A request that was never sent gets the time at which that was known.
        sent_s = exchange.finished_s if exchange.sent_s is None else exchange.sent_s
        stream, turn, tokens = exchange.stream, prepared.turn, request.prompt.tokens
        first_s, last_s = stream.first_token_s, stream.last_token_s
        record = ClientRecord(
            id=request.request_id,
            phase=prepared.phase,
            index=prepared.index,
            outcome=exchange.outcome,
            warmup=prepared.phase == WARMUP_PHASE,
            scheduled_ms=parts.since_zero_ms(scheduled_s),
            sent_ms=parts.since_zero_ms(sent_s),
            late_ms=_ms(sent_s - scheduled_s),
            first_token_ms=None if first_s is None else parts.since_zero_ms(first_s),
            last_token_ms=None if last_s is None else parts.since_zero_ms(last_s),
            finished_ms=parts.since_zero_ms(exchange.finished_s),
            ttft_ms=None if first_s is None else _ms(first_s - sent_s),
            latency_ms=None if last_s is None else _ms(last_s - sent_s),
            http_status=exchange.http_status,
            error=exchange.error,
            prompt_tokens=stream.prompt_tokens if tokens is None else tokens,
            max_tokens=request.max_tokens,
            completion_tokens=stream.completion_tokens,
            chunks=stream.chunks,
            temperature=request.temperature,
            session=None if turn is None else turn.session,
            turn=None if turn is None else turn.turn,
        )
        parts.log.add(sent_s, record)
        self.tally[exchange.outcome] += 1
        return exchange


class PhaseSender(Sender):
    """Sender that also makes the requests of one phase."""

    def __init__(self, phase: Phase, parts: RunParts) -> None:
        super().__init__(parts)
        self.prompts = parts.prompts
        self._phase = phase.name
        self._settings = parts.settings
        shares = parts.settings.workload.temperatures
        if phase.temperature is not None:
            shares = [TemperatureShare(temperature=phase.temperature, share_percent=100)]
        self._temperatures = TemperatureMix(shares, parts.settings.seed)

    def prepare(self, index: int, prompt: Prompt | None = None, turn: Turn | None = None) -> Prepared:
        """Return a request of the phase, with the given prompt or the phase's own."""
        prompt = prompt or self.prompts.first(self._phase, index)
        request = CompletionRequest(
            request_id=f"{self._settings.capture}-{self._phase}-{index}",
            prompt=prompt,
            max_tokens=self.prompts.output_tokens(self._phase, index),
            temperature=self._temperatures.at(self._phase, index),
            ignore_eos=self.prompts.ignore_eos,
            keep_answer=turn is not None,
        )
        return Prepared(self._phase, index, request, self._parts.client.prepare(request), turn)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
