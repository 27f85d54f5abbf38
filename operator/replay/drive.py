"""Send recorded requests to a server again at their recorded times, and summarize the answers."""

import asyncio
import re
import ssl
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files.formats import ClientRecord, read_lines
from specdecode_operator.capture.files.totals import Latencies, Quantiles, quantiles
from specdecode_operator.capture.load.engine_client import (
    CompletionRequest,
    EngineClient,
    Server,
    allow_many_connections,
    error_text,
)
from specdecode_operator.capture.load.engine_ready import EngineMonitor, MetricsDelta, NoMetrics, metrics_delta
from specdecode_operator.capture.load.prompts import BlockPrompts, Prompt, Said
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE
from specdecode_operator.capture.load.runner import CONNECT_AHEAD_S, TICK_S
from specdecode_operator.capture.load.sender import ClientLog, Prepared, Sender, Sending
from specdecode_operator.capture.load.shutdown import Stop, beside
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, RecordingError
from specdecode_operator.problems import printable, shown

_ROUNDING_MS: Final = 0.1  # of the sum of gaps at which an answer ends


def earlier_turns(requests: Sequence[RecordedRequest]) -> list[int | None]:
    """Return the place of the earlier turn that each request continues; None for a request that starts a conversation.

    A later turn has all full blocks of the earlier one and more, and arrived after that had ended. Blocks that were
    continued before that are a prefix that many conversations share. Requests are in order of arrival.
    """
    lasts = {request.block_hashes[-1] for request in requests if request.block_hashes}
    continued_ms = dict[int, float]()  # when a longer prompt first arrived, by the last block of a prompt
    for request in requests:
        if request.arrival_ms is not None and request.block_hashes:
            for block in lasts.intersection(request.block_hashes[:-1]):
                continued_ms.setdefault(block, request.arrival_ms)
    heads = dict[int, list[tuple[float, int]]]()
    found = list[int | None]()
    for place, request in enumerate(requests):
        hashes: Sequence[int] = request.block_hashes or ()
        earlier = reversed(hashes[:-1]) if request.arrival_ms is not None else ()
        # A block's hash covers the whole prompt up to its end. Of equal prompts, take the one that ended last: all had
        # ended before this one arrived, or their blocks would have been continued too early.
        found.append(next((max(heads[block])[1] for block in earlier if block in heads), None))
        end_ms = request.end_ms if hashes else None
        if end_ms is not None and continued_ms.get(hashes[-1], end_ms) >= end_ms - _ROUNDING_MS:
            heads.setdefault(hashes[-1], []).append((end_ms, place))
    return found


