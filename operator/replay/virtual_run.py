"""Run an engine under a load in virtual time and write a capture (`replay synth` and `forecast`).

`GivenBehaviour` is an engine whose distributions are all given, for traces with known statistics.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import BinaryIO, cast

from specdecode_operator.api.capture import Pattern, Phase
from specdecode_operator.capture.files.formats import (
    STEP_STATS,
    TRACE,
    FinishReason,
    ItlContext,
    StepStats,
    TraceMeta,
    TraceRecord,
    encode,
    encode_meta,
)
from specdecode_operator.capture.load.arrivals import arrival_offsets_s
from specdecode_operator.capture.load.run_settings import needed
from specdecode_operator.capture.trace_reader import RecordedRequest
from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.emulated.engine_model import Acceptance, Drafting, Paces, StepShape, StepTime
from specdecode_operator.replay.engine import Burst, Incoming, ReplayEngine, scheduler_stats
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.stepped_engine import Behaviour, SteppedEngine, StepReport
from specdecode_operator.replay.synthetic_load import Prompts


@dataclass(slots=True)
class _Course:
    drafting: Drafting | None
    width: int
    output_tokens: int
    finish_reason: str = "length"
    coming: tuple[int, int] | None = None

    def first(self) -> int:
        return 1

    def planned(self) -> int:
        if self.coming is None:
            self.coming = self.drafting.next(self.width) if self.drafting is not None else (0, 0)
        return self.coming[0]

    def next(self, output_tokens: int) -> tuple[int, int]:  # noqa: ARG002  chance alone decides here
        self.planned()
        drafted, self.coming = self.coming or (0, 0), None
        return drafted


class GivenBehaviour:
    """Steps of given durations, and drafts accepted with given chances."""

    def __init__(
        self,
        step_time: StepTime,
        acceptance: Acceptance | None,
        seed: int,
        *,
        lead_ms: float = 0.0,
        width: int | None = None,
    ) -> None:
        """Create a behaviour, without drafts if there is no acceptance; ``width`` overrides the K of the acceptance."""
        self.acceptance = acceptance
        self.num_speculative_tokens = (width or acceptance.num_speculative_tokens) if acceptance else 0
        self.random = Random(f"{seed}/steps")  # noqa: S311  not for secrets
        self._paces = Paces(step_time, self.random)
        self._lead_ms = lead_ms

    def lead_ms(self) -> float:
        """Return the time from the arrival of a request to the scheduler."""
        return self._lead_ms

    def begin(self, request: Incoming) -> _Course:
        """Return the course of a request: to its last token."""
        acceptance = self.acceptance
        drafting = None
        if acceptance is not None:
            drafting = Drafting(acceptance, acceptance.draw_class(request.temperature, self.random), self.random)
        return _Course(drafting, self.num_speculative_tokens, request.max_tokens)

    def step_ms(self, step: StepShape, decoding: int) -> float:  # noqa: ARG002  all is in the step
        """Draw the duration of a step."""
        return self._paces.draw_ms(step)


def spread(deviation: float) -> tuple[float, ...]:
    """Return residuals of a step time: a normal distribution around 1 with this standard deviation."""
    if not deviation:
        return ()
    normal = NormalDist(1.0, deviation)
    return tuple(max(0.05, normal.inv_cdf((index + 0.5) / 101)) for index in range(101))


@dataclass
class _PhaseLoad:
    """Sends one phase of a load: by time, or from clients that wait for their answers."""

    clock: VirtualClock
    engine: ReplayEngine
    recorder: "VirtualRecorder"
    prompts: Prompts
    name: str
    phase: Phase
    turnarounds_ms: Sequence[float]
    random: Random
    sent: int = 0
    conversations: int = 0
    until_ms: float = float("inf")

    def run(self) -> None:
        """Send the phase until all of its requests are answered."""
        if self.phase.pattern in (Pattern.CLOSED, Pattern.MULTITURN):
            if self.phase.duration_seconds is not None:
                self.until_ms = self.clock.now_ms() + 1000 * self.phase.duration_seconds
            for _ in range(needed(self.phase.concurrency)):
                self._begin()
        else:
            offsets_ms = (1000 * offset_s for offset_s in arrival_offsets_s(self.phase, self.prompts.seed))
            self._send_next(self.clock.now_ms(), offsets_ms)
        self.clock.run()

    def _send_next(self, start_ms: float, offsets_ms: Iterator[float]) -> None:
        """Send the next request at its time, however the earlier ones go, and then those after it."""

        def send() -> None:
            request = self._single()
            self._send_next(start_ms, offsets_ms)
            self._send(request, lambda: None)

        if (offset_ms := next(offsets_ms, None)) is not None:
            self.clock.call_at(start_ms + offset_ms, send)

    def _begin(self) -> None:
        """Send a client's next request, or start its next conversation, unless the phase is over."""
        if self._is_over():
            return
        if self.phase.pattern == Pattern.MULTITURN:
            self.conversations += 1
            self._say(self.conversations - 1, 0, self.prompts.shared_prefix_tokens)
        else:
            self._send(self._single(), partial(self._after, 0.0, self._begin))

    def _single(self) -> Incoming:
        """Return a request that shares only the common prefix with others."""
        name = f"{self.phase.name}-{self.sent}"
        self.sent += 1
        own, output = self.prompts.lengths(name)
        tokens = self.prompts.shared_prefix_tokens + own
        return Incoming(
            request_id=f"{self.name}-{name}",
            prompt_tokens=tokens,
            max_tokens=output,
            block_hashes=self.prompts.hashes(name, tokens),
            ignore_eos=True,
        )

    def _say(self, conversation: int, turn: int, said_before: int) -> None:
        """Send a turn: the conversation so far, and more tokens."""
        if self._is_over():
            return
        name = f"{self.phase.name}/{conversation}"
        own, output = self.prompts.lengths(f"{name}/{turn}")
        tokens = said_before + own
        hashes = self.prompts.hashes(name, tokens + output)
        known = tokens // self.prompts.block_size
        request = Incoming(
            request_id=f"{self.name}-{self.phase.name}-{self.sent}",
            prompt_tokens=tokens,
            max_tokens=output,
            block_hashes=hashes[:known],
            answer_hashes=hashes[known:],
            ignore_eos=True,
        )
        self.sent += 1
        think_ms = 0.0
        then: Callable[[], None] = self._begin
        if turn + 1 < needed(self.phase.turns):
            think_ms = 1000 * (self.phase.think_seconds or 0)
            then = partial(self._say, conversation, turn + 1, tokens + output)
        self._send(request, partial(self._after, think_ms, then))

    def _send(self, request: Incoming, done: Callable[[], None]) -> None:
        self.engine.submit(request, self.recorder.watch(request, self.phase.name, done))

    def _after(self, think_ms: float, then: Callable[[], None]) -> None:
        self.clock.call_at(self.clock.now_ms() + think_ms + self.random.choice(self.turnarounds_ms), then)

    def _is_over(self) -> bool:
        limit = self.phase.requests
        return (limit is not None and self.sent >= limit) or self.clock.now_ms() >= self.until_ms


