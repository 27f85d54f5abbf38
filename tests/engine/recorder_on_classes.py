"""Run inside an engine's environment: the recorder around vLLM's own classes, without a server.

    python recorder_on_classes.py FOLDER TOKENIZER

The plugin on PYTHONPATH is loaded as vLLM loads it, then a few requests go through the real OutputProcessor, as
messages that came through the real encoder and decoder. The segment is left in FOLDER. Before that, the same requests
go through the recorder of live captures, whose tally and what vLLM counted are left in FOLDER/live.json.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["SPECDECODE_RECORD_DIR"] = sys.argv[1]

from msgspec.structs import asdict
from specdecode_recorder.collector import BoundedQueue
from specdecode_recorder.live_collector import LiveCollector
from specdecode_recorder.method_hooks import Hooks
from specdecode_recorder.salting import Salt
from specdecode_recorder.vllm_internals import find_classes, live_problems
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingStats

TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[2])
LETTERS = [TOKENIZER.convert_tokens_to_ids(letter) for letter in "abc"]


class Loop:
    """The middle of vLLM's output handler (vllm/v1/engine/async_llm.py)."""

    def __init__(self) -> None:
        self.processor = OutputProcessor(TOKENIZER, log_stats=True)
        self.client = AsyncMPClient.__new__(AsyncMPClient)
        self.client.outputs_queue = asyncio.Queue()
        self.client.resources = SimpleNamespace(output_queue_task=object(), engine_dead=True)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.pending: asyncio.Task[Any] | None = None
        self.finished = self.generated_tokens = 0  # as vLLM counts them for its metrics

    def add(self, name: str, **parameters: Any) -> None:
        sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, **parameters)
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=LETTERS * 20,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
        self.processor.add_request(request, None, None, 0, queue)

    async def step(self, stamp_s: float, *outputs: EngineCoreOutput) -> None:
        stats = SchedulerStats(num_running_reqs=len(outputs), spec_decoding_stats=SpecDecodingStats.new(4))
        message = EngineCoreOutputs(engine_index=1, outputs=list(outputs), scheduler_stats=stats, timestamp=stamp_s)
        task = self.pending or asyncio.create_task(self.client.get_output_async())
        self.client.outputs_queue.put_nowait(self.decoder.decode(self.encoder.encode(message)))
        received = await task
        counted = IterationStats()
        self.processor.process_outputs(received.outputs, received.timestamp, counted)
        self.generated_tokens += counted.num_generation_tokens
        self.finished += len(counted.finished_requests)
        self.pending = asyncio.create_task(self.client.get_output_async())
        await asyncio.sleep(0)


def chunk(name: str, letters: str, **more: Any) -> EngineCoreOutput:
    ids = [LETTERS["abc".index(letter)] for letter in letters]
    return EngineCoreOutput(request_id=name, new_token_ids=ids, **more)


async def serve(loop: Loop) -> None:
    for name in ("plain", "left", "unfinished"):
        loop.add(name)
    loop.add("stopped", stop=["bb"])
    events = [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0), EngineCoreEvent(EngineCoreEventType.SCHEDULED, 2.0)]
    first = {"events": events, "prefill_stats": PrefillStats(num_cached_tokens=48)}
    names = ("plain", "left", "unfinished", "stopped")
    await loop.step(3.0, *(chunk(name, "a", **first) for name in names))
    await loop.step(4.0, *(chunk(name, "abbca") for name in names))
    loop.processor.abort_requests(["left"], internal=True)
    await loop.step(5.0, chunk("plain", "cc", finish_reason=FinishReason.LENGTH), chunk("left", "a"))
    await loop.step(6.0)


async def _serve_new() -> None:
    await serve(Loop())


async def serve_live() -> dict[str, Any]:
    """Return the tally of a live capture in which no request is selected, and the counts of vLLM."""
    classes = find_classes()
    hooks = Hooks(classes)
    hooks.install()
    loop = Loop()
    loop.add("older")
    await loop.step(1.0, chunk("older", "ab"))
    loop.finished = loop.generated_tokens = 0
    collector = LiveCollector(
        BoundedQueue(), hooks.switch, dict, Salt(b"salt"), sample_percent=0, token_ids=False, steps=True
    )
    await asyncio.to_thread(collector.begin)
    await loop.step(2.0, chunk("older", "cab", finish_reason=FinishReason.LENGTH))
    await serve(loop)
    await asyncio.to_thread(collector.close)
    hooks.remove()
    tally = asdict(collector.tally(0))
    vllm = {"finished": loop.finished, "generated_tokens": loop.generated_tokens}
    return {"problems": live_problems(classes), "tally": tally, "vllm": vllm, "errors": collector.first_error}


def main() -> None:
    (Path(sys.argv[1]) / "live.json").write_text(json.dumps(asyncio.run(serve_live())))
    (plugin,) = load_stat_logger_plugin_factories()
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    plugin(vllm_config=config, engine_indexes=[1])
    asyncio.run(_serve_new())
    (Path(sys.argv[1]) / "close").touch()


if __name__ == "__main__":
    main()
