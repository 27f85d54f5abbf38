"""From settings to a server that answers: reading, building, listening, and the end."""

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from specdecode_operator.problems import printable
from specdecode_operator.replay.engines.engine import Clock, ReplayEngine, ServedEngine
from specdecode_operator.replay.engines.matching import Matching
from specdecode_operator.replay.server.app import Service, application
from specdecode_operator.replay.server.exposition import Exposition
from specdecode_operator.replay.server.generation import Engines
from specdecode_operator.replay.server.meter import Meter
from specdecode_operator.replay.server.protocol import BoundedHttp
from specdecode_operator.replay.server.recorder import SOURCE, CaptureRecorder
from specdecode_operator.replay.server.source import (
    BLOCK_TOKENS,
    Mode,
    Played,
    ServeError,
    Source,
    SourceSettings,
    play,
)
from specdecode_operator.replay.server.timer_clock import LATE_MS, TimerClock
from specdecode_operator.version import __version__

_LATE_SHARE: Final = 0.01
_NS_PER_S: Final = 1_000_000_000
_BACKLOG: Final = 4096

MOST_CONNECTIONS: Final = 2048
"""Connections at a time unless the user says otherwise; with unfinished headers of 64 KiB each they hold 128 MiB."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How to serve."""

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
    """All that a server is made of."""

    app: ASGIApp
    played: Played
    recorder: CaptureRecorder | None


def serve(settings: ServeSettings, source: Source, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it; what is being answered then is answered to its end.

    Raises
    ------
    ServeError
        The address cannot be listened at.
    """
    # What was read stays: looking through it for garbage again and again would hold up tokens.
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
    server = http_server(
        assembled.app, drain_timeout_s=settings.drain_timeout_s, most_connections=settings.most_connections
    )
    _order_failures(settings, clock, loop)
    serving = loop.create_task(server.serve(sockets=[listener]))
    k = source.num_speculative_tokens
    how = f"K = {k}" if k else "no speculation"
    say(f"replaying {source.told} ({how}) on http://{settings.host}:{listener.getsockname()[1]}")
    await ended.wait()
    server.should_exit = True
    await serving
    clock.stop()
    if assembled.recorder is not None:
        assembled.recorder.close()
        if (failure := assembled.recorder.failure) is not None:
            say(f"note: --record ended early, and its files are left as .part: {failure.strerror}")
    for line in assembled.played.outside():
        say(f"note: {line}")
    if clock.late_timers > _LATE_SHARE * clock.timers:
        share = 100 * clock.late_timers / clock.timers
        say(f"note: {share:.1f} % of bursts came more than {LATE_MS:g} ms too late: this machine was too busy for it")


class _Server(uvicorn.Server):
    """A server that leaves signals to us: the library's would end the process as if it had been killed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def assemble(settings: ServeSettings, source: Source, clock: TimerClock) -> Assembled:
    """Return the application, the engine that plays, and who records what it does.

    Raises
    ------
    ServeError
        There is no place to record it.
    """
    played = play(settings.source, source, clock)
    recorder = _recorder(settings, source, clock, played.engine)
    return Assembled(application(_service(settings, source, clock, played.engine, recorder)), played, recorder)


def http_server(app: ASGIApp, *, drain_timeout_s: int, most_connections: int = MOST_CONNECTIONS) -> uvicorn.Server:
    """Return a server that ends when its ``should_exit`` is set, and answers are at their end or the time is over."""
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


def _service(
    settings: ServeSettings, source: Source, clock: Clock, engine: ServedEngine, recorder: CaptureRecorder | None
) -> Service:
    meta, wanted, model = source.meta, settings.source, source.model
    names = settings.served_model_names or (meta.model or "replay",)
    meter = Meter(clock, source.num_speculative_tokens, recorder, wanted.time_scale)
    block_tokens = meta.block_size or BLOCK_TOKENS
    length = wanted.max_model_len
    if length is None and wanted.mode is Mode.MODELLED and model is not None:
        length = model.origin.limits.max_model_len
    return Service(
        engines=Engines(
            engine=engine,
            meter=meter,
            hash_blocks_of=block_tokens if model is not None or wanted.matching is Matching.PREFIX else None,
            max_model_len=length,
        ),
        exposition=Exposition(
            meter,
            engine,
            names[0],
            settings.load_factor,
            _cache_config(wanted.kv_cache_tokens or source.kv_cache_tokens, block_tokens, length),
        ),
        models=names,
        created=int(time.time()),
        version=meta.vllm_version or f"specdecode-replay-{__version__}",
        api_keys=settings.api_keys,
        fail_share=settings.fail_share,
        random=Random(wanted.seed),  # noqa: S311  not for secrets
    )


def _cache_config(tokens: int | None, block_tokens: int, max_model_len: int | None) -> Mapping[str, str]:
    """Return labels as vLLM writes them: None for what is not known."""
    concurrency = tokens / max_model_len if tokens is not None and max_model_len is not None else None
    return {
        "block_size": str(block_tokens),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "kv_cache_max_concurrency": str(concurrency),
        "kv_cache_size_tokens": str(tokens),
        "num_gpu_blocks": str(None if tokens is None else tokens // block_tokens),
    }


def _recorder(
    settings: ServeSettings, source: Source, clock: TimerClock, engine: ReplayEngine
) -> CaptureRecorder | None:
    if settings.record is None:
        return None
    zero_s = clock.zero_ns / _NS_PER_S
    meta = msgspec.structs.replace(
        source.meta,
        source=SOURCE,
        zero_monotonic_s=zero_s,
        zero_wall_s=time.time() - time.monotonic() + zero_s,
    )
    try:
        return CaptureRecorder(settings.record, meta, engine, source.num_speculative_tokens)
    except OSError as error:
        raise ServeError(
            f"--record: {printable(str(settings.record))}: {error.strerror}: name another folder"
        ) from error


def listen_at(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises
    ------
    ServeError
        There is no such address, or it is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ServeError(f"--host, --port: {printable(host)}, {port}: {why}: name another") from error


def _order_failures(settings: ServeSettings, clock: TimerClock, loop: asyncio.AbstractEventLoop) -> None:
    if settings.hang_after_s is not None:
        # Requests are still taken, and health is still said to be good: as where a kernel never ends.
        loop.call_later(settings.hang_after_s, clock.stop)
    if settings.crash_after_s is not None:
        loop.call_later(settings.crash_after_s, os._exit, 1)
