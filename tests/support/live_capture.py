"""Peers of the collector of live captures: sidecar and recorder of an engine pod in one, over TCP.

What an API server records is a `Recording`, with ids, counters and tally as of a live capture.
"""

import asyncio
import hashlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_operator.capture.files.formats import CaptureError
from specdecode_operator.capture.job.collect import CollectJob
from specdecode_operator.capture.job.finish import Published
from specdecode_operator.capture.load.run_settings import ATTEMPT_VARIABLE, NODE_VARIABLE, SETTINGS_VARIABLE
from specdecode_operator.capture.recorder.segment_format import SALTED_BLAKE2B
from tests.support.driven_clock import DrivenClock, driven_clock
from tests.support.recordings import ZERO_S, Recording, Scenario, header
from tests.support.waiting import DEADLINE_S

TOKEN = "5ec2e7" * 8
WALL_S = 1_790_000_000.0
"""What all clocks say when a test begins, unless a pod's is wrong."""


def environment(root: Path, pods: list[str], *, record: dict[str, bool] | None = None, **live: Any) -> dict[str, str]:
    """Return the environment of the container; a window of 600 s, or as given."""
    if not {"duration_seconds", "requests"} & live.keys():
        live["duration_seconds"] = 600.0
    deadline_seconds = live.pop("deadline_seconds", None)
    settings = {
        "namespace": "team",
        "capture": "live",
        "capture_uid": "uid-of-capture",
        "root": str(root),
        "live": {"token": TOKEN, "pods": pods} | live,
        "record": record or {},
        "context": {"image": "vllm:test"},
        "deadline_seconds": deadline_seconds,
    }
    return {SETTINGS_VARIABLE: json.dumps(settings), ATTEMPT_VARIABLE: "attempt-1", NODE_VARIABLE: "node-of-collector"}


@dataclass
class PlayedServer:
    """The lines that one API server of a pod sends for one order."""

    order: dict[str, Any]
    index: int
    servers: int
    lines: list[dict[str, Any]]  # of requests and steps
    boot: str  # another one for each connection
    start: str  # of the engine
    monotonic_s: float  # the host's when it was armed
    wall_s: float
    engines: list[int]
    older: int = 0  # requests that ran when it was armed, of 7 tokens each
    base: float = 1000.0  # vLLM's counters before

    def first_lines(self) -> list[dict[str, Any]]:
        """Return header and counters."""
        first = header(
            self.index,
            self.servers,
            boot=self.boot,
            start=self.start,
            monotonic_s=self.monotonic_s,
            wall_s=self.wall_s,
            engines=self.engines,
            live=True,
            sample_percent=self.order["sample_percent"],
            block_hash=SALTED_BLAKE2B,
            steps=self.order["steps"],
        )
        return [first, self._counters(self.monotonic_s, 0)]

    @property
    def recorded(self) -> list[dict[str, Any]]:
        """The lines within the sample."""
        return [line for line in self.lines if line["k"] != "request" or self._in_sample(line)]

    def last_lines(self, **tally: int) -> list[dict[str, Any]]:
        """Return tally, counters and the last line."""
        requests = [line for line in self.lines if line["k"] == "request"]
        kinds = Counter(line["k"] for line in self.recorded)
        finished = [line for line in requests if line["ended_by"] in {"engine", "stop_string"}]
        tokens = sum(sum(line["chunk_tokens"]) for line in requests) + 7 * self.older
        counts = {
            "admitted": len(requests),
            "recorded": kinds["request"],
            "sampled_out": len(requests) - kinds["request"],
            "dropped": 0,
            "older": self.older,
            "after": 0,
            "finished": len(finished) + self.older,
            "generated_tokens": tokens,
        }
        closed = {"requests": kinds["request"], "steps": kinds["step"], "dropped": 0, "unfinished": 0, "errors": 0}
        return [
            {"k": "tally"} | counts | tally,
            self._counters(self.monotonic_s + 600, 1, len(finished) + self.older, tokens),
            {"k": "closed", "reason": "ordered", "first_error": None} | closed,
        ]

    def _in_sample(self, line: dict[str, Any]) -> bool:
        return bool(int(line["external_id"], 16) % 100 < self.order["sample_percent"])

    def _counters(self, at_s: float, share: int, finished: int = 0, tokens: int = 0) -> dict[str, Any]:
        """Return vLLM's counters, with the drafts of all steps or none."""
        stats = [(line["scheduler"] or {}).get("spec_decoding_stats") for line in self.lines if line["k"] == "step"]
        names = {"drafts": "num_drafts", "draft_tokens": "num_draft_tokens", "accepted_tokens": "num_accepted_tokens"}
        drafted = {ours: share * sum(each[theirs] for each in stats if each) for ours, theirs in names.items()}
        grown = {"requests_finished": finished, "generation_tokens": tokens, "prompt_tokens": 0} | drafted
        return {"k": "counters", "monotonic_s": at_s, "values": {name: self.base + by for name, by in grown.items()}}


