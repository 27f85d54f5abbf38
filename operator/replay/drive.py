"""Send recorded requests to a server again at their recorded times, and summarize the answers."""

import asyncio
import re
import ssl
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from specdecode_operator.capture.load.progress import TICK_S
from specdecode_operator.capture.load.prompts import BlockPrompts, Prompt, Said
from specdecode_operator.capture.load.run_settings import WARMUP_PHASE
from specdecode_operator.capture.load.runner import CONNECT_AHEAD_S
from specdecode_operator.capture.load.sender import ClientLog, Prepared, Sender, Sending
from specdecode_operator.capture.load.shutdown import Stop, beside
from specdecode_operator.capture.trace_reader import RecordedRequest, Recording, RecordingError
from specdecode_operator.problems import printable, shown

_ROUNDING_MS: Final = 0.1
"""Of the many gaps that make an end."""


def earlier_turns(requests: Sequence[RecordedRequest]) -> list[int | None]:
    """Return the place of the request that each one goes on from; None for those that begin something.

    A later turn has all full blocks of the earlier one and more, and came when that had ended. Blocks that others had
    gone on from before are no conversation's but a prefix that many share. Requests are in order of arrival.
    """
    taken_up_ms = _first_taken_up(requests)
    heads = dict[int, list[tuple[float, int]]]()
    found = list[int | None]()
    for place, request in enumerate(requests):
        found.append(_deepest(request, heads))
        if request.block_hashes and (end_ms := request.end_ms) is not None:
            last = request.block_hashes[-1]
            if taken_up_ms.get(last, end_ms) >= end_ms - _ROUNDING_MS:
                heads.setdefault(last, []).append((end_ms, place))
    return found


def _first_taken_up(requests: Sequence[RecordedRequest]) -> dict[int, float]:
    """Return when a longer prompt first came, for each last block of a prompt."""
    lasts = {request.block_hashes[-1] for request in requests if request.block_hashes}
    first = dict[int, float]()
    for request in requests:
        if request.arrival_ms is not None and request.block_hashes:
            for block in lasts.intersection(request.block_hashes[:-1]):
                first.setdefault(block, request.arrival_ms)
    return first


def _deepest(request: RecordedRequest, heads: dict[int, list[tuple[float, int]]]) -> int | None:
    if request.arrival_ms is None or not request.block_hashes:
        return None
    # A block's hash is that of the whole prompt up to its end. Of equal prompts, the one that ended last; all had
    # ended before this one came, or their blocks would have been taken up too early.
    return next((max(heads[block])[1] for block in reversed(request.block_hashes[:-1]) if block in heads), None)


