"""Recordings without an engine: segments and client lines as recorder and load generator write them.

A small scheduler runs the requests step by step, so that chunks, statistics and clients agree with each other, and
keeps what an observer inside the engine would have seen.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

ZERO_S = 5000.0
ZERO_WALL_S = 1_790_000_000.0
STEP_S = 0.005
SPREAD_S = 2e-6
"""How far the messages of one step to several API servers are apart (measured on vLLM 0.32)."""


@dataclass
class Scenario:
    """What is to be recorded."""

    requests: int = 12
    warmup: int = 2
    servers: int = 1
    engines: int = 1
    k: int = 4
    output_tokens: int = 20
    prompt_tokens: int = 40
    seed: int = 0
    capture: str = "demo"
    token_ids: bool = False
    step_at_s: float = STEP_S


@dataclass
class Observed:
    """What happened in the engine."""

    chunks: dict[str, list[int]] = field(default_factory=dict)
    running: dict[tuple[int, int], int] = field(default_factory=dict)
    prefill: dict[tuple[int, int], int] = field(default_factory=dict)
    accepted: int = 0
    steps: int = 0


@dataclass
class _Live:
    name: str
    engine: int
    server: int
    arrival_s: float
    left: int
    warmup: bool
    index: int
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    own_running: list[int] = field(default_factory=list)
    own_prefill: list[int] = field(default_factory=list)


def header(server: int = 0, servers: int = 1, **changes: Any) -> dict[str, Any]:
    """Return the first line of a segment."""
    line = {
        "k": "header",
        "schema": 1,
        "recorder": "0.1.0",
        "vllm": "0.32.0",
        "boot": f"b{server:07x}",
        "host": "node-pod",
        "pid": 100 + server,
        "client_index": server,
        "client_count": servers,
        "engines": [0],
        "wall_s": ZERO_WALL_S - 20,
        "monotonic_s": ZERO_S - 20 + server * 0.01,
        "model": "tiny/target",
        "config": {
            "max_num_seqs": 64,
            "block_size": 16,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "data_parallel": 1,
            "gpu_memory_utilization": 0.9,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "speculative": {"method": "ngram", "num_speculative_tokens": 4, "model": None},
        },
        "gpu": "NVIDIA H200",
        "token_ids": False,
        "steps": True,
    }
    return line | changes


def closed(requests: int, steps: int, **changes: Any) -> dict[str, Any]:
    """Return the last line of a segment."""
    line = {"k": "closed", "reason": "ordered", "requests": requests, "steps": steps, "dropped": 0, "unfinished": 0}
    return line | {"errors": 0, "first_error": None} | changes


def scheduler_stats(running: int, per_pos: list[int], drafts: int, k: int) -> dict[str, Any]:
    """Return SchedulerStats as vLLM 0.32 has it."""
    speculation = {
        "num_spec_tokens": k,
        "num_drafts": drafts,
        "num_draft_tokens": drafts * k,
        "num_accepted_tokens": sum(per_pos),
        "num_accepted_tokens_per_pos": per_pos,
        "num_draft_tokens_per_pos": [drafts] * k,
    }
    cache = {
        "reset": False,
        "requests": 0,
        "queries": 0,
        "hits": 0,
        "preempted_requests": 0,
        "preempted_queries": 0,
        "preempted_hits": 0,
        "hits_by_source": {},
    }
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": 0,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {},
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": 0.25,
        "iteration_details": {"iteration_index": 1, "elapsed_ms": 4.5},
        "prefix_cache_stats": cache,
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": speculation if drafts else None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
        "cudagraph_stats": None,
        "perf_stats": None,
    }


def request_line(live: "_Live", prompt_tokens: int, **changes: Any) -> dict[str, Any]:
    """Return a request as the recorder writes it."""
    line = {
        "k": "request",
        "id": f"cmpl-{live.name}-0-1f2e3d4c",
        "external_id": f"cmpl-{live.name}-0",
        "engine": live.engine,
        "arrival_monotonic_s": live.arrival_s,
        "arrival_wall_s": live.arrival_s - ZERO_S + ZERO_WALL_S,
        "prompt_tokens": prompt_tokens,
        "concurrency": 1,
        "temperature": 0.0,
        "queued_s": live.arrival_s + 0.0005,
        "scheduled_s": live.arrival_s + 0.001,
        "preemptions": 0,
        "cached_tokens": 16,
        "chunk_s": live.chunk_s,
        "chunk_tokens": live.chunk_tokens,
        "num_running": live.own_running,
        "prefill_tokens": live.own_prefill,
        "block_hashes": [2**63 + 5, 7],
        "finish_reason": "length",
        "stop_reason": None,
        "ended_by": "engine",
    }
    return line | changes


def client_line(live: "_Live", scenario: Scenario, **changes: Any) -> dict[str, Any]:
    """Return a request as the load generator writes it."""
    sent_ms = (live.arrival_s - ZERO_S) * 1000 - 1
    first_ms = (live.chunk_s[0] - ZERO_S) * 1000 + 1
    last_ms = (live.chunk_s[-1] - ZERO_S) * 1000 + 1
    line = {
        "id": live.name,
        "phase": "warmup" if live.warmup else "closed",
        "index": live.index,
        "warmup": live.warmup,
        "scheduled_ms": sent_ms,
        "sent_ms": sent_ms,
        "late_ms": 0.0,
        "first_token_ms": first_ms,
        "last_token_ms": last_ms,
        "finished_ms": last_ms,
        "ttft_ms": first_ms - sent_ms,
        "latency_ms": last_ms - sent_ms,
        "outcome": "completed",
        "http_status": 200,
        "prompt_tokens": scenario.prompt_tokens,
        "max_tokens": scenario.output_tokens,
        "completion_tokens": sum(live.chunk_tokens),
        "chunks": len(live.chunk_tokens),
        "temperature": 0.0,
        "n": 1,
    }
    return line | changes


class Recording:
    """Runs a scenario and writes what would be on the volume.

    Attributes
    ----------
    segments
        Lines of each API server's segment.
    clients
        Lines of the client.
    observed
        What the engine itself saw.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.observed = Observed()
        self.clients: list[dict[str, Any]] = []
        self.segments = [
            [header(server, scenario.servers, token_ids=scenario.token_ids)] for server in range(scenario.servers)
        ]
        self._random = random.Random(scenario.seed)
        waiting = [self._live(index, warmup=True) for index in range(scenario.warmup)]
        self._run(waiting, ZERO_S + 0.1)
        self._run([self._live(index, warmup=False) for index in range(scenario.requests)], ZERO_S + 10.0)
        for lines in self.segments:
            kinds = [line["k"] for line in lines]
            lines.append({"k": "anchor", "monotonic_s": ZERO_S, "wall_s": ZERO_WALL_S})
            lines.append(closed(kinds.count("request"), kinds.count("step")))

    def _live(self, index: int, *, warmup: bool) -> _Live:
        scenario = self.scenario
        name = f"{scenario.capture}-{'warmup' if warmup else 'closed'}-{index}"
        return _Live(
            name, index % scenario.engines, index % scenario.servers, 0.0, scenario.output_tokens, warmup, index
        )

    def _run(self, requests: list[_Live], begin_s: float) -> None:
        """Admit two requests a step, and have each running one get a chunk a step."""
        for order, live in enumerate(requests):
            live.arrival_s = begin_s + order // 2 * self.scenario.step_at_s - 0.002 + order * 1e-5
        waiting, number = list(requests), 0
        running: list[_Live] = []
        while waiting or running:
            number += 1
            now_s = begin_s + number * self.scenario.step_at_s
            running += [live for live in waiting if live.arrival_s < now_s - 0.002]
            waiting = [live for live in waiting if live not in running]
            for engine in range(self.scenario.engines):
                self._step(engine, number, now_s + engine * 0.0003, [live for live in running if live.engine == engine])
            for live in [live for live in running if not live.left]:
                running.remove(live)
                self.segments[live.server].append(self._request_line(live))
                self.clients.append(client_line(live, self.scenario))
                self.observed.chunks[live.name] = live.chunk_tokens

    def _request_line(self, live: _Live) -> dict[str, Any]:
        ids = {"token_ids": list(range(sum(live.chunk_tokens)))} if self.scenario.token_ids else {}
        return request_line(live, self.scenario.prompt_tokens, **ids)

    def _step(self, engine: int, number: int, now_s: float, running: list[_Live]) -> None:
        if not running:
            return
        k = self.scenario.k
        per_pos, drafts = [0] * k, 0
        first = [live for live in running if not live.chunk_tokens]
        for live in running:
            accepted = self._random.randint(0, k) if live.chunk_tokens else 0
            drafts += bool(live.chunk_tokens)
            for position in range(accepted):
                per_pos[position] += 1
            tokens = min(accepted + 1, live.left)
            live.left -= tokens
            live.chunk_s.append(now_s + live.server * SPREAD_S)
            live.chunk_tokens.append(tokens)
            live.steps.append(number)
        after = sum(1 for live in running if live.left)
        # Statistics go to one API server only; the others know their own requests.
        told = number % self.scenario.servers
        for live in running:
            live.own_running.append(after if live.server == told else len(running))
            live.own_prefill.append(sum(self.scenario.prompt_tokens for each in first if each.server == live.server))
        stats = scheduler_stats(after, per_pos, drafts, k)
        stamp_s = now_s + told * SPREAD_S
        self.segments[told].append({"k": "step", "engine": engine, "t": stamp_s, "scheduler": stats})
        if not running[0].warmup:
            self.observed.accepted += sum(per_pos)
            self.observed.steps += 1
            self.observed.running[engine, number] = after
            self.observed.prefill[engine, number] = len(first) * self.scenario.prompt_tokens

    def write(self, folder: Path) -> Path:
        """Write all files of an attempt below a folder."""
        self.write_segments(folder / "segments")
        write_lines(folder / "client.jsonl.part", self.clients)
        return folder

    def write_segments(self, folder: Path) -> None:
        """Write the segments."""
        folder.mkdir(parents=True, exist_ok=True)
        for lines in self.segments:
            first = lines[0]
            write_lines(folder / f"segment-{first['boot']}-{first['pid']}.jsonl", lines)

    def change(self, name: str, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Change or remove the engine's record of a request, and keep the recorder's counts right."""
        for lines in self.segments:
            changed = [edit(line) if line.get("external_id") == f"cmpl-{name}-0" else line for line in lines]
            lines[:] = [line for line in changed if line is not None]
            lines[-1]["requests"] = sum(line["k"] == "request" for line in lines)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write lines of JSON."""
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, decoded."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
