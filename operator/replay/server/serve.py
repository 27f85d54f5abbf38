"""Serve a replayed engine as an OpenAI-compatible server: ASGI app, injected failures, start and stop."""

import asyncio
import gc
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.replay.clocks import LATE_MS, TimerClock
from specdecode_operator.replay.engine import UnmatchedRequestError
from specdecode_operator.replay.model_file import BLOCK_TOKENS
from specdecode_operator.replay.recorded_engine import Matching
from specdecode_operator.replay.server.completion_answers import Engines, Streamed, Whole, error
from specdecode_operator.replay.server.completion_requests import (
    Asked,
    RejectedError,
    bad_request,
    read_chat,
    read_completion,
)
from specdecode_operator.replay.server.http_transport import ABANDON, BoundedHttp, Wire
from specdecode_operator.replay.server.playback_source import (
    Mode,
    Played,
    ServeError,
    Source,
    SourceSettings,
    play,
)
from specdecode_operator.replay.server.served_answers import SOURCE, CaptureRecorder, Exposition, Meter
from specdecode_operator.version import __version__

_LARGEST_BODY_BYTES: Final = 16 * 2**20
_MOST_HELD_BYTES: Final = 256 * 2**20
"""Memory of all request bodies that are being read, and of all prompts that are being answered."""

_LONGEST_ID: Final = 256


@dataclass(kw_only=True)
class Service:
    """Settings and state of the application."""

    engines: Engines
    exposition: Exposition
    models: Sequence[str]  # served names; the first is the default
    created: int  # seconds since 1970
    version: str
    api_keys: Sequence[str] = ()
    fail_share: float = 0.0  # of requests that get a 500
    random: Random
    held_bytes: int = 0  # memory of all requests


def application(service: Service) -> ASGIApp:
    """Return the ASGI application."""
    cards = [
        {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "vllm",
            "root": service.models[0],
            "parent": None,
            "max_model_len": service.engines.max_model_len,
        }
        for name in service.models
    ]

    async def metrics(_request: Request) -> Response:
        return Response(service.exposition.text(), media_type="text/plain; version=1.0.0; charset=utf-8")

    # Only Starlette's router: its middleware would run for every event, and errors have OpenAI's form already.
    app: ASGIApp = Router(
        [
            _Route("/v1/completions", _Answers(service, read_completion), methods=["POST"]),
            _Route("/v1/chat/completions", _Answers(service, read_chat), methods=["POST"]),
            _Route("/v1/models", JSONResponse({"object": "list", "data": cards}), methods=["GET"]),
            _Route("/health", Response(), methods=["GET"]),
            _Route("/ping", Response(), methods=["GET", "POST"]),
            _Route("/version", JSONResponse({"version": service.version}), methods=["GET"]),
            _Route("/metrics", metrics),
        ],
        default=_json(error(404, "NotFoundError", "Not Found"), 404),
    )
    return _Keyed(app, service.api_keys) if service.api_keys else app