@dataclass
class PlayedPod:
    """An engine pod whose traffic is a scenario."""

    name: str
    scenario: Scenario = field(default_factory=lambda: Scenario(warmup=0))
    node: str = "node-1"
    monotonic_s: float = 50_000.0  # of its host when it is armed
    ahead_s: float = 0.0  # of its wall clock
    older: int = 0
    _armed: int = 0

    @property
    def servers(self) -> int:
        return self.scenario.servers

    def hello(self, server: int = 0, **changes: Any) -> dict[str, Any]:
        """Return the first line of its sidecar for one API server."""
        said: dict[str, Any] = {
            "hello": 1,
            "token": TOKEN,
            "pod": self.name,
            "pod_uid": f"uid-{self.name}",
            "node": self.node,
            "socket": f"{100 + server}.sock",
            "sockets": self.servers,
            "note": None,
        }
        return said | changes

    def played(self, server: int, order: dict[str, Any], **changes: Any) -> PlayedServer:
        """Return what an API server sends after an order."""
        self._armed += 1
        salt, shift_s = bytes.fromhex(order["salt"]), self.monotonic_s - ZERO_S
        lines = []
        for line in Recording(self.scenario).segments[server][1:-1]:
            if line["k"] == "request":
                moved = {name: line[name] + shift_s for name in ("arrival_monotonic_s", "queued_s", "scheduled_s")}
                moved["chunk_s"] = [stamp_s + shift_s for stamp_s in line["chunk_s"]]
                ids = {name: _salted(salt, f"{self.name}/{line[name]}") for name in ("id", "external_id")}
                lines.append(line | moved | ids)
            elif line["k"] == "step" and order["steps"]:
                lines.append(line | {"t": line["t"] + shift_s})
        usual: dict[str, Any] = {
            "boot": f"{self._armed:08x}",
            "start": f"start-of-{self.name}",
            "monotonic_s": self.monotonic_s,
            "wall_s": WALL_S + self.ahead_s,
            "engines": list(range(self.scenario.engines)),
            "older": self.older,
        }
        return PlayedServer(order, server, self.servers, lines, **(usual | changes))


def _salted(salt: bytes, text: str) -> str:
    return hashlib.blake2b(text.encode(), key=salt, digest_size=8).hexdigest()


