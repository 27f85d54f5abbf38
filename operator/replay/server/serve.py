"""From settings to a server that answers: reading, building, listening, and the end."""

import asyncio
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import uvicorn
import uvloop
from starlette.types import ASGIApp

from specdecode_operator.problems import printable
from specdecode_operator.replay.engines.acceptance import AcceptanceDraws, AcceptanceSchedule
from specdecode_operator.replay.engines.drafting import Drafting, assumed_drafting, recorded_drafting
from specdecode_operator.replay.engines.engine import Clock, ReplayEngine
from specdecode_operator.replay.engines.matching import Matching, Unmatched, matcher, repeating
from specdecode_operator.replay.engines.steps import StepsEngine, StepsSettings, largest_batch_tokens
from specdecode_operator.replay.recording.read import concatenated, read_recording, read_steps
from specdecode_operator.replay.recording.recording import Recording
from specdecode_operator.replay.server.app import Service, application
from specdecode_operator.replay.server.exposition import Exposition
from specdecode_operator.replay.server.generation import Engines
from specdecode_operator.replay.server.meter import Meter
from specdecode_operator.replay.server.recorder import CaptureRecorder, meta_of_replay
from specdecode_operator.replay.server.timer_clock import LATE_MS, TimerClock
from specdecode_operator.version import __version__

_BLOCK_TOKENS: Final = 16
"""Of a trace whose header does not say it, as vllm-vcr has it."""
_LATE_SHARE: Final = 0.01
_NS_PER_S: Final = 1_000_000_000
_BACKLOG: Final = 4096


class ServeError(Exception):
    """Why nothing is served, and what to do, in one line."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How to serve."""

    traces: Sequence[Path]
    skip_bad_lines: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    max_model_len: int | None = None
    matching: Matching = Matching.ARRIVAL
    unmatched: Unmatched = Unmatched.REPEAT
    kv_cache_tokens: int | None = None
    time_scale: float = 1.0
    load_factor: float = 1.0
    acceptance: AcceptanceSchedule | None = None
    seed: int = 0
    record: Path | None = None
    slow_start_s: float = 0.0
    fail_share: float = 0.0
    hang_after_s: float | None = None
    crash_after_s: float | None = None
    drain_timeout_s: int = 60


@dataclass(frozen=True)
class Replayed:
    """What was read, to be played."""

    recording: Recording
    drafting: Sequence[Drafting] | None
    notes: Sequence[str]  # what somebody should know


def read(settings: ServeSettings) -> Replayed:
    """Read what is to be played.

    Raises
    ------
    RecordingError
        A trace cannot be read, or two of them do not go together.
    ServeError
        A setting does not go with what was read.
    """
    recordings = [read_recording(path, skip_bad_lines=settings.skip_bad_lines) for path in settings.traces]
    recording, notes = concatenated(recordings), list[str]()
    if recording.skipped_lines:
        notes.append(f"{recording.skipped_lines} lines that cannot be read were left out")
    if all(request.arrival_ms is None for request in recording.requests):
        notes.append("no record has arrival_ms: they are used in the order of the file")
    if all(request.token_ids is None for request in recording.requests):
        notes.append("no record has token ids: return_token_ids gets those of made-up words")
    if settings.matching is Matching.PREFIX and not any(request.block_hashes for request in recording.requests):
        raise ServeError("--match: prefix: no record has block_hashes: match by arrival or request-id")
    if settings.acceptance is not None and not recording.num_speculative_tokens:
        raise ServeError("--acceptance: the trace is of an engine without speculation: leave it out, or name another")
    drafting = _drafting(recordings, notes) if recording.num_speculative_tokens else None
    return Replayed(recording, drafting, notes)


def _drafting(recordings: Sequence[Recording], notes: list[str]) -> Sequence[Drafting] | None:
    """Return what was drafted for each request, as far as step statistics say it."""
    found, told = list[Drafting](), False
    for recording in recordings:
        of_steps = recorded_drafting(recording, read_steps(recording.steps)) if recording.steps is not None else None
        told = told or of_steps is not None
        if of_steps is None and recording.steps is not None:
            notes.append(f"{recording.steps.name} does not fit the trace: K drafted tokens are assumed in each step")
        k = recording.num_speculative_tokens
        found += of_steps or [assumed_drafting(request, k) for request in recording.requests]
    return found if told else None


def serve(settings: ServeSettings, replayed: Replayed, say: Callable[[str], None]) -> None:
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
        runner.run(_serve(settings, replayed, say))