class _Route(Route):
    """Route that rejects other methods with an error in OpenAI's form."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            rejected = _json(error(405, "Method Not Allowed", "Method Not Allowed"), 405)
            rejected.headers["Allow"] = ", ".join(sorted(self.methods))
            await rejected(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


class _Answers:
    def __init__(self, service: Service, read: Callable[[bytes], Asked]) -> None:
        self._service = service
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, responses = _Held(self._service), self._service.exposition.meter.responses
        try:
            data = await _body(receive, held)
            if data is None:
                return
            asked = self._read(data)
            del data
            held.become(asked.held_bytes)
            try:
                await self._answer(asked, scope, receive, send)
            except UnmatchedRequestError as unmatched:
                message = f"{unmatched}: the trace is used up, or has no such request: choose another --unmatched"
                raise RejectedError(409, "ConflictError", message) from unmatched
            responses[scope["path"], HTTPStatus.OK] += 1
        except RejectedError as rejected:
            responses[scope["path"], rejected.status] += 1
            body = error(rejected.status, rejected.kind, str(rejected), rejected.parameter)
            await _json(body, rejected.status)(scope, receive, send)
        except asyncio.CancelledError:
            # The drain timeout is over: the server closes the connection.
            return
        finally:
            held.become(0)

    async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        model = asked.model or service.models[0]
        if model not in service.models:
            message = f"The model `{clip(printable(model), 100)}` does not exist."
            raise RejectedError(404, "NotFoundError", message, "model")
        longest, prompt_tokens = service.engines.max_model_len, max(prompt.tokens for prompt in asked.prompts)
        wanted = asked.max_tokens or 1
        if longest is not None and prompt_tokens + wanted > longest:
            raise bad_request(
                f"This model's maximum context length is {longest} tokens. However, you requested {wanted} output "
                f"tokens and your prompt contains at least {prompt_tokens} input tokens. Please reduce the length of "
                "the input prompt or the number of requested output tokens.",
                "input_tokens",
            )
        if service.fail_share and service.random.random() < service.fail_share:
            raise RejectedError(500, "InternalServerError", "a failure requested by --fail-share")
        request_id = Request(scope).headers.get("x-request-id", "")[:_LONGEST_ID] or None
        if asked.stream:
            wire = Wire(send, service.engines.unread, scope["extensions"][ABANDON]["close"])
            streamed = Streamed(service.engines, asked, model, request_id, wire)
            if await streamed.begin(receive):
                await streamed.respond(receive)
        else:
            whole = Whole(service.engines, asked, model, request_id)
            if await whole.begin(receive):
                await _json(await whole.document(receive), 200)(scope, receive, send)


@dataclass
class _Held:
    """Memory of one request, until it is released."""

    service: Service
    own_bytes: int = 0

    def become(self, own_bytes: int) -> None:
        """Hold this many bytes; reject the request if all requests together are too large."""
        more_bytes = own_bytes - self.own_bytes
        if more_bytes > 0 and self.service.held_bytes + more_bytes > _MOST_HELD_BYTES:
            message = f"the server already holds request bodies of more than {_MOST_HELD_BYTES} bytes"
            raise RejectedError(503, "ServiceUnavailableError", message)
        self.service.held_bytes += more_bytes
        self.own_bytes = own_bytes


async def _body(receive: Receive, held: _Held) -> bytes | None:
    """Return the whole body; None if the client disconnects before its end."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        data += part
        held.become(len(data))
        if len(data) > _LARGEST_BODY_BYTES:
            raise RejectedError(413, "BadRequestError", f"the body has more than {_LARGEST_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(data)


def _json(body: bytes, status: int) -> Response:
    return Response(body, status, media_type="application/json")


class _Keyed:
    """Requires an API key for paths below /v1, as vLLM does."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        if kind.lower() == b"bearer" and any(secrets.compare_digest(key, each) for each in self._keys):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)


MOST_CONNECTIONS: Final = 2048
"""Default limit of concurrent connections; with unfinished headers of 64 KiB each they hold 128 MiB."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a server."""

    source: SourceSettings
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    load_factor: float = 1.0
    record: Path | None = None
    slow_start_s: float = 0.0
    fail_share: float = 0.0
    hang_after_s: float | None = None
    crash_after_s: float | None = None
    drain_timeout_s: int = 60
    most_connections: int = MOST_CONNECTIONS


@dataclass(frozen=True)
class Assembled:
    """Application, engine and recorder of a server."""

    app: ASGIApp
    played: Played
    recorder: CaptureRecorder | None


def serve(settings: ServeSettings, source: Source, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in flight."""
    # The recordings stay: collecting garbage among them would delay tokens.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, source, say))


async def _serve(settings: ServeSettings, source: Source, say: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if settings.slow_start_s:
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), settings.slow_start_s)
    if ended.is_set():
        return
    listener = listen_at(settings.host, settings.port)
    clock = TimerClock(loop)
    assembled = assemble(settings, source, clock)
    server = http_server(assembled.app, settings.drain_timeout_s, settings.most_connections)
    if settings.hang_after_s is not None:
        # Requests are still accepted, and /health stays good, as if a kernel never ended.
        loop.call_later(settings.hang_after_s, clock.stop)
    if settings.crash_after_s is not None:
        loop.call_later(settings.crash_after_s, os._exit, 1)
    serving = loop.create_task(server.serve(sockets=[listener]))
    k = source.num_speculative_tokens
    how = f"K = {k}" if k else "no speculation"
    say(f"replaying {source.description} ({how}) on http://{settings.host}:{listener.getsockname()[1]}")
    await ended.wait()
    server.should_exit = True
    await serving
    clock.stop()
    if assembled.recorder is not None:
        assembled.recorder.close()
        if (failure := assembled.recorder.failure) is not None:
            say(f"note: --record ended early, and its files keep the suffix .part: {failure.strerror}")
    for line in assembled.played.outside():
        say(f"note: {line}")
    if clock.late_timers > 0.01 * clock.timers:
        share = 100 * clock.late_timers / clock.timers
        say(f"note: {share:.1f} % of bursts were more than {LATE_MS:g} ms late: this machine was too busy")


class _Server(uvicorn.Server):
    """Server that leaves signals to us: uvicorn would end the process as if it had been killed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def assemble(settings: ServeSettings, source: Source, clock: TimerClock) -> Assembled:
    """Build the application, its engine, and the recorder if one is wanted."""
    wanted = settings.source
    played, recorder = play(wanted, source, clock), None
    if settings.record is not None:
        zero_s = clock.zero_ns / 1e9
        wall_s = time.time() - time.monotonic() + zero_s
        meta = msgspec.structs.replace(source.meta, source=SOURCE, zero_monotonic_s=zero_s, zero_wall_s=wall_s)
        try:
            recorder = CaptureRecorder(settings.record, meta, played.engine, source.num_speculative_tokens)
        except OSError as error:
            place = printable(str(settings.record))
            raise ServeError(f"--record: {place}: {error.strerror}: name another folder") from error
    names = settings.served_model_names or (source.meta.model or "replay",)
    meter = Meter(clock, source.num_speculative_tokens, recorder, wanted.time_scale)
    block_tokens = source.meta.block_size or BLOCK_TOKENS
    tokens = wanted.kv_cache_tokens or source.kv_cache_tokens
    length = wanted.max_model_len
    if length is None and wanted.mode is Mode.MODELLED and source.model is not None:
        length = source.model.origin.limits.max_model_len
    hashes_blocks = source.model is not None or wanted.matching is Matching.PREFIX
    # Labels of ``vllm:cache_config_info``; "None" for unknown values, as vLLM writes them.
    cache = {
        "block_size": str(block_tokens),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "kv_cache_max_concurrency": str(tokens / length if tokens is not None and length is not None else None),
        "kv_cache_size_tokens": str(tokens),
        "num_gpu_blocks": str(None if tokens is None else tokens // block_tokens),
    }
    service = Service(
        engines=Engines(
            engine=played.engine,
            meter=meter,
            hash_blocks_of=block_tokens if hashes_blocks else None,
            max_model_len=length,
        ),
        exposition=Exposition(meter, played.engine, names[0], settings.load_factor, cache),
        models=names,
        created=int(time.time()),
        version=source.meta.vllm_version or f"specdecode-replay-{__version__}",
        api_keys=settings.api_keys,
        fail_share=settings.fail_share,
        random=Random(wanted.seed),  # noqa: S311  not for secrets
    )
    return Assembled(application(service), played, recorder)


def http_server(app: ASGIApp, drain_timeout_s: int, most_connections: int = MOST_CONNECTIONS) -> uvicorn.Server:
    """Return a server that ends after ``should_exit`` is set: with its last answer, or at the drain timeout."""
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=partial(BoundedHttp, most_connections=most_connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=drain_timeout_s,
        )
    )


def listen_at(host: str, port: int) -> socket.socket:
    """Return a listening socket, or raise ServeError if the address does not exist or is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ServeError(f"--host, --port: {printable(host)}, {port}: {why}: name another") from error