def replayed(
    requests: Sequence[RecordedRequest], load_factor: float, block_size: int
) -> Iterator[tuple[float, Incoming, str | None]]:
    """Return recorded requests with their arrivals, divided by the load factor, each with its recorded length."""
    answers = _answer_hashes(requests, block_size)
    for index, each in enumerate(requests):
        if each.arrival_ms is None:
            continue
        yield (
            each.arrival_ms / load_factor,
            Incoming(
                request_id=f"{index}-{each.request_id or 'request'}",
                prompt_tokens=each.prompt_tokens,
                max_tokens=each.output_tokens,
                block_hashes=each.block_hashes or (),
                answer_hashes=answers.get(index, ()),
                temperature=each.temperature,
                ignore_eos=True,
            ),
            each.phase,
        )


def _answer_hashes(requests: Sequence[RecordedRequest], block_size: int) -> dict[int, Sequence[int]]:
    """Return the block hashes of answers that a later prompt, the next turn of the conversation, begins with."""
    found: dict[int, Sequence[int]] = {}
    ends: dict[int, int] = {}  # place of a prompt by the hash of its last full block, which covers all before it
    for index, each in enumerate(requests):
        hashes = each.block_hashes or ()
        for place, value in enumerate(hashes[:-1], start=1):
            if (earlier := ends.get(value)) is not None and earlier not in found:
                said = requests[earlier].prompt_tokens + requests[earlier].output_tokens
                found[earlier] = hashes[place : said // block_size]
        if hashes:
            ends[hashes[-1]] = index
    return found


_DIGITS = 4  # of a millisecond, as in captures


@dataclass(slots=True)
class _Watched:
    """One request in progress."""

    request: Incoming
    phase: str | None
    arrival_ms: float
    concurrency: int
    done: Callable[[], None]
    scheduled_ms: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    stamps_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)


