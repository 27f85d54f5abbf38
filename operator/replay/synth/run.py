"""Runs an engine in virtual time under a load, and leaves a folder as a capture does."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specdecode_operator.api.capture_workload import Phase
from specdecode_operator.capture.files.formats import TraceMeta
from specdecode_operator.replay.engines.behaviour import Behaviour
from specdecode_operator.replay.engines.engine import Incoming
from specdecode_operator.replay.engines.stepped import SteppedEngine
from specdecode_operator.replay.engines.virtual_clock import VirtualClock
from specdecode_operator.replay.fitted.model import Limits
from specdecode_operator.replay.synth.load import VirtualLoad
from specdecode_operator.replay.synth.prompts import Prompts
from specdecode_operator.replay.synth.recorder import VirtualRecorder


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    finished: int
    failed: int  # requests too large for the KV cache
    end_ms: float
    preemptions: int


@dataclass(frozen=True, kw_only=True)
class VirtualRun:
    """An engine that runs in no time, and what it is recorded as."""

    behaviour: Behaviour
    limits: Limits
    meta: TraceMeta
    turnarounds_ms: Sequence[float] = (0.0,)  # of clients, from their last token to their next request

    def phases(self, folder: Path, prompts: Prompts, phases: Iterable[Phase], name: str) -> Outcome:
        """Run phases of a load, one after another."""

        def send(clock: VirtualClock, engine: SteppedEngine, recorder: VirtualRecorder) -> None:
            load = VirtualLoad(
                clock=clock,
                engine=engine,
                watcher=recorder,
                prompts=prompts,
                name=name,
                turnarounds_ms=self.turnarounds_ms,
            )
            for phase in phases:
                load.run(phase)

        return self._run(folder, send)

    def requests(self, folder: Path, planned: Iterable[tuple[float, Incoming, str | None]]) -> Outcome:
        """Run requests that come at given moments."""

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