_PHASE: Final = "replay"
_LONGEST_PROMPT: Final = 2**24
"""No engine takes more, and making it would only fill this machine's memory."""
_FOR_A_HEADER: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that will be sent."""

    place: int  # in the order of arrival, which is also what the end of its id says
    request: RecordedRequest
    offset_s: float  # from the first request's moment
    after: int | None  # place of the turn that it goes on from
    is_gone_on_from: bool

    @property
    def request_id(self) -> str:
        """The recorded id, by which a replay server finds the record, if it has one that a header can carry."""
        recorded = self.request.request_id
        return recorded if recorded and _FOR_A_HEADER.fullmatch(recorded) else f"replay-{self.place}"

    @property
    def phase(self) -> str:
        """The recorded phase; none is taken for warm-up, which is left out everywhere."""
        recorded = self.request.phase
        return recorded if recorded and recorded != WARMUP_PHASE else _PHASE


def planned(recording: Recording, time_scale: float, most: int | None = None) -> Sequence[Planned]:
    """Return the requests with a moment, in order of arrival; with ``most``, the first so many.

    Raises
    ------
    RecordingError
        None has a moment, or a prompt is longer than any.
    """
    requests = [request for request in recording.requests if request.arrival_ms is not None][:most]
    if not requests:
        raise RecordingError(
            f"{printable(str(recording.trace))}: no record has arrival_ms, so nobody knows when to send them: name a"
            " trace of a capture"
        )
    longest = max(request.prompt_tokens for request in requests)
    if longest > _LONGEST_PROMPT:
        raise RecordingError(f"{printable(str(recording.trace))}: a prompt of {longest} tokens: leave its record out")
    first_ms = requests[0].arrival_ms or 0.0
    earlier = earlier_turns(requests)
    gone_on_from = set(earlier)
    return [
        Planned(
            place=place,
            request=request,
            offset_s=((request.arrival_ms or 0.0) - first_ms) / 1000 * time_scale,
            after=after,
            is_gone_on_from=place in gone_on_from,
        )
        for place, (request, after) in enumerate(zip(requests, earlier, strict=True))
    ]


_TIMEOUT_S: Final = 10.0
_LARGEST_PAGE_BYTES: Final = 1024 * 1024
_MOST_NAMES: Final = 5
_API: Final = "/v1"
_PORTS: Final = {"http": 80, "https": 443}


class TargetError(Exception):
    """Why a server cannot be driven, and what to do, in one line."""


class _Card(Struct):
    id: Annotated[str, Meta(min_length=1)]


class _Models(Struct):
    data: list[_Card]


_MODELS: Final = msgspec.json.Decoder(_Models)


@dataclass(frozen=True)
class Address:
    """Where a server is."""

    tls: bool
    host: str
    port: int
    path: str  # before /v1

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Return the address in a URL, with /v1 at its end or without.

        Raises
        ------
        TargetError
            It is none.
        """
        wanted = "write one such as http://localhost:8000"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise TargetError(f"--url: {shown(url)}: is no URL: {wanted}") from error
        if parts.scheme not in _PORTS or not host or not url.isascii() or not url.isprintable() or " " in url:
            raise TargetError(f"--url: {shown(url)}: is no URL of HTTP: {wanted}")
        if parts.query or parts.fragment or parts.username is not None:
            raise TargetError(f"--url: {shown(url)}: has more than host, port and path: {wanted}")
        path = parts.path.rstrip("/").removesuffix(_API)
        return cls(parts.scheme == "https", host, port or _PORTS[parts.scheme], path)

    @property
    def root(self) -> str:
        """The URL below which its pages are."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path}"


async def find_target(address: Address, model: str | None, recorded: str | None, api_key: str | None) -> Server:
    """Ask a server for its models, and return how to send to it.

    Parameters
    ----------
    model
        The name to send, if somebody said it. Without: the recorded one if it is served, else the only one.

    Raises
    ------
    TargetError
        It does not answer, refuses the key, or does not serve the model.
    """
    # Who a certificate may be signed by is what OpenSSL says on this machine, and SSL_CERT_FILE.
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
    if served is None:
        if model is None:
            raise TargetError(f"--model: {address.root} does not say which models it serves: name one")
        return model
    if model is not None:
        if model not in served:
            raise TargetError(f"--model: {printable(model)}: {address.root} serves {_names(served)}: name one of them")
        return model
    if recorded in served:
        return recorded
    if len(served) != 1:
        raise TargetError(f"--model: {address.root} serves {_names(served)}: say which is meant")
    return served[0]


def _names(served: list[str]) -> str:
    more = f" and {len(served) - _MOST_NAMES} more" if len(served) > _MOST_NAMES else ""
    return (", ".join(map(printable, served[:_MOST_NAMES])) or "no model") + more


async def _served(address: Address, api_key: str | None, tls: ssl.SSLContext | None) -> list[str] | None:
    """Return the names of its models; None where it has no such page."""
    status, page = await _get(f"{address.root}{_API}/models", api_key, tls)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        given = "refuses the key" if api_key else "wants a key"
        raise TargetError(
            f"{address.root}: {given} ({status}): put the right one into a variable, and name that with"
            " --api-key-variable"
        )
    if status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED, httpx.codes.NOT_IMPLEMENTED):
        return None
    if status != httpx.codes.OK:
        said = printable(error_text(page))
        raise TargetError(f"{address.root}: /v1/models answered {status} ({said}): see the server's log")
    try:
        return [card.id for card in _MODELS.decode(page).data]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TargetError(
            f"{address.root}: /v1/models is no list of models: name an OpenAI-compatible server with --url"
        ) from error


async def _get(url: str, api_key: str | None, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    page = bytearray()
    try:
        async with (
            # Like the requests, which go straight to the server.
            httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls or True) as client,
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


_TICKS_BETWEEN_LINES: Final = 5
_NOTHING_SAID: Final = Said()


@dataclass(frozen=True, kw_only=True)
class Driven:
    """What became of a run."""

    client_file: Path  # every request that left, in order of sending
    waits_s: Mapping[int, float]  # of later turns, how much longer than recorded they waited for the one before
    stop_reason: str | None  # None: it ended with its requests
    metrics: MetricsDelta | NoMetrics  # what the server's own counters say of it


@dataclass(frozen=True, kw_only=True)
class Drive:
    """How recorded requests are sent."""

    server: Server
    monitor_url: str  # below which the server's /metrics is
    prompts: BlockPrompts
    timeout_s: float
    progress: Callable[[str], None] | None = None  # is told now and then how far it is

    async def run(self, plan: Sequence[Planned], folder: Path, stop: Stop) -> Driven:
        """Send what is planned, and write client.jsonl.part; when ``stop`` is set, end what is in flight.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        allow_many_connections()
        client = EngineClient(self.server, self.timeout_s)
        log = ClientLog(folder, stop.set_from_thread)
        try:
            async with EngineMonitor(self.monitor_url, self.server.tls) as monitor:
                before = await monitor.read()
                # Its zero is the first request's moment; before that, its connection is made.
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


