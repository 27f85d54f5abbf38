"""Sends recorded requests again, at their moments, and writes down what became of each."""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdecode_operator.capture.load.client import CompletionRequest, EngineClient, Server, allow_many_connections
from specdecode_operator.capture.load.client_log import ClientLog
from specdecode_operator.capture.load.engine_ready import EngineMonitor, MetricsDelta, NoMetrics, metrics_delta
from specdecode_operator.capture.load.phases import CONNECT_AHEAD_S
from specdecode_operator.capture.load.progress import TICK_S
from specdecode_operator.capture.load.prompts.blocks import BlockPrompts, Said
from specdecode_operator.capture.load.prompts.prompt import Prompt
from specdecode_operator.capture.load.sender import Prepared, Sender, Sending
from specdecode_operator.capture.load.stop import Stop, beside
from specdecode_operator.replay.drive.plan import Planned

_TICKS_BETWEEN_LINES: Final = 5
_NOTHING_SAID: Final = Said()


@dataclass(frozen=True, kw_only=True)
class Driven:
    """What became of a run."""

    client_file: Path  # every request that left, in order of sending
    waits_s: Mapping[int, float]  # of later turns, how much longer than recorded they waited for the one before
    stop_reason: str | None  # None: it ended with its requests
    metrics: MetricsDelta | NoMetrics  # what the server's own counters say of it


@dataclass(frozen=True, kw_only=True)
class Drive:
    """How recorded requests are sent."""

    server: Server
    monitor_url: str  # below which the server's /metrics is
    prompts: BlockPrompts
    timeout_s: float
    progress: Callable[[str], None] | None = None  # is told now and then how far it is

    async def run(self, plan: Sequence[Planned], folder: Path, stop: Stop) -> Driven:
        """Send what is planned, and write client.jsonl.part; when ``stop`` is set, end what is in flight.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        allow_many_connections()
        client = EngineClient(self.server, self.timeout_s)
        log = ClientLog(folder, stop.set_from_thread)
        try:
            async with EngineMonitor(self.monitor_url, self.server.tls) as monitor:
                before = await monitor.read()
                # Its zero is the first request's moment; before that, its connection is made.
                sending = Sending(client=client, log=log, zero_s=time.monotonic() + CONNECT_AHEAD_S)
                run = _Run(plan, sending, self.prompts, stop)
                async with beside(run.follow_stop(), run.tell(self.progress)):
                    await run.send_all()
                after = NoMetrics("the run was stopped") if stop.is_set else await monitor.read_when_idle()
        finally:
            await log.close()
        return Driven(
            client_file=log.path,
            waits_s=run.waits_s,
            stop_reason=stop.reason,
            metrics=metrics_delta(before, after),
        )


class _Run:
    """One run from its zero on."""

    def __init__(self, plan: Sequence[Planned], sending: Sending, prompts: BlockPrompts, stop: Stop) -> None:
        self.waits_s = dict[int, float]()
        self._plan = plan
        self._sending = sending
        self._sender = Sender(sending)
        self._prompts = prompts
        self._stop = stop
        loop = asyncio.get_running_loop()
        # What was said up to the end of each turn that another one goes on from.
        self._said: dict[int, asyncio.Future[Said]] = {
            each.place: loop.create_future() for each in plan if each.is_gone_on_from
        }

    async def follow_stop(self) -> None:
        """Cancel what is in flight as soon as the run must end."""
        await self._stop.wait()
        self._sending.client.cancel_all(self._stop.reason or "stopped")

    async def tell(self, progress: Callable[[str], None] | None) -> None:
        """Say now and then how far it is."""
        while progress is not None:
            await asyncio.sleep(TICK_S * _TICKS_BETWEEN_LINES)
            tally, in_flight = self._sender.tally, self._sending.client.in_flight
            failed = tally.ended - tally.completed
            progress(f"{tally.ended + in_flight} of {len(self._plan)} sent, {in_flight} in flight, {failed} failed")

    async def send_all(self) -> None:
        """Send everything, and return when all has ended."""
        async with asyncio.TaskGroup() as tasks:
            for planned in self._plan:
                scheduled_s = self._sending.zero_s + planned.offset_s
                if not await self._stop.sleep_until(scheduled_s - CONNECT_AHEAD_S):
                    break
                tasks.create_task(self._send(planned, scheduled_s))

    async def _send(self, planned: Planned, scheduled_s: float) -> None:
        said = _NOTHING_SAID
        try:
            if planned.after is None:
                said = await self._send_turn(planned, _NOTHING_SAID, scheduled_s)
                return
            before = await self._said[planned.after]
            now_s = time.monotonic()
            if self._stop.is_set:
                return
            if now_s > scheduled_s:
                self.waits_s[planned.place] = now_s - scheduled_s
            said = await self._send_turn(planned, before, max(now_s, scheduled_s))
        finally:
            # However it ended: who goes on from it waits for nothing else.
            if planned.is_gone_on_from:
                self._said[planned.place].set_result(said)

    async def _send_turn(self, planned: Planned, before: Said, scheduled_s: float) -> Said:
        """Send a request, and return what was said up to its end."""
        prepared = self._prepare(planned, before)
        exchange = await self._sender.send(prepared, scheduled_s)
        if not planned.is_gone_on_from or exchange.outcome != "completed":
            return _NOTHING_SAID
        prompt, answer = prepared.request.prompt.content, exchange.stream.answer(as_text=False).content
        return Said(array("I", [*prompt, *answer]), len(prompt) // self._prompts.block_size)

    def _prepare(self, planned: Planned, said: Said) -> Prepared:
        request = planned.request
        if request.prompt_tokens < len(said.tokens):
            said = _NOTHING_SAID  # of the answer something was left out, such as what was only thought
        completion = CompletionRequest(
            request_id=planned.request_id,
            prompt=Prompt(self._prompts.make(request, planned.place, said)),
            max_tokens=request.output_tokens,
            temperature=request.temperature,
            # Whatever is answered, it is as long as it was.
            ignore_eos=True,
            keep_answer=planned.is_gone_on_from,
        )
        wire = self._sending.client.prepare(completion)
        return Prepared(planned.phase, planned.place, completion, wire)