async def _serve(settings: ServeSettings, replayed: Replayed, say: Callable[[str], None]) -> None:
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
    app, recorder = assembled(settings, replayed, clock)
    server = http_server(app, settings.drain_timeout_s)
    _order_failures(settings, clock, loop)
    serving = loop.create_task(server.serve(sockets=[listener]))
    say(f"{_told(replayed.recording)} on http://{settings.host}:{listener.getsockname()[1]}")
    await ended.wait()
    server.should_exit = True
    await serving
    clock.stop()
    if recorder is not None:
        recorder.close()
    if clock.late_timers > _LATE_SHARE * clock.timers:
        share = 100 * clock.late_timers / clock.timers
        say(f"note: {share:.1f} % of bursts came more than {LATE_MS:g} ms too late: this machine was too busy for it")


class _Server(uvicorn.Server):
    """A server that leaves signals to us: the library's would end the process as if it had been killed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def assembled(settings: ServeSettings, replayed: Replayed, clock: TimerClock) -> tuple[ASGIApp, CaptureRecorder | None]:
    """Return the application, and who records what it does.

    Raises
    ------
    ServeError
        There is no place to record it.
    """
    engine = _engine(settings, replayed, clock)
    recorder = _recorder(settings, replayed.recording, clock, engine)
    return application(_service(settings, replayed.recording, clock, engine, recorder)), recorder


def http_server(app: ASGIApp, drain_timeout_s: int) -> uvicorn.Server:
    """Return a server that ends when its ``should_exit`` is set, and answers are at their end or the time is over."""
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
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
    settings: ServeSettings,
    recording: Recording,
    clock: Clock,
    engine: ReplayEngine,
    recorder: CaptureRecorder | None,
) -> Service:
    meta = recording.meta
    names = settings.served_model_names or (meta.model or recording.trace.name.partition(".")[0],)
    meter = Meter(clock, recording.num_speculative_tokens, recorder)
    block_tokens = meta.block_size or _BLOCK_TOKENS
    cache_tokens = settings.kv_cache_tokens or largest_batch_tokens(recording)
    length = settings.max_model_len
    return Service(
        engines=Engines(
            engine=engine,
            meter=meter,
            hash_blocks_of=block_tokens if settings.matching is Matching.PREFIX else None,
            max_model_len=length,
        ),
        exposition=Exposition(
            meter,
            engine,
            names[0],
            settings.load_factor,
            {
                "block_size": str(block_tokens),
                "cache_dtype": "auto",
                "enable_prefix_caching": "True",
                "kv_cache_max_concurrency": str(cache_tokens / length) if length else "None",
                "kv_cache_size_tokens": str(cache_tokens),
                "num_gpu_blocks": str(cache_tokens // block_tokens),
            },
        ),
        models=names,
        created=int(time.time()),
        version=meta.vllm_version or f"specdecode-replay-{__version__}",
        api_keys=settings.api_keys,
        fail_share=settings.fail_share,
        random=Random(settings.seed),  # noqa: S311  not for secrets
    )


def _recorder(
    settings: ServeSettings, recording: Recording, clock: TimerClock, engine: ReplayEngine
) -> CaptureRecorder | None:
    if settings.record is None:
        return None
    meta = meta_of_replay(recording, clock.zero_ns / _NS_PER_S)
    try:
        return CaptureRecorder(settings.record, meta, engine, recording.num_speculative_tokens)
    except OSError as error:
        raise ServeError(
            f"--record: {printable(str(settings.record))}: {error.strerror}: name another folder"
        ) from error


def _engine(settings: ServeSettings, replayed: Replayed, clock: Clock) -> ReplayEngine:
    recording = replayed.recording
    match = matcher(settings.matching, recording.requests)
    if settings.unmatched is Unmatched.REPEAT:
        match = repeating(match, recording.requests)
    acceptance = None
    if settings.acceptance is not None:
        random = Random(settings.seed)  # noqa: S311  not for secrets
        acceptance = AcceptanceDraws(settings.acceptance, recording.num_speculative_tokens, random)
    steps = StepsSettings(
        time_scale=settings.time_scale, kv_cache_tokens=settings.kv_cache_tokens, acceptance=acceptance
    )
    return StepsEngine(recording, clock, match, steps, replayed.drafting)


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


def _told(recording: Recording) -> str:
    k = recording.num_speculative_tokens
    how = f"K = {k}" if k else "no speculation"
    return f"replaying {len(recording.requests)} requests of {printable(str(recording.meta.model))} ({how})"
