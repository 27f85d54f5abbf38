"""An engine that answers two tokens a chunk and records what it answers, without steps; in a thread or as a process."""

import argparse
import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from tests.support.completion_server import (
    Received,
    answer_in_full,
    answered_tokens,
    completion_server,
    document,
    rejection,
)
from tests.support.recordings import closed, header


class RecordingEngine:
    """Serves in a thread; refuses one request."""

    def __init__(self, port: int = 0) -> None:
        self.segment: Path | None = None
        self.records = 0
        self.before_answer: Callable[[Received], Awaitable[None]] | None = None
        self._port = port
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def start(self) -> str:
        self._thread.start()
        assert self._ready.wait(120)
        return self.server.url

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with completion_server(port=self._port) as self.server:
            self.server.answer = self._answer
            self.server.pages["/health"] = (200, "")
            self._ready.set()
            while not self._end.is_set():
                await asyncio.sleep(0.02)
                self._close_if_ordered()

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        if "stream" not in request.body:
            writer.write(document({"choices": [{"token_ids": answered_tokens(request), "text": "{}"}]}))
            return
        if request.id.endswith("steady-4"):
            writer.write(rejection(400, b"too long"))
            return
        if self.before_answer is not None:
            await self.before_answer(request)
        arrival_s = time.monotonic()
        tokens = len(answered_tokens(request))
        chunks = [2] * (tokens // 2)
        line = {
            "k": "request",
            "id": f"cmpl-{request.id}-0-1f2e3d4c",
            "external_id": f"cmpl-{request.id}-0",
            "engine": 0,
            "arrival_monotonic_s": arrival_s,
            "arrival_wall_s": time.time(),
            "prompt_tokens": len(request.body["prompt"]),
            "concurrency": 1,
            "temperature": 0.0,
            "queued_s": arrival_s,
            "scheduled_s": arrival_s,
            "preemptions": 0,
            "cached_tokens": 0,
            "block_hashes": [],
            "stop_reason": None,
            "chunk_s": [arrival_s + 0.001 * (number + 1) for number in range(len(chunks))],
            "chunk_tokens": chunks,
            "num_running": [1] * len(chunks),
            "prefill_tokens": [0] * len(chunks),
            "finish_reason": "length",
            "ended_by": "engine",
        }
        self._append(line)
        self.records += 1
        await answer_in_full(request, writer)

    def begin_segment(self, folder: Path) -> None:
        self.segment = folder / "segment-a-1.jsonl"
        self._append(header(boot="a", monotonic_s=time.monotonic(), steps=False))

    def _append(self, line: dict[str, object]) -> None:
        assert self.segment is not None
        with self.segment.open("ab") as stream:
            stream.write(msgspec.json.encode(line) + b"\n")

    def _close_if_ordered(self) -> None:
        if self.segment is not None and (self.segment.parent / "close").exists():
            self._append(closed(self.records, 0))
            self.segment = None


def main() -> None:
    """Run as the engine of an arm: where to record is in the environment, as for vLLM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exit-code-in", default="", help="code, and the phase whose first request it dies of")
    arguments = parser.parse_args()
    code, _, phase = arguments.exit_code_in.partition(":")
    engine = RecordingEngine(arguments.port)

    async def dies(request: Received) -> None:
        if phase and f"-{phase}-" in request.id:
            os._exit(int(code))

    engine.before_answer = dies
    engine.begin_segment(Path(os.environ["SPECDECODE_RECORD_DIR"]))
    engine.start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
