"""A proxy between a client and the API server, where calls go wrong as they are told to.

It runs in a thread of its own, listens on this machine without TLS, and passes each caller's own token on:

    with FaultProxy(kubeconfig) as proxy:
        through = proxy.write_kubeconfig(kubeconfig_of_the_operator, folder / "through")
        proxy.faults = [Fault(Refuse(409), "patch deployments.apps", times=1)]
"""

import asyncio
import itertools
import json
import socket
import ssl
import struct
import threading
from base64 import b64decode
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Self

import aiohttp
import yaml
from aiohttp import web
from yarl import URL

from tests.support.faults.calls import Call, Moment, call_of
from tests.support.faults.faults import (
    Armed,
    Delay,
    DelayEvent,
    DropEvent,
    EndWatch,
    Fault,
    OfCall,
    Refuse,
    RepeatEvent,
    Reset,
    Silence,
    Stale,
    Truncate,
)

_REMEMBERED_ANSWERS = 1000
_KEPT_CALLS = 200_000
_NOT_PASSED_ON = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
_JSON = {"Content-Type": "application/json"}
_REASONS = {401: "Unauthorized", 409: "Conflict", 410: "Expired", 429: "TooManyRequests", 503: "ServiceUnavailable"}
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)

Hook = Callable[[Call, Moment], bool]
"""Is called in the proxy's thread at both moments of each call; the call is cut off where it returns True."""


class FaultProxy:
    """The proxy, its faults, and the calls that it has seen."""

    def __init__(self, kubeconfig: Path) -> None:
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self._server = cluster["server"].rstrip("/")
        authority = cluster.get("certificate-authority-data")
        self._tls = ssl.create_default_context(cadata=b64decode(authority).decode()) if authority else True
        self.calls: deque[Call] = deque(maxlen=_KEPT_CALLS)
        """What was asked, in order; a test may clear it."""
        self.hook: Hook | None = None
        self.address = ""
        self._armed = Armed()
        self._numbers = itertools.count(1)
        self._answers: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What goes wrong from now on; what is given again counts, draws and remembers anew."""
        return self._armed.faults

    @faults.setter
    def faults(self, faults: Iterable[Fault]) -> None:
        self._armed = Armed(faults)
        self._answers.clear()

    def write_kubeconfig(self, kubeconfig: Path, destination: Path) -> Path:
        """Write a kubeconfig of the same user, who must have a token, that leads through the proxy."""
        config = yaml.safe_load(kubeconfig.read_text())
        for each in config["clusters"]:
            each["cluster"] = {"server": self.address}
        destination.write_text(yaml.safe_dump(config))
        return destination

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_NO_TIMEOUT, auto_decompress=False)
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = call_of(next(self._numbers), request, body)
        self.calls.append(call)
        faults = self._armed.of_call(call.permission, call.name)
        call.faults = " ".join(map(str, faults))
        if self.hook and self.hook(call, "before"):
            return _reset(request, call)
        for fault in faults:
            match fault:
                case Delay(seconds):
                    await asyncio.sleep(seconds)
                case Reset(after=False):
                    return _reset(request, call)
                case Refuse(status, retry_after_s):
                    call.status = status
                    return _refusal(status, retry_after_s)
        try:
            return await self._pass_on(request, call, body, faults)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):  # one of both sides is gone
            return _reset(request, call)

    async def _pass_on(self, request: web.Request, call: Call, sent: bytes, faults: list[OfCall]) -> web.StreamResponse:
        remembered = self._answers.get(call.path) if Stale() in faults and call.verb in {"get", "list"} else None
        if remembered:
            call.status, body = remembered
            return web.Response(status=call.status, body=body, headers=_JSON)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_PASSED_ON}
        headers["Accept-Encoding"] = "identity"
        url = URL(self._server + call.path, encoded=True)
        call.passed = True
        async with self._session.request(call.method, url, headers=headers, data=sent or None) as answer:
            kind = answer.headers.get("Content-Type", "application/json")
            if call.verb == "watch" and answer.ok:
                call.status = answer.status
                return await self._watch(request, call, answer, kind)
            body = await answer.read()
        call.status = answer.status
        if (self.hook and self.hook(call, "after")) or Reset(after=True) in faults:
            return _reset(request, call)
        if call.verb in {"get", "list"} and answer.ok:
            self._remember(call.path, answer.status, body)
        passed_back = {name: answer.headers[name] for name in ("Retry-After", "Warning") if name in answer.headers}
        for fault in faults:
            if isinstance(fault, Truncate):
                return await _truncated(request, answer.status, body, kind, fault)
        return web.Response(status=answer.status, body=body, headers={"Content-Type": kind, **passed_back})

    def _remember(self, path: str, status: int, body: bytes) -> None:
        self._answers[path] = status, body
        self._answers.move_to_end(path)
        if len(self._answers) > _REMEMBERED_ANSWERS:
            self._answers.popitem(last=False)

    async def _watch(
        self, request: web.Request, call: Call, answer: aiohttp.ClientResponse, kind: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
        await response.prepare(request)
        async for line in _lines(answer.content):
            copies = 1
            for fault in self._armed.of_event(call.permission):
                match fault:
                    case DelayEvent(seconds):
                        await asyncio.sleep(seconds)
                    case DropEvent():
                        copies = 0
                    case RepeatEvent():
                        copies = 2
                    case Silence():
                        await asyncio.Event().wait()  # until the client has had enough
                    case EndWatch(status):
                        event = {"type": "ERROR", "object": _status(status)}
                        await response.write(json.dumps(event).encode() + b"\n")
                        return response
            for _ in range(copies):
                await response.write(line)
        return response


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines, whatever their length."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"


def _status(status: int) -> dict[str, object]:
    reason = _REASONS.get(status, "InternalError")
    message = f"{reason}: made by the fault proxy"
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason} | {
        "message": message
    }


def _refusal(status: int, retry_after_s: int | None) -> web.Response:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return web.json_response(_status(status), status=status, headers=headers)


def _reset(request: web.Request, call: Call) -> web.Response:
    """End the connection as a machine does that knows nothing of it: by a TCP RST, not in order."""
    call.cut = True
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response(status=502)  # goes nowhere


async def _truncated(request: web.Request, status: int, body: bytes, kind: str, fault: Truncate) -> web.StreamResponse:
    half = body[: len(body) // 2]
    told = len(body) if fault.is_noticed else len(half)
    response = web.StreamResponse(status=status, headers={"Content-Type": kind, "Content-Length": str(told)})
    await response.prepare(request)
    await response.write(half)
    if fault.is_noticed and request.transport is not None:
        request.transport.close()
    return response
