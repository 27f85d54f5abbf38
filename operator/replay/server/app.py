"""The ASGI application: vLLM's paths, its errors, and failures that somebody ordered."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.replay.engines.engine import UnmatchedRequestError
from specdecode_operator.replay.server.events import error
from specdecode_operator.replay.server.exposition import Exposition
from specdecode_operator.replay.server.generation import Engines, Streamed, Whole
from specdecode_operator.replay.server.requests import Asked, RefusedError, bad_request, read_chat, read_completion
from specdecode_operator.replay.server.wire import ABANDON, Wire

_LARGEST_BODY_BYTES: Final = 16 * 2**20
_MOST_HELD_BYTES: Final = 256 * 2**20
"""Memory of all request bodies that are being read, and of all prompts that are being answered."""

_LONGEST_ID: Final = 256
_SHOWN: Final = 100


@dataclass(frozen=True, kw_only=True)
class Service:
    """What is served."""

    engines: Engines
    exposition: Exposition
    models: Sequence[str]  # names that requests may have; the first is given to those that have none
    created: int  # seconds since 1970
    version: str
    api_keys: Sequence[str] = ()
    fail_share: float = 0.0  # of requests that get a 500
    random: Random


def application(service: Service) -> ASGIApp:
    """Return the application."""
    bodies = _Bodies()
    # The library's router alone: its middleware would take part in every event, and here errors have a form already.
    app: ASGIApp = Router(
        [
            _Route("/v1/completions", _Answers(service, read_completion, bodies), methods=["POST"]),
            _Route("/v1/chat/completions", _Answers(service, read_chat, bodies), methods=["POST"]),
            _Route("/v1/models", _models(service)),
            _Route("/health", _nothing_wrong, methods=["GET"]),
            _Route("/ping", _nothing_wrong, methods=["GET", "POST"]),
            _Route("/version", _version(service)),
            _Route("/metrics", _metrics(service)),
        ],
        default=_not_found,
    )
    return _Keyed(app, service.api_keys) if service.api_keys else app


class _Route(Route):
    """A path that says in OpenAI's form, too, which methods it does not take."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.methods and scope["method"] not in self.methods:
            refused = _json(error(405, "Method Not Allowed", "Method Not Allowed"), 405)
            refused.headers["Allow"] = ", ".join(sorted(self.methods))
            await refused(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


class _Answers:
    """A path whose answers come from the engine."""

    def __init__(self, service: Service, read: Callable[[bytes], Asked], bodies: "_Bodies") -> None:
        self._service = service
        self._read = read
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = _Held(self._bodies)
        try:
            data = await _body(receive, held)
            if data is None:
                return
            asked = self._read(data)
            del data
            held.become(asked.held_bytes)
            await self._answer(asked, scope, receive, send)
        except RefusedError as refused:
            body = error(refused.status, refused.kind, str(refused), refused.parameter)
            await _json(body, refused.status)(scope, receive, send)
        except asyncio.CancelledError:
            # The server ends, and has waited as long as it was told to: it closes the connection.
            return
        finally:
            held.release()

    async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        model = asked.model or service.models[0]
        if model not in service.models:
            raise RefusedError(
                404, "NotFoundError", f"The model `{clip(printable(model), _SHOWN)}` does not exist.", "model"
            )
        _refuse_too_long(asked, service.engines.max_model_len)
        if service.fail_share and service.random.random() < service.fail_share:
            raise RefusedError(500, "InternalServerError", "a failure that --fail-share ordered")
        request_id = Request(scope).headers.get("x-request-id", "")[:_LONGEST_ID] or None
        if asked.stream:
            wire = Wire(send, service.engines.unread, scope["extensions"][ABANDON]["close"])
            streamed = Streamed(service.engines, asked, model, request_id, wire)
            if await _begin(streamed, receive):
                await streamed.respond(receive)
        else:
            whole = Whole(service.engines, asked, model, request_id)
            if await _begin(whole, receive):
                await _json(await whole.document(receive), 200)(scope, receive, send)


async def _begin(generation: Streamed | Whole, receive: Receive) -> bool:
    try:
        return await generation.begin(receive)
    except UnmatchedRequestError as unmatched:
        message = f"{unmatched}: the trace is used up, or has none like it: --unmatched says what comes then"
        raise RefusedError(409, "ConflictError", message) from unmatched


def _refuse_too_long(asked: Asked, max_model_len: int | None) -> None:
    if max_model_len is None:
        return
    prompt_tokens = max(prompt.tokens for prompt in asked.prompts)
    wanted = asked.max_tokens or 1
    if prompt_tokens + wanted > max_model_len:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} output "
            f"tokens and your prompt contains at least {prompt_tokens} input tokens. Please reduce the length of the "
            "input prompt or the number of requested output tokens.",
            "input_tokens",
        )


class _Bodies:
    """Bytes of all request bodies that the server holds."""

    held_bytes = 0


class _Held:
    """The part of one request in those bytes, until it is released."""

    def __init__(self, bodies: _Bodies) -> None:
        self._bodies = bodies
        self._own_bytes = 0

    def add(self, more_bytes: int) -> None:
        """Hold more bytes; refuse the request if all bodies together are too large."""
        if self._bodies.held_bytes + more_bytes > _MOST_HELD_BYTES:
            raise RefusedError(
                503, "ServiceUnavailableError", f"request bodies of more than {_MOST_HELD_BYTES} bytes are held already"
            )
        self._bodies.held_bytes += more_bytes
        self._own_bytes += more_bytes

    def become(self, own_bytes: int) -> None:
        """Hold these bytes in place of the earlier ones; refuse the request if all together are too large."""
        self.release()
        self.add(own_bytes)

    def release(self) -> None:
        """Give all bytes of the request back."""
        self._bodies.held_bytes -= self._own_bytes
        self._own_bytes = 0


async def _body(receive: Receive, held: _Held) -> bytes | None:
    """Return the whole body; None if the client has gone before its end."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        held.add(len(part))
        data += part
        if len(data) > _LARGEST_BODY_BYTES:
            raise RefusedError(413, "BadRequestError", f"the body has more than {_LARGEST_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(data)


def _json(body: bytes, status: int) -> Response:
    return Response(body, status, media_type="application/json")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _json(error(404, "NotFoundError", "Not Found"), 404)(scope, receive, send)


async def _nothing_wrong(_request: Request) -> Response:
    return Response(status_code=200)


def _models(service: Service) -> Callable[[Request], Awaitable[Response]]:
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

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": cards})

    return models


def _version(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def version(_request: Request) -> Response:
        return JSONResponse({"version": service.version})

    return version


def _metrics(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(_request: Request) -> Response:
        return Response(service.exposition.text(), media_type="text/plain; version=1.0.0; charset=utf-8")

    return metrics


class _Keyed:
    """Lets only those in who know a key, to paths below /v1: as vLLM does it."""

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
