"""How fast the replay server is.

Events a second against the same ASGI stack that sends prebuilt events and nothing else; error of gaps at 200 streams,
and with a thousand. Server and client are processes of their own. Ratios are of CPU time of the server's process, in
rounds that alternate: on a machine that does other work wall time tells of that. For gaps both processes go before
others where the kernel lets them; else the machine's own error stands beside.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, at_most, peer

_MIXES: Final = {"1": [1], "2.5": [1, 2, 3, 4], "5": [5]}
"""Tokens of the bursts, in turn."""
_STREAMS: Final = 64
_BURSTS: Final = 600
_ROUNDS: Final = 5
_NS_PER_S: Final = 1_000_000_000
_AIMED_STREAMS: Final = 200
_NAPS: Final = 800
_NAP_S: Final = 0.005


@dataclass
class Stream:
    """What a client got of one answer."""

    stamps_s: list[float] = field(default_factory=list)  # of each event with tokens
    events: int = 0


class _Reader(asyncio.Protocol):
    """Counts events of one answer, as they arrive."""

    def __init__(self, request: bytes, *, stamps: bool) -> None:
        self.found = Stream()
        self.done = asyncio.get_running_loop().create_future()
        self._request = request
        self._stamps = stamps
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: {")
        self.found.events += count
        if self._stamps:
            self.found.stamps_s += [time.monotonic()] * count
        if b"[DONE]" in self._tail + data and not self.done.done():
            self.done.set_result(None)
            self._transport.close()
        self._tail = data[-6:]

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  a method of the library's
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server hung up"))


async def _streams(port: int, count: int, *, stamps: bool) -> list[Stream]:
    """Read so many answers at once."""
    body = json.dumps({"prompt": "hello", "stream": True, "max_tokens": 1_000_000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(count):
        _, reader = await loop.create_connection(lambda: _Reader(head + body, stamps=stamps), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*[reader.done for reader in readers])
    return [reader.found for reader in readers]


def _read_streams(port: int, count: int, *, stamps: bool = False) -> list[Stream]:
    import uvloop  # noqa: PLC0415  beside the server only

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_streams(port, count, stamps=stamps))


def _cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / _NS_PER_S


@contextmanager
def server_process(*command: str) -> Iterator[tuple[int, int, float]]:
    """Start a server; yields its process, its port, and how long it took until it said it."""
    began_s = time.monotonic()
    process = subprocess.Popen(  # noqa: S603  ours
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r":(\d+)\s*$", line)
        if found is None:
            raise SystemExit(f"no server: {line}")
        yield process.pid, int(found[1]), time.monotonic() - began_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def replay_command(trace: Path, *options: str) -> Sequence[str]:
    """Return what Python runs to serve a trace."""
    return ("-m", "specdecode_operator", "replay", "serve", str(trace), "--port", "0", *options)


def write_trace(path: Path, gaps_ms: Sequence[Sequence[float]], tokens: Sequence[int]) -> Path:
    """Write a trace of requests with these gaps."""
    with path.open("w") as stream:
        k = max(tokens) - 1
        speculative = {"method": "ngram", "num_speculative_tokens": k} if k else None
        stream.write(json.dumps({"meta": {"model": "bench", "speculative": speculative}}) + "\n")
        for number, of_request in enumerate(gaps_ms):
            sizes = [tokens[place % len(tokens)] for place in range(len(of_request))]
            record = {
                "prompt_tokens": 8,
                "output_tokens": 1 + sum(sizes),
                "ttft_ms": 200.0,
                "itl_ms": list(of_request),
                "itl_tokens": sizes,
                "arrival_ms": float(number),
                "finish_reason": "length",
            }
            stream.write(json.dumps(record) + "\n")
    return path


def _events_per_cpu_s(server: tuple[int, int, float]) -> tuple[float, float]:
    """Return events by second of the server's CPU time, and by second."""
    pid, port, _ = server
    before_s, began_s = _cpu_s(pid), time.monotonic()
    events = sum(stream.events for stream in _read_streams(port, _STREAMS))
    wall_s = time.monotonic() - began_s
    return events / (_cpu_s(pid) - before_s), events / wall_s


def _throughput(folder: Path) -> Iterator[Figure]:
    for name, tokens in _MIXES.items():
        trace = write_trace(folder / f"{name}.jsonl", [[0.0] * _BURSTS] * _STREAMS, tokens)
        bare = ("-m", "bench.replay.speed", "--bare", json.dumps(tokens), "--bursts", str(_BURSTS))
        with server_process(*replay_command(trace)) as ours, server_process(*bare) as theirs:
            rounds = [(_events_per_cpu_s(ours), _events_per_cpu_s(theirs)) for _ in range(_ROUNDS)]
        mine = statistics.median(mine for (mine, _), _ in rounds)
        other = statistics.median(other for _, (other, _) in rounds)
        worst = min(mine / other for (mine, _), (other, _) in rounds)
        by_s = statistics.median(by_s for (_, by_s), _ in rounds)
        mean = sum(tokens) / len(tokens)
        remark = (
            f"{_STREAMS} streams, medians of {_ROUNDS} rounds in turns, worst round {100 * worst:.0f} % of the peer; "
            f"{mean * mine:,.0f} tokens by CPU s, {by_s:,.0f} events by s"
        )
        bound = peer(other, "the same ASGI stack with prebuilt events, same run")
        yield Figure(f"replay without gaps, {name} tokens a burst", mine, "events by CPU s", bound, remark)


