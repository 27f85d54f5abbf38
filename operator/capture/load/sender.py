"""Sends requests and writes down what became of each."""

from dataclasses import dataclass

from specdecode_operator.api.capture_workload import Phase, TemperatureShare
from specdecode_operator.capture.files.formats import ClientRecord
from specdecode_operator.capture.load.client import CompletionRequest, EngineClient
from specdecode_operator.capture.load.client_log import ClientLog
from specdecode_operator.capture.load.exchange import Exchange
from specdecode_operator.capture.load.progress import Tally
from specdecode_operator.capture.load.prompts.prompt import Prompt
from specdecode_operator.capture.load.prompts.sources import PromptSource
from specdecode_operator.capture.load.prompts.temperatures import TemperatureMix
from specdecode_operator.capture.load.workload import WARMUP_PHASE, RunSettings


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What all requests of a run share."""

    client: EngineClient
    log: ClientLog
    zero_s: float  # on the monotonic clock

    def since_zero_ms(self, time_s: float) -> float:
        """Return a time of the monotonic clock as the files have it."""
        return _ms(time_s - self.zero_s)


@dataclass(frozen=True, kw_only=True)
class RunParts(Sending):
    """What all phases of a run share."""

    settings: RunSettings
    prompts: PromptSource


@dataclass(frozen=True)
class Turn:
    """Which turn of which conversation a request is; both count from 0."""

    session: int
    turn: int


@dataclass(frozen=True)
class Prepared:
    """A request made ready before its time."""

    phase: str
    index: int
    request: CompletionRequest
    wire: bytes
    turn: Turn | None = None


class Sender:
    """Sends requests and logs them."""

    def __init__(self, parts: Sending) -> None:
        self.tally = Tally()
        self._parts = parts

    async def send(self, prepared: Prepared, scheduled_s: float) -> Exchange:
        """Send a request at a time of the monotonic clock, or late; write down how it ended, and return that."""
        keep_answer = prepared.request.keep_answer
        exchange = await self._parts.client.send(prepared.wire, scheduled_s, keep_answer=keep_answer)
        if exchange.withdrawn:
            return exchange
        # A request that never left has the time when that was clear.
        sent_s = exchange.finished_s if exchange.sent_s is None else exchange.sent_s
        record = self._record(prepared, exchange, scheduled_s, sent_s)
        self._parts.log.add(sent_s, record)
        assert exchange.outcome is not None  # noqa: S101 - it has ended
        self.tally.add(exchange.outcome)
        return exchange

    def _record(self, prepared: Prepared, exchange: Exchange, scheduled_s: float, sent_s: float) -> ClientRecord:
        assert exchange.outcome is not None  # noqa: S101 - it has ended
        request, stream = prepared.request, exchange.stream
        first_s, last_s, tokens = stream.first_token_s, stream.last_token_s, request.prompt.tokens
        return ClientRecord(
            id=request.request_id,
            phase=prepared.phase,
            index=prepared.index,
            outcome=exchange.outcome,
            warmup=prepared.phase == WARMUP_PHASE,
            scheduled_ms=self._parts.since_zero_ms(scheduled_s),
            sent_ms=self._parts.since_zero_ms(sent_s),
            late_ms=_ms(sent_s - scheduled_s),
            first_token_ms=None if first_s is None else self._parts.since_zero_ms(first_s),
            last_token_ms=None if last_s is None else self._parts.since_zero_ms(last_s),
            finished_ms=self._parts.since_zero_ms(exchange.finished_s),
            ttft_ms=None if first_s is None else _ms(first_s - sent_s),
            latency_ms=None if last_s is None else _ms(last_s - sent_s),
            http_status=exchange.http_status,
            error=exchange.error,
            prompt_tokens=stream.prompt_tokens if tokens is None else tokens,
            max_tokens=request.max_tokens,
            completion_tokens=stream.completion_tokens,
            chunks=stream.chunks,
            temperature=request.temperature,
            session=None if prepared.turn is None else prepared.turn.session,
            turn=None if prepared.turn is None else prepared.turn.turn,
        )


class PhaseSender(Sender):
    """Makes the requests of one phase, too."""

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
        """Return a request of the phase, with the phase's own prompt unless one is given."""
        prompt = prompt or self.prompts.first(self._phase, index)
        request = CompletionRequest(
            request_id=f"{self._settings.capture}-{self._phase}-{index}",
            prompt=prompt,
            max_tokens=self.prompts.output_tokens(self._phase, index),
            temperature=self._temperatures.at(self._phase, index),
            # Random tokens have no end that means anything; an answer to a real question has.
            ignore_eos=not isinstance(prompt.content, str),
            keep_answer=turn is not None,
        )
        return Prepared(self._phase, index, request, self._parts.client.prepare(request), turn)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