_PHASE: Final = "replay"
_LONGEST_PROMPT: Final = 2**24  # tokens, more than any engine takes: bounds the memory for making a prompt
_FOR_A_HEADER: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that will be sent."""

    place: int  # in the order of arrival; also the number at the end of its id
    request: RecordedRequest
    offset_s: float  # after the first request
    after: int | None  # place of the turn that it continues
    is_continued: bool

    @property
    def request_id(self) -> str:
        """The recorded id, by which a replay server finds the record, if a header can carry it."""
        recorded = self.request.request_id
        return recorded if recorded and _FOR_A_HEADER.fullmatch(recorded) else f"replay-{self.place}"

    @property
    def phase(self) -> str:
        """The recorded phase, except warm-up, which all reports leave out."""
        recorded = self.request.phase
        return recorded if recorded and recorded != WARMUP_PHASE else _PHASE


def planned(recording: Recording, time_scale: float, most: int | None = None) -> Sequence[Planned]:
    """Return the requests that have an arrival, in order of arrival; only the first ``most`` if it is given.

    Raises RecordingError if no request has an arrival, or a prompt is too long.
    """
    requests = [request for request in recording.requests if request.arrival_ms is not None][:most]
    if not requests:
        raise RecordingError(
            f"{printable(str(recording.trace))}: no record has arrival_ms, so the sending times are not known: name a"
            " trace of a capture"
        )
    longest = max(request.prompt_tokens for request in requests)
    if longest > _LONGEST_PROMPT:
        raise RecordingError(
            f"{printable(str(recording.trace))}: a prompt of {longest} tokens exceeds {_LONGEST_PROMPT}: remove it"
        )
    first_ms = requests[0].arrival_ms or 0.0
    earlier = earlier_turns(requests)
    continued = set(earlier)
    return [
        Planned(
            place=place,
            request=request,
            offset_s=((request.arrival_ms or 0.0) - first_ms) / 1000 * time_scale,
            after=after,
            is_continued=place in continued,
        )
        for place, (request, after) in enumerate(zip(requests, earlier, strict=True))
    ]


_LARGEST_PAGE_BYTES: Final = 1024 * 1024
_API: Final = "/v1"
_PORTS: Final = {"http": 80, "https": 443}


class TargetError(Exception):
    """A server that cannot be driven: the reason and the fix, in one line."""


class _Models(Struct):
    class Card(Struct):
        id: Annotated[str, Meta(min_length=1)]

    data: list[Card]


@dataclass(frozen=True)
class Address:
    """Address of a server."""

    tls: bool
    host: str
    port: int
    path: str  # before /v1

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Parse a URL, with or without /v1 at its end, or raise TargetError."""
        wanted = "write one such as http://localhost:8000"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise TargetError(f"--url: {shown(url)}: is not a URL: {wanted}") from error
        if parts.scheme not in _PORTS or not host or not url.isascii() or not url.isprintable() or " " in url:
            raise TargetError(f"--url: {shown(url)}: is not an HTTP URL: {wanted}")
        if parts.query or parts.fragment or parts.username is not None:
            raise TargetError(f"--url: {shown(url)}: has more than host, port and path: {wanted}")
        path = parts.path.rstrip("/").removesuffix(_API)
        return cls(parts.scheme == "https", host, port or _PORTS[parts.scheme], path)

    @property
    def root(self) -> str:
        """The URL of the server's root path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}"


async def find_target(address: Address, model: str | None, recorded: str | None, api_key: str | None) -> Server:
    """Ask a server for its models, and return how to send requests to it.

    Parameters
    ----------
    model
        The model name to send. If None, the recorded model if it is served, or the only served model.

    Raises
    ------
    TargetError
        The server does not answer, rejects the key, or does not serve the model.
    """
    # The trusted authorities are those of OpenSSL on this machine and SSL_CERT_FILE.
    tls = ssl.create_default_context() if address.tls else None
    served = await _served(address, api_key, tls)
    return Server(
        host=address.host,
        port=address.port,
        path=f"{address.path}{_API}",
        model=_chosen(address, model, recorded, served),
        api_key=api_key,
        tls=tls,
    )


def _chosen(address: Address, model: str | None, recorded: str | None, served: list[str] | None) -> str:
    if model is not None:
        if served is not None and model not in served:
            raise TargetError(f"--model: {printable(model)}: {address.root} serves {_names(served)}: name one of them")
        return model
    if served is None:
        raise TargetError(f"--model: {address.root} does not report its models: name one")
    if recorded in served:
        return recorded
    if len(served) != 1:
        raise TargetError(f"--model: {address.root} serves {_names(served)}: name one of them")
    return served[0]


def _names(served: list[str], most: int = 5) -> str:
    more = f" and {len(served) - most} more" if len(served) > most else ""
    return (", ".join(map(printable, served[:most])) or "no model") + more


async def _served(address: Address, api_key: str | None, tls: ssl.SSLContext | None) -> list[str] | None:
    """Return the names of its models; None if it has no such page."""
    status, page = await _get(f"{address.root}{_API}/models", api_key, tls)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        given = "rejects the key" if api_key else "requires a key"
        raise TargetError(
            f"{address.root}: {given} ({status}): put the right key into a variable, and name that with"
            " --api-key-variable"
        )
    if status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED, httpx.codes.NOT_IMPLEMENTED):
        return None
    if status != httpx.codes.OK:
        said = printable(error_text(page))
        raise TargetError(f"{address.root}: /v1/models answered {status} ({said}): see the server's log")
    try:
        return [card.id for card in msgspec.json.decode(page, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TargetError(
            f"{address.root}: /v1/models is not a list of models: name an OpenAI-compatible server with --url"
        ) from error


async def _get(url: str, api_key: str | None, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    page = bytearray()
    try:
        async with (
            # Ignore proxies, as the requests do.
            httpx.AsyncClient(timeout=10.0, trust_env=False, verify=tls or True) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            async for data in response.aiter_bytes():
                page += data
                if len(page) > _LARGEST_PAGE_BYTES:
                    raise TargetError(f"{url}: has more than {_LARGEST_PAGE_BYTES} bytes: name another server")
    except httpx.HTTPError as error:
        why = printable(str(error) or type(error).__name__)
        raise TargetError(f"--url: {url}: does not answer ({why}): start the server, or name another") from error
    return response.status_code, bytes(page)


_NOTHING_SAID: Final = Said()


@dataclass(frozen=True, kw_only=True)
class Driven:
    """Result of a run."""

    client_file: Path  # every request that left, in order of sending
    waits_s: Mapping[int, float]  # by later turn, the time that it waited for the one before longer than recorded
    stop_reason: str | None  # None if all requests were sent
    metrics: MetricsDelta | NoMetrics  # of the server's own counters


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Settings of a run."""

    server: Server
    monitor_url: str  # the server's URL without /metrics
    prompts: BlockPrompts
    timeout_s: float
    progress: Callable[[str], None] | None = None  # called every few seconds

    async def run(self, plan: Sequence[Planned], folder: Path, stop: Stop) -> Driven:
        """Send the planned requests, and write client.jsonl.part; cancel requests in flight when ``stop`` is set."""
        allow_many_connections()
        client = EngineClient(self.server, self.timeout_s)
        log = ClientLog(folder, stop.set_from_thread)
        try:
            async with EngineMonitor(self.monitor_url, self.server.tls) as monitor:
                before = await monitor.read()
                # The run's zero is the time of the first request; its connection is made before that.
                sending = Sending(client=client, log=log, zero_s=time.monotonic() + CONNECT_AHEAD_S)
                run = _Run(plan, sending, self.prompts, stop)
                async with beside(run.follow_stop(), run.tell(self.progress)):
                    await run.send_all()
                after = NoMetrics("the run was stopped") if stop.is_set else await monitor.read_when_idle()
        finally:
            await log.close()
        return Driven(
            client_file=log.path,
            waits_s=run.waits_s,
            stop_reason=stop.reason,
            metrics=metrics_delta(before, after),
        )


