"""A replay server in the test's own event loop, reached through real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx

from specdecode_operator.replay.clocks import TimerClock
from specdecode_operator.replay.server.playback_source import SourceSettings, read_source
from specdecode_operator.replay.server.serve import ServeSettings, assemble, http_server, listen_at
from tests.support.traces import META, Line, write_trace


@asynccontextmanager
async def replay_server(
    folder: Path, records: Iterable[Line], meta: Line | None = META, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve records; yields a client of the server."""
    trace = write_trace(folder / "trace.jsonl", records, meta)
    of_source = {each.name for each in fields(SourceSettings)} & set(settings)
    source = SourceSettings(traces=[trace], **{name: settings.pop(name) for name in of_source})
    clock = TimerClock(asyncio.get_running_loop())
    wanted = ServeSettings(source=source, **settings)
    assembled = assemble(wanted, read_source(source), clock)
    server = http_server(assembled.app, drain_timeout_s=1, most_connections=wanted.most_connections)
    listener = listen_at("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        any_number = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120, limits=any_number) as client:
            yield client
    finally:
        server.should_exit = True
        await serving
        clock.stop()
        if assembled.recorder is not None:
            assembled.recorder.close()


async def events(client: httpx.AsyncClient, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, which must end as it should."""
    usual = {"prompt": "hello", "max_tokens": 100, "stream": True}
    async with client.stream("POST", path, json=usual | body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(found: Iterable[dict[str, Any]]) -> list[str]:
    """Return the text of each event that has an answer."""
    return [
        choice["delta"]["content"] if "delta" in choice else choice["text"]
        for event in found
        for choice in event["choices"]
    ]