class Peer:
    """One connection to the collector."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def order(self) -> dict[str, Any] | None:
        """Return the next order; None when the collector has closed the connection."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                line = await self._reader.readline()
        except ConnectionError:
            return None
        return msgspec.json.decode(line) if line else None

    async def send(self, *lines: dict[str, Any] | bytes) -> None:
        """Send lines of JSON, or bytes as they are."""
        parts = [line if isinstance(line, bytes) else msgspec.json.encode(line) + b"\n" for line in lines]
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def send_what_is_read(self, data: bytes) -> None:
        """Send bytes until the collector closes the connection."""
        with suppress(ConnectionError):
            await self.send(data)

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def armed(self, pod: PlayedPod, server: int = 0, **changes: Any) -> PlayedServer:
        """Wait for the order to record, send the first lines, and return the rest."""
        order = await self.order()
        assert order is not None, "the connection was closed"
        played = pod.played(server, order["arm"], **changes)
        await self.send(*played.first_lines())
        return played

    async def finish(self, played: PlayedServer, **tally: int) -> None:
        """Wait for the order to finish, and send the last lines."""
        order = await self.order()
        assert order is not None, "the connection was closed"
        assert order.keys() == {"disarm"}
        await self.send(*played.last_lines(**tally))
        assert await self.order() == {"bye": True}


class Running:
    """A collector in the event loop of a test, whose clocks the test drives."""

    def __init__(self, job: CollectJob, clock: DrivenClock) -> None:
        self.job = job
        self.clock = clock
        self.wall_s = WALL_S
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._task = asyncio.create_task(job.run(self._listener))

    async def connect(self, *first: dict[str, Any] | bytes) -> Peer:
        """Open a connection and send its first line."""
        peer = Peer(*await asyncio.open_connection(*self._listener.getsockname()[:2]))
        with suppress(ConnectionError):
            await peer.send(*first)
        return peer

    async def join(self, pod: PlayedPod) -> list[Peer]:
        """Connect all API servers of a pod."""
        return [await self.connect(pod.hello(server)) for server in range(pod.servers)]

    async def received(self, lines: int) -> None:
        """Wait until this many lines are on the volume."""
        await self.until(lambda: self.written() >= lines, f"{lines} lines in the segments")

    def written(self) -> int:
        """Return the number of lines of all segments."""
        return sum(path.read_bytes().count(b"\n") for path in self.segments)

    @property
    def segments(self) -> list[Path]:
        """The files of the segments, in the order of their names."""
        return sorted(self.job.places.segments.glob("*.jsonl"))

    def connected(self, pod: str) -> int:
        """Return the number of API servers of a pod that the collector knows to be connected."""
        return self.job.collection.connected(pod) if self.job.collection else 0

    @property
    def connections(self) -> int:
        """Number of open connections to the collector."""
        return self.job.collection.connections if self.job.collection else 0

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let the collector work until a condition holds."""
        end_s = time.perf_counter() + DEADLINE_S
        while not condition():
            assert not self._task.done(), f"the collector has ended: {what}"
            assert time.perf_counter() < end_s, what
            await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Put all clocks forward."""
        self.clock.advance(seconds)
        self.wall_s += seconds

    async def published(self) -> Published:
        """Return what was published."""
        return await self._task

    async def failure(self) -> CaptureError:
        """Return the error that ended the collector."""
        with pytest.raises(CaptureError) as failure:
            await self._task
        return failure.value

    async def cancel(self) -> None:
        """End the collector if it still runs."""
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._task


@asynccontextmanager
async def collector(variables: dict[str, str]) -> AsyncIterator[Running]:
    """Run a collector until the block ends; its wall clock stands still unless the test puts it forward."""
    with driven_clock() as clock, pytest.MonkeyPatch.context() as patch:
        running = Running(CollectJob(variables), clock)
        patch.setattr(time, "time", lambda: running.wall_s)
        try:
            yield running
        finally:
            await running.cancel()


async def publish(root: Path, *pods: PlayedPod, **settings: Any) -> Published:
    """Record the traffic of pods from beginning to end, and publish it."""
    async with collector(environment(root, [pod.name for pod in pods], **settings)) as running:
        joined = [(pod, peers) for pod in pods for peers in [await running.join(pod)]]
        played = [(peer, await peer.armed(pod, server)) for pod, peers in joined for server, peer in enumerate(peers)]
        for peer, each in played:
            await peer.send(*each.recorded)
        await running.received(sum(2 + len(each.recorded) for _, each in played))
        running.advance(600)
        for peer, each in played:
            await peer.finish(each)
        return await running.published()