class VirtualRecorder:
    """Records the steps and bursts of one engine; writes lines as requests finish and steps end."""

    def __init__(self, folder: Path, clock: VirtualClock, meta: TraceMeta, k: int) -> None:
        """Write into an existing folder."""
        self._clock = clock
        self._trace: BinaryIO = (folder / TRACE).open("wb")
        self._steps: BinaryIO = (folder / STEP_STATS).open("wb")
        self._trace.write(encode_meta(meta) + b"\n")
        self._k = k
        self._open: dict[str, _Watched] = {}
        self._last: StepReport | None = None
        self.finished = 0
        self.failed = 0

    def close(self) -> None:
        """Close the files."""
        self._trace.close()
        self._steps.close()

    def watch(self, request: Incoming, phase: str | None, done: Callable[[], None]) -> Callable[[Burst], None]:
        """Record a request that arrives now; return the sink of its bursts."""
        watched = _Watched(request, phase, self._clock.now_ms(), len(self._open) + 1, done)
        self._open[request.request_id] = watched

        def take(burst: Burst) -> None:
            if burst.tokens:
                if not watched.stamps_ms:
                    watched.cached_tokens = burst.cached_tokens
                watched.stamps_ms.append(self._clock.now_ms())
                watched.tokens.append(burst.tokens)
                watched.num_running.append(max(1, self._last.load.running if self._last else 1))
                watched.prefill_tokens.append(self._last.first_prompt_tokens if self._last else 0)
            if burst.finish_reason is not None:
                del self._open[request.request_id]
                self._write(watched, burst.finish_reason)
                watched.done()

        return take

    def on_step(self, report: StepReport) -> None:
        """Record a step, before its bursts."""
        self._last = report
        start_ms = report.end_ms - report.duration_ms
        for request_id in report.scheduled:
            self._open[request_id].scheduled_ms = start_ms
        for request_id in report.preempted:
            self._open[request_id].preemptions += 1
        stats = scheduler_stats(report.load, len(report.scheduled), report.drafted, report.accepted, self._k)
        stats["iteration_details"] = {
            "iteration_index": report.index,
            "num_ctx_requests": report.prefilling,
            "num_ctx_tokens": report.shape.prefill_tokens,
            "num_generation_requests": report.decoding,
            "num_generation_tokens": report.shape.scheduled_tokens - report.shape.prefill_tokens,
            "elapsed_ms": round(report.duration_ms, _DIGITS),
        }
        line = StepStats(
            ts_ms=round(report.end_ms, _DIGITS), scheduler=stats, duration_ms=round(report.duration_ms, _DIGITS)
        )
        self._steps.write(encode(line) + b"\n")

    def _write(self, watched: _Watched, finish_reason: str) -> None:
        # A request may outgrow the KV cache at once, or with its answer.
        self.failed += not watched.stamps_ms or finish_reason == "error"
        self.finished += bool(watched.stamps_ms) and finish_reason != "error"
        if not watched.stamps_ms:
            return
        stamps_ms = [round(stamp_ms, _DIGITS) for stamp_ms in watched.stamps_ms]
        arrival_ms = round(watched.arrival_ms, _DIGITS)
        scheduled_ms = watched.scheduled_ms
        record = TraceRecord(
            prompt_tokens=watched.request.prompt_tokens,
            cached_tokens=watched.cached_tokens,
            output_tokens=sum(watched.tokens),
            ttft_ms=round(stamps_ms[0] - arrival_ms, _DIGITS),
            itl_ms=[round(after - before, _DIGITS) for before, after in pairwise(stamps_ms)],
            itl_tokens=watched.tokens[1:] if any(tokens != 1 for tokens in watched.tokens[1:]) else None,
            concurrency=watched.concurrency,
            arrival_ms=arrival_ms,
            itl_ctx=ItlContext(num_running=watched.num_running[1:], prefill_tokens=watched.prefill_tokens[1:]),
            block_hashes=list(watched.request.block_hashes) or None,
            finish_reason=cast("FinishReason", finish_reason),
            request_id=watched.request.request_id,
            engine=0,
            phase=watched.phase,
            temperature=watched.request.temperature,
            scheduled_ms=None if scheduled_ms is None else round(scheduled_ms, _DIGITS),
            preemptions=watched.preemptions,
            ended_by="engine",
        )
        self._trace.write(encode(record) + b"\n")


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    finished: int
    failed: int  # requests too large for the KV cache
    end_ms: float
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class VirtualRun:
    """An engine in virtual time, and the header of its capture."""

    behaviour: Behaviour
    limits: Limits
    meta: TraceMeta
    turnarounds_ms: Sequence[float] = (0.0,)  # from a client's last token to its next request

    def phases(self, folder: Path, prompts: Prompts, phases: Iterable[Phase], name: str) -> Outcome:
        """Run the phases of a load one after another."""

        def send(clock: VirtualClock, engine: SteppedEngine, recorder: VirtualRecorder) -> None:
            random = Random(0)  # noqa: S311  not for secrets
            for phase in phases:
                _PhaseLoad(clock, engine, recorder, prompts, name, phase, self.turnarounds_ms, random).run()

        return self._run(folder, send)

    def requests(self, folder: Path, planned: Iterable[tuple[float, Incoming, str | None]]) -> Outcome:
        """Run requests that arrive at given times."""

        def send(clock: VirtualClock, engine: SteppedEngine, recorder: VirtualRecorder) -> None:
            def arrive(request: Incoming, phase: str | None) -> None:
                engine.submit(request, recorder.watch(request, phase, lambda: None))

            for when_ms, request, phase in planned:
                clock.call_at(when_ms, partial(arrive, request, phase))
            clock.run()

        return self._run(folder, send)

    def _run(self, folder: Path, send: Callable[[VirtualClock, SteppedEngine, VirtualRecorder], None]) -> Outcome:
        clock = VirtualClock()
        recorder = VirtualRecorder(folder, clock, self.meta, self.behaviour.num_speculative_tokens)
        engine = SteppedEngine(clock, self.behaviour, self.limits, recorder.on_step)
        try:
            send(clock, engine, recorder)
        finally:
            recorder.close()
        return Outcome(recorder.finished, recorder.failed, clock.now_ms(), engine.load().preemptions)
