"""Whole runs of a load, and the lines that they leave."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdecode_operator.capture.load.run_settings import RunSettings, read_settings
from specdecode_operator.capture.load.runner import LoadResult, run_load
from specdecode_operator.capture.load.shutdown import Stop
from tests.support.completion_server import CompletionServer
from tests.support.waiting import DEADLINE_S

SHORT = {"synthetic": {"promptTokens": 12, "outputTokens": 6, "sharedPrefixTokens": 4}}
CLOSED = {"name": "one", "pattern": "Closed", "concurrency": 2, "requests": 5}
FAST = {"name": "fast", "pattern": "Constant", "requestsPerSecond": "200", "requests": 20}


def settings_for(server: CompletionServer, seed: int = 7, key: str | None = None, **workload: Any) -> RunSettings:
    """Settings of a run against a server; workload replaces whole fields of it."""
    engine = {"url": server.url, "model": "demo", "max_model_len": 4096, "vocab_size": 32000, "api_key_variable": key}
    document = {
        "namespace": "n",
        "capture": "demo",
        "seed": seed,
        "engine": engine,
        "workload": {"prompts": SHORT, "warmupRequests": 0, "timeoutSeconds": 120, **workload},
    }
    return read_settings(json.dumps(document))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that a thread or a clock brings about."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - a thread and a clock change it, and tell nobody
            await asyncio.sleep(0.01)


def names_in(folder: Path) -> list[str]:
    """Names of what is in a folder."""
    return [path.name for path in folder.iterdir()]


async def run(
    settings: RunSettings, folder: Path, stop: Stop | None = None, **options: Any
) -> tuple[LoadResult, list[dict[str, Any]]]:
    """Run a load to its end; return its result and the lines of its one file."""
    result = await run_load(settings, folder, stop or Stop(), **options)
    assert result.client_file == folder / "client.jsonl.part"
    assert names_in(folder) == ["client.jsonl.part"]
    return result, [json.loads(line) for line in result.client_file.read_text().splitlines()]