@dataclass
class _Run:
    _plan: Sequence[Planned]
    _sending: Sending
    _prompts: BlockPrompts
    _stop: Stop
    waits_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sender = Sender(self._sending)
        loop = asyncio.get_running_loop()
        # The conversation up to the end of each turn that another one continues.
        self._said: dict[int, asyncio.Future[Said]] = {
            each.place: loop.create_future() for each in self._plan if each.is_continued
        }

    async def follow_stop(self) -> None:
        await self._stop.wait()
        self._sending.client.cancel_all(self._stop.reason or "stopped")

    async def tell(self, progress: Callable[[str], None] | None) -> None:
        """Report the progress every few seconds."""
        while progress is not None:
            await asyncio.sleep(5 * TICK_S)
            tally, in_flight = self._sender.tally, self._sending.client.in_flight
            failed = tally.total() - tally["completed"]
            progress(f"{tally.total() + in_flight} of {len(self._plan)} sent, {in_flight} in flight, {failed} failed")

    async def send_all(self) -> None:
        """Send all requests, and return when all have ended."""
        async with asyncio.TaskGroup() as tasks:
            for planned in self._plan:
                scheduled_s = self._sending.zero_s + planned.offset_s
                if not await self._stop.sleep_until(scheduled_s - CONNECT_AHEAD_S):
                    break
                tasks.create_task(self._send(planned, scheduled_s))

    async def _send(self, planned: Planned, scheduled_s: float) -> None:
        said = _NOTHING_SAID
        try:
            if planned.after is None:
                said = await self._send_turn(planned, _NOTHING_SAID, scheduled_s)
                return
            before = await self._said[planned.after]
            now_s = time.monotonic()
            if self._stop.is_set:
                return
            if now_s > scheduled_s:
                self.waits_s[planned.place] = now_s - scheduled_s
            said = await self._send_turn(planned, before, max(now_s, scheduled_s))
        finally:
            # Release the next turn, however this one ended.
            if planned.is_continued:
                self._said[planned.place].set_result(said)

    async def _send_turn(self, planned: Planned, before: Said, scheduled_s: float) -> Said:
        """Send a request, and return the conversation up to its end."""
        request = planned.request
        if request.prompt_tokens < len(before.tokens):
            before = _NOTHING_SAID  # the client left a part of the answer out, such as its reasoning
        completion = CompletionRequest(
            request_id=planned.request_id,
            prompt=Prompt(self._prompts.make(request, planned.place, before)),
            max_tokens=request.output_tokens,
            temperature=request.temperature,
            ignore_eos=True,  # the answer is as long as the recorded one
            keep_answer=planned.is_continued,
        )
        wire = self._sending.client.prepare(completion)
        prepared = Prepared(planned.phase, planned.place, completion, wire)
        exchange = await self._sender.send(prepared, scheduled_s)
        if not planned.is_continued or exchange.outcome != "completed":
            return _NOTHING_SAID
        prompt, answer = completion.prompt.content, exchange.stream.answer(as_text=False).content
        return Said(array("I", [*prompt, *answer]), len(prompt) // self._prompts.block_size)


class Side(Struct, kw_only=True, frozen=True):
    """Figures of the requests with a complete answer, as recorded or as driven."""

    # Milliseconds to the first token, for each further token of a request, and to the last token.
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    latency_ms: Quantiles | None
    seconds: float  # from the first request to the last answer's end
    output_tokens: int
    output_tokens_per_second: float | None


class Acceptance(Struct, kw_only=True, frozen=True):
    """Acceptance during the run, by the server's own counters."""

    draft_tokens: int
    accepted_tokens: int
    acceptance: float  # share of the drafted tokens that was accepted
    mean_acceptance_length: float


class DriveSummary(Struct, kw_only=True, frozen=True):
    """Summary of a run."""

    planned: int  # requests to send
    sent: int
    outcomes: dict[str, int]
    stop_reason: str | None  # None if all requests were sent
    first_failure: str | None
    other_lengths: int  # complete answers with another number of tokens than recorded
    late_ms: Quantiles | None  # from the due time of a request until it was sent
    waited: int  # later turns that waited longer than recorded for the one before
    waited_ms: Quantiles | None
    recorded: Side
    driven: Side
    acceptance: Acceptance | None  # None if the server has no such counters


def summarize(plan: Sequence[Planned], driven: Driven) -> DriveSummary:
    """Return the summary of a run."""
    decoder = msgspec.json.Decoder(ClientRecord)
    records = [decoder.decode(line.text) for line in read_lines(driven.client_file)]
    outcomes = dict(Counter[str](record.outcome for record in records))
    whole = [record for record in records if record.outcome == "completed"]
    failed, failure = next((each for each in records if each.outcome not in ("completed", "cancelled")), None), None
    if failed is not None:
        status = "" if failed.http_status is None else f" {failed.http_status}"
        why = failed.error or "no reason given"
        failure = printable(f"{failed.id}: {failed.outcome.replace('_', ' ')}{status}: {why}")
    answered = {record.index for record in whole}
    waits_ms = [1000 * wait_s for wait_s in driven.waits_s.values()]
    return DriveSummary(
        planned=len(plan),
        sent=len(records) - outcomes.get("not_sent", 0),
        outcomes=outcomes,
        stop_reason=driven.stop_reason,
        first_failure=failure,
        other_lengths=sum(
            record.completion_tokens is not None and record.completion_tokens != record.max_tokens for record in whole
        ),
        late_ms=quantiles(record.late_ms for record in records if record.late_ms is not None),
        waited=len(waits_ms),
        waited_ms=quantiles(waits_ms),
        recorded=_side(
            (sent.arrival_ms, sent.ttft_ms, sent.ttft_ms + sum(sent.gaps_ms), sent.output_tokens)
            for sent in (each.request for each in plan if each.place in answered)
        ),
        driven=_side((each.sent_ms, each.ttft_ms, each.latency_ms, each.completion_tokens) for each in whole),
        acceptance=_acceptance(driven.metrics),
    )


def _side(answers: Iterable[tuple[float | None, float | None, float | None, int | None]]) -> Side:
    """Return the figures of answers, each with its start, TTFT and latency in ms and its tokens."""
    latencies, tokens, starts_ms, ends_ms = Latencies(), 0, list[float](), list[float]()
    for start_ms, ttft_ms, latency_ms, output_tokens in answers:
        if start_ms is None or ttft_ms is None or latency_ms is None:
            continue
        latencies.add(ttft_ms, latency_ms, output_tokens)
        tokens += output_tokens or 0
        starts_ms.append(start_ms)
        ends_ms.append(start_ms + latency_ms)
    span_ms = max(ends_ms, default=0.0) - min(starts_ms, default=0.0)
    return Side(
        ttft_ms=quantiles(latencies.ttft_ms),
        tpot_ms=quantiles(latencies.tpot_ms),
        latency_ms=quantiles(latencies.latency_ms),
        seconds=round(span_ms / 1000, 3),
        output_tokens=tokens,
        output_tokens_per_second=round(1000 * tokens / span_ms, 2) if span_ms > 0 else None,
    )


def _acceptance(metrics: MetricsDelta | NoMetrics) -> Acceptance | None:
    found = None if isinstance(metrics, NoMetrics) else metrics.speculation
    if found is None or not found.draft_tokens:
        return None
    return Acceptance(
        draft_tokens=found.draft_tokens,
        accepted_tokens=found.accepted_tokens,
        acceptance=round(found.accepted_tokens / found.draft_tokens, 4),
        mean_acceptance_length=round(1 + found.accepted_tokens / max(found.drafts, 1), 3),
    )


def summary_text(summary: DriveSummary) -> str:
    """Return the summary as text."""
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.outcomes.items())
    lines = [("requests", f"{summary.sent} of {summary.planned} sent: {outcomes or 'none ended'}")]
    if summary.stop_reason is not None:
        lines.append(("stopped", f"{summary.stop_reason}: {summary.planned - summary.sent} never left"))
    if summary.first_failure is not None:
        lines.append(("first failure", summary.first_failure))
    if summary.other_lengths:
        lines.append(("lengths", f"{summary.other_lengths} answers had another number of tokens than recorded"))
    lines += [("", ""), ("", f"{'recorded':<33}here"), ("", 2 * f"{'P50':>9}{'P90':>9}{'P99':>9}{'':6}")]
    for label, name in (("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"), ("latency ms", "latency_ms")):
        times: list[Quantiles | None] = [getattr(side, name) for side in (summary.recorded, summary.driven)]
        cells = [(f"{each.p50:.1f}", f"{each.p90:.1f}", f"{each.p99:.1f}") if each else 3 * ("-",) for each in times]
        lines.append((label, "".join("".join(f"{cell:>9}" for cell in row) + " " * 6 for row in cells)))
    rates = (side.output_tokens_per_second for side in (summary.recorded, summary.driven))
    lines += [("tokens/s", "".join(f"{'-' if rate is None else f'{rate:.1f}':>9}{'':24}" for rate in rates)), ("", "")]
    if summary.late_ms is not None:
        lines.append(("sent late ms", f"P50 {summary.late_ms.p50:.1f}, P99 {summary.late_ms.p99:.1f}"))
    if summary.waited_ms is not None:
        later = f"{summary.waited} waited longer than recorded for the turn before"
        lines.append(("turns", f"{later}: P50 {summary.waited_ms.p50:.1f} ms"))
    if (found := summary.acceptance) is not None:
        accepted = f"{found.acceptance:.1%} of {found.draft_tokens} drafted tokens accepted"
        per_draft = f"{found.mean_acceptance_length:.2f} tokens per draft, as the server counts"
        lines.append(("speculation", f"{accepted}, {per_draft}"))
    return "\n".join(f"{label:<14}{text}".rstrip() for label, text in lines)