def _gap_errors(folder: Path, streams: int, bursts: int, gap_ms: float) -> Figure:
    draw = random.Random(1)  # noqa: S311  not for secrets
    gaps_ms = [[draw.uniform(gap_ms / 2, gap_ms * 1.5) for _ in range(bursts)] for _ in range(streams)]
    trace = write_trace(folder / f"{streams}.jsonl", gaps_ms, [1, 2, 3, 4])
    record = folder / f"recorded-{streams}"
    with server_process(*replay_command(trace, "--record", str(record))) as (pid, port, ready_s):
        sleeper = subprocess.Popen(  # noqa: S603  ours
            [sys.executable, "-m", "bench.replay.speed", "--naps", str(_NAPS)], stdout=subprocess.PIPE, text=True
        )
        before_s, began_s = _cpu_s(pid), time.monotonic()
        found = _read_streams(port, streams, stamps=True)
        share = (_cpu_s(pid) - before_s) / (time.monotonic() - began_s)
    of_client = _errors(gaps_ms, [_gaps(each.stamps_s) for each in found])
    lines = (record / "trace.jsonl").read_text().splitlines()[1:]
    by_arrival = sorted((json.loads(line) for line in lines), key=lambda line: line["arrival_ms"])
    of_server = _errors(gaps_ms, [line["itl_ms"] for line in by_arrival])
    remark = (
        f"{1000 * streams / gap_ms:,.0f} events/s, {100 * share:.0f} % of a core, ready in {ready_s:.2f} s; P50 / P99 "
        f"{_percentiles(of_server)} ms as sent, {_percentiles(of_client)} ms as received, "
        f"{sleeper.communicate()[0].strip()} ms of a process that only sleeps beside them"
    )
    limit = at_most(1) if streams == _AIMED_STREAMS else None
    return Figure(f"replay at {streams:,} streams, error of gaps as sent, P99", p99(of_server), "ms", limit, remark)


def _gaps(stamps_s: Sequence[float]) -> list[float]:
    return [1000 * (after - before) for before, after in pairwise(stamps_s)]


def _errors(recorded_ms: Sequence[Sequence[float]], found_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return how far off each gap is; requests are in the order of arrival in both."""
    return sorted(
        abs(was - is_)
        for of_record, of_found in zip(recorded_ms, found_ms, strict=True)
        for was, is_ in zip(of_record, of_found, strict=True)
    )


def go_first() -> None:
    """Let this process and those that it starts run before others, where the kernel lets them."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _nap_error_ms() -> float:
    end_s = time.monotonic() + _NAP_S
    time.sleep(_NAP_S)
    return 1000 * (time.monotonic() - end_s)


def p99(errors_ms: Sequence[float]) -> float:
    """Return that quantile of errors in their order."""
    return errors_ms[len(errors_ms) * 99 // 100]


def naps(count: int = _NAPS) -> str:
    """Return by how much a process errs that only sleeps, P50 / P99 in ms."""
    return _percentiles(sorted(_nap_error_ms() for _ in range(count)))


def _percentiles(errors_ms: Sequence[float]) -> str:
    return f"{errors_ms[len(errors_ms) // 2]:.2f} / {p99(errors_ms):.2f}"


def _serve_bare(tokens: Sequence[int], bursts: int) -> None:
    """Serve prebuilt events on the same stack: each is sent by itself, as a token is, and nothing is waited for."""
    import uvloop  # noqa: PLC0415  beside the server only
    from starlette.requests import Request  # noqa: PLC0415
    from starlette.responses import StreamingResponse  # noqa: PLC0415
    from starlette.routing import Route, Router  # noqa: PLC0415

    from specdecode_operator.replay.server.completion_answers import DONE, Events, Head  # noqa: PLC0415
    from specdecode_operator.replay.server.serve import http_server, listen_at  # noqa: PLC0415

    form = Events(Head("cmpl-" + 32 * "0", 0, "bench", chat=False), 0)
    sizes = [1] + [tokens[place % len(tokens)] for place in range(bursts)]
    events = [form.words(0, size) for size in sizes]

    async def answer(request: Request) -> StreamingResponse:
        await request.json()

        async def stream() -> Any:
            for event in events:
                yield event
                await asyncio.sleep(0)
            yield DONE

        return StreamingResponse(stream(), media_type="text/event-stream")

    app = Router([Route("/v1/completions", answer, methods=["POST"])])
    listener = listen_at("127.0.0.1", 0)
    print(f"bare on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)

    async def serve() -> None:
        server = http_server(app, drain_timeout_s=1)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
        await server.serve(sockets=[listener])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def figures() -> Iterator[Figure]:
    """Yield events by CPU second, and how far gaps are off."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _throughput(folder)
        go_first()
        yield _gap_errors(folder, streams=_AIMED_STREAMS, bursts=200, gap_ms=40.0)
        yield _gap_errors(folder, streams=1000, bursts=100, gap_ms=100.0)


def main() -> None:
    """Be one of the processes beside the server: the bare stack, or one that sleeps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bare")
    parser.add_argument("--bursts", type=int)
    parser.add_argument("--naps", type=int)
    options = parser.parse_args()
    if options.naps:
        print(naps(options.naps))
    else:
        _serve_bare(json.loads(options.bare), options.bursts)


if __name__ == "__main__":
    main()