class _Run:
    """One run from its zero on."""

    def __init__(self, plan: Sequence[Planned], sending: Sending, prompts: BlockPrompts, stop: Stop) -> None:
        self.waits_s = dict[int, float]()
        self._plan = plan
        self._sending = sending
        self._sender = Sender(sending)
        self._prompts = prompts
        self._stop = stop
        loop = asyncio.get_running_loop()
        # What was said up to the end of each turn that another one goes on from.
        self._said: dict[int, asyncio.Future[Said]] = {
            each.place: loop.create_future() for each in plan if each.is_gone_on_from
        }

    async def follow_stop(self) -> None:
        """Cancel what is in flight as soon as the run must end."""
        await self._stop.wait()
        self._sending.client.cancel_all(self._stop.reason or "stopped")

    async def tell(self, progress: Callable[[str], None] | None) -> None:
        """Say now and then how far it is."""
        while progress is not None:
            await asyncio.sleep(TICK_S * _TICKS_BETWEEN_LINES)
            tally, in_flight = self._sender.tally, self._sending.client.in_flight
            failed = tally.ended - tally.completed
            progress(f"{tally.ended + in_flight} of {len(self._plan)} sent, {in_flight} in flight, {failed} failed")

    async def send_all(self) -> None:
        """Send everything, and return when all has ended."""
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
            # However it ended: who goes on from it waits for nothing else.
            if planned.is_gone_on_from:
                self._said[planned.place].set_result(said)

    async def _send_turn(self, planned: Planned, before: Said, scheduled_s: float) -> Said:
        """Send a request, and return what was said up to its end."""
        prepared = self._prepare(planned, before)
        exchange = await self._sender.send(prepared, scheduled_s)
        if not planned.is_gone_on_from or exchange.outcome != "completed":
            return _NOTHING_SAID
        prompt, answer = prepared.request.prompt.content, exchange.stream.answer(as_text=False).content
        return Said(array("I", [*prompt, *answer]), len(prompt) // self._prompts.block_size)

    def _prepare(self, planned: Planned, said: Said) -> Prepared:
        request = planned.request
        if request.prompt_tokens < len(said.tokens):
            said = _NOTHING_SAID  # of the answer something was left out, such as what was only thought
        completion = CompletionRequest(
            request_id=planned.request_id,
            prompt=Prompt(self._prompts.make(request, planned.place, said)),
            max_tokens=request.output_tokens,
            temperature=request.temperature,
            # Whatever is answered, it is as long as it was.
            ignore_eos=True,
            keep_answer=planned.is_gone_on_from,
        )
        wire = self._sending.client.prepare(completion)
        return Prepared(planned.phase, planned.place, completion, wire)


_RECORD: Final = msgspec.json.Decoder(ClientRecord)
_TIMES: Final = ("ttft_ms", "tpot_ms", "latency_ms")
_SHARES: Final = ("p50", "p90", "p99")
_LABEL_WIDTH: Final = 14


class Side(Struct, kw_only=True, frozen=True):
    """Requests with a whole answer in this run, as they were recorded or as they went now."""

    # Milliseconds to the first token, for each further token of a request, and to the last token.
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    latency_ms: Quantiles | None
    seconds: float  # from the first request to the last answer's end
    output_tokens: int
    output_tokens_per_second: float | None


class Acceptance(Struct, kw_only=True, frozen=True):
    """What drafting achieved during the run, by the server's own counters."""

    draft_tokens: int
    accepted_tokens: int
    acceptance: float  # share of the drafted tokens that was accepted
    mean_acceptance_length: float


class DriveSummary(Struct, kw_only=True, frozen=True):
    """What a run gave."""

    planned: int  # requests to send
    sent: int
    outcomes: dict[str, int]
    stop_reason: str | None  # why it ended before all was sent
    first_failure: str | None
    other_lengths: int  # whole answers with another number of tokens than recorded
    late_ms: Quantiles | None  # how much later requests left than they were due
    waited: int  # later turns that waited longer than recorded for the one before
    waited_ms: Quantiles | None
    recorded: Side
    driven: Side
    acceptance: Acceptance | None  # absent where the server has no such counters


def summarize(plan: Sequence[Planned], driven: Driven) -> DriveSummary:
    """Return the summary of a run."""
    records = _read(driven.client_file)
    outcomes = dict[str, int]()
    for record in records:
        outcomes[record.outcome] = outcomes.get(record.outcome, 0) + 1
    whole = [record for record in records if record.outcome == "completed"]
    failed = next((record for record in records if record.outcome not in ("completed", "cancelled")), None)
    answered = {record.index for record in whole}
    waits_ms = [1000 * wait_s for wait_s in driven.waits_s.values()]
    return DriveSummary(
        planned=len(plan),
        sent=len(records) - outcomes.get("not_sent", 0),
        outcomes=outcomes,
        stop_reason=driven.stop_reason,
        first_failure=None if failed is None else _told(failed),
        other_lengths=sum(
            record.completion_tokens is not None and record.completion_tokens != record.max_tokens for record in whole
        ),
        late_ms=quantiles(record.late_ms for record in records if record.late_ms is not None),
        waited=len(waits_ms),
        waited_ms=quantiles(waits_ms),
        recorded=_recorded([each.request for each in plan if each.place in answered]),
        driven=_driven(whole),
        acceptance=_acceptance(driven),
    )


def _read(path: Path) -> list[ClientRecord]:
    return [_RECORD.decode(line.text) for line in read_lines(path)]


def _told(record: ClientRecord) -> str:
    status = "" if record.http_status is None else f" {record.http_status}"
    return printable(f"{record.id}: {record.outcome.replace('_', ' ')}{status}: {record.error or 'no reason given'}")


def _recorded(requests: Sequence[RecordedRequest]) -> Side:
    latencies = Latencies()
    for request in requests:
        latencies.add(request.ttft_ms, request.ttft_ms + sum(request.gaps_ms), request.output_tokens)
    first_ms = min((request.arrival_ms or 0.0 for request in requests), default=0.0)
    last_ms = max((request.end_ms or 0.0 for request in requests), default=0.0)
    return _side(latencies, last_ms - first_ms, sum(request.output_tokens for request in requests))


def _driven(whole: Iterable[ClientRecord]) -> Side:
    latencies, tokens, sent_ms, ended_ms = Latencies(), 0, list[float](), list[float]()
    for record in whole:
        if record.ttft_ms is None or record.latency_ms is None or record.sent_ms is None:
            continue
        latencies.add(record.ttft_ms, record.latency_ms, record.completion_tokens)
        tokens += record.completion_tokens or 0
        sent_ms.append(record.sent_ms)
        ended_ms.append(record.sent_ms + record.latency_ms)
    return _side(latencies, max(ended_ms, default=0.0) - min(sent_ms, default=0.0), tokens)


def _side(latencies: Latencies, span_ms: float, tokens: int) -> Side:
    return Side(
        ttft_ms=quantiles(latencies.ttft_ms),
        tpot_ms=quantiles(latencies.tpot_ms),
        latency_ms=quantiles(latencies.latency_ms),
        seconds=round(span_ms / 1000, 3),
        output_tokens=tokens,
        output_tokens_per_second=round(1000 * tokens / span_ms, 2) if span_ms > 0 else None,
    )


def _acceptance(driven: Driven) -> Acceptance | None:
    metrics = driven.metrics
    if isinstance(metrics, NoMetrics) or metrics.speculation is None or not metrics.speculation.draft_tokens:
        return None
    found = metrics.speculation
    return Acceptance(
        draft_tokens=found.draft_tokens,
        accepted_tokens=found.accepted_tokens,
        acceptance=round(found.accepted_tokens / found.draft_tokens, 4),
        mean_acceptance_length=round(1 + found.accepted_tokens / max(found.drafts, 1), 3),
    )


def summary_text(summary: DriveSummary) -> str:
    """Return the summary for people."""
    outcomes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.outcomes.items())
    lines = [_line("requests", f"{summary.sent} of {summary.planned} sent: {outcomes or 'none ended'}")]
    if summary.stop_reason is not None:
        lines.append(_line("stopped", f"{summary.stop_reason}: {summary.planned - summary.sent} never left"))
    if summary.first_failure is not None:
        lines.append(_line("first failure", summary.first_failure))
    if summary.other_lengths:
        lines.append(_line("lengths", f"{summary.other_lengths} answers had another number of tokens than recorded"))
    lines += ["", _line("", "".join(f"{name:<33}" for name in ("recorded", "here"))), _line("", 2 * _heads())]
    for name in _TIMES:
        label = f"{name.removesuffix('_ms').upper() if name != 'latency_ms' else 'latency'} ms"
        sides = (getattr(side, name) for side in (summary.recorded, summary.driven))
        lines.append(_line(label, "".join(map(_cells, sides))))
    rates = (side.output_tokens_per_second for side in (summary.recorded, summary.driven))
    lines.append(_line("tokens/s", "".join(f"{'-' if rate is None else f'{rate:.1f}':>9}{'':24}" for rate in rates)))
    lines += ["", *_how_it_went(summary)]
    return "\n".join(line.rstrip() for line in lines)


def _how_it_went(summary: DriveSummary) -> Iterable[str]:
    if summary.late_ms is not None:
        yield _line("sent late ms", f"P50 {summary.late_ms.p50:.1f}, P99 {summary.late_ms.p99:.1f}")
    if summary.waited_ms is not None:
        yield _line(
            "turns",
            f"{summary.waited} waited longer than recorded for the turn before: P50 {summary.waited_ms.p50:.1f} ms",
        )
    if summary.acceptance is not None:
        found = summary.acceptance
        yield _line(
            "speculation",
            f"{found.acceptance:.1%} of {found.draft_tokens} drafted tokens accepted,"
            f" {found.mean_acceptance_length:.2f} tokens per draft, as the server counts",
        )


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _heads() -> str:
    return "".join(f"{share.upper():>9}" for share in _SHARES) + " " * 6


def _cells(times: Quantiles | None) -> str:
    return "".join(f"{'-' if times is None else f'{getattr(times, share):.1f}':>9}" for share in _SHARES) + " " * 6
