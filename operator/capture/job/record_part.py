"""Record one part of a capture: start an arm's engine, send its load, wait for the recorders.

A part is one arm in one repetition. The seed determines the order of the arms. With several arms, start and stop
commands go to recorder/switcher.py in the engine's container, as files. After its load, each arm answers the same
questions, one at a time and not recorded, to compare greedy answers and output formats; their timing is not compared.
"""

import asyncio
import errno
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import httpx
import msgspec
from msgspec import Meta, Struct

from specdecode_operator.capture.files import formats, segments
from specdecode_operator.capture.files.formats import CHECKS, PART_SUFFIX, CaptureError, EngineCounters, Experiment
from specdecode_operator.capture.files.segments import Segment
from specdecode_operator.capture.job import pod_files
from specdecode_operator.capture.job.finish import Asked, Run
from specdecode_operator.capture.load import run_settings
from specdecode_operator.capture.load.datasets import BadDatasetError
from specdecode_operator.capture.load.engine_client import Server, error_text, server_of
from specdecode_operator.capture.load.engine_ready import EngineMonitor, EngineNotReadyError, MetricsDelta, NoMetrics
from specdecode_operator.capture.load.prompts import PromptSource, prompt_source
from specdecode_operator.capture.load.run_settings import CheckSettings, RunSettings
from specdecode_operator.capture.load.runner import LoadResult
from specdecode_operator.capture.load.shutdown import Stop, beside, stop_on_signals
from specdecode_operator.capture.recorder.segment_format import DISK_FULL, EXIT, FOLDER_VARIABLE, ORDERED, UNKNOWN_SHAPE
from specdecode_operator.capture.recorder.switcher import ENDED, ORDER_FILE, RUNNING, STATE_FILE, STOPPED
from specdecode_operator.capture.recorder.vllm_internals import TRIED
from specdecode_operator.capture.recorder.writer import RESERVE_BYTES
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip

_NO_CHECKS: Final = run_settings.CheckSettings()


@dataclass(frozen=True)
class Part:
    """One repetition of one arm: an engine under the whole load."""

    settings: run_settings.RunSettings  # with the engine of the arm
    asked: Asked
    places: pod_files.Places
    arm: run_settings.ArmSettings | None = None  # None if the container's command starts the engine

    def named(self, error: CaptureError) -> CaptureError:
        """Add the arm to an error."""
        if self.arm is None:
            return error
        whose = f"arm {self.arm.name}, repetition {self.places.repetition}"
        return CaptureError(error.reason, f"{whose}: {error.message}")


def order_of_arms(arms: Sequence[str], repetitions: int, seed: int) -> list[list[str]]:
    """Return the order of the arms in each repetition."""
    # Repetitions form pairs: the first has a random order, the second the reverse. A steady drift, such as a GPU that
    # gets warmer, then affects all arms alike.
    order: list[list[str]] = []
    while len(order) < repetitions:
        drawn = list(arms)
        Random(f"{seed}/arms/{len(order)}").shuffle(drawn)  # noqa: S311 - not for secrets
        order += [drawn, drawn[::-1]]
    return order[:repetitions]


def parts_of(settings: run_settings.RunSettings, asked: Asked, attempt: str) -> list[Part]:
    """Return the parts of a capture in the order of measurement."""
    root, namespace, capture = Path(settings.root), settings.namespace, settings.capture
    if not settings.arms:
        return [Part(settings, asked, pod_files.Places(root, namespace, capture, attempt))]
    arms = {arm.name: arm for arm in settings.arms}
    order = order_of_arms(list(arms), settings.repetitions, settings.seed)
    experiment = None
    if len(arms) > 1:
        experiment = Experiment(
            arms=list(arms),
            baseline=settings.arms[0].name,
            repetitions=settings.repetitions,
            order=order,
            slo=settings.slo,
            lossy={arm.name: arm.lossy for arm in settings.arms if arm.lossy is not None},
        )
    return [
        Part(
            settings.model_copy(update={"engine": arms[name].engine}),
            msgspec.structs.replace(asked, context=arms[name].context, experiment=experiment),
            pod_files.Places(root, namespace, capture, attempt, name, repetition),
            arms[name],
        )
        for repetition, names in enumerate(order, start=1)
        for name in names
    ]


# Time limit of an order. The switcher runs once its container has started, and kills an engine that does not stop
# after a minute and a half.
_ANSWER_S: Final = 180.0
_POLL_S: Final = 0.1


class State(Struct, frozen=True):
    """State that the switcher reports."""

    number: Annotated[int, Meta(ge=0)]  # of the last order that it followed
    state: Literal["running", "stopped", "ended"]
    exit_code: int | None = None  # of an ended engine; null if unknown


class EngineSwitch:
    """Starts and stops engines through files that two containers share."""

    def __init__(self, folder: Path, answer_s: float = _ANSWER_S) -> None:
        self._folder = folder
        self._answer_s = answer_s
        state = self._state()
        self._number = state.number if state is not None else 0

    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start an engine after the previous one is gone."""
        await self._order(list(command), dict(env), RUNNING)

    async def stop(self) -> None:
        """Stop the engine, and return when all its processes are gone."""
        await self._order(None, {}, STOPPED)

    async def wait_until_ended(self) -> str:
        """Wait until the engine ends without an order; return a message."""
        while True:
            # In a thread, so that reading the file does not delay the load.
            state = await asyncio.to_thread(self._state)
            if state is not None and state.state == ENDED:
                return _how(state)
            await asyncio.sleep(_POLL_S)

    async def _order(self, command: list[str] | None, env: dict[str, str], expected: str) -> None:
        self._number += 1
        part = self._folder / f"{ORDER_FILE}.part"
        part.write_bytes(msgspec.json.encode({"number": self._number, "command": command, "env": env}))
        part.chmod(0o644)  # the engine's container may run as another user
        part.replace(self._folder / ORDER_FILE)
        until_s = time.monotonic() + self._answer_s
        while True:
            state = self._state()
            if state is not None and (state.number >= self._number or state.state == ENDED):
                if state.state == expected:
                    return
                raise CaptureError("EngineExited", f"{_how(state)}: see its log")
            if time.monotonic() >= until_s:
                raise CaptureError(
                    "EngineNotReady",
                    f"the engine's container did not follow an order within {self._answer_s:g} s: see its log; its"
                    " image must have python3",
                )
            await asyncio.sleep(_POLL_S)

    def _state(self) -> State | None:
        try:
            opened = os.open(self._folder / STATE_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, which is not followed
            raise CaptureError("InternalError", f"{STATE_FILE} of the engine's container: {error.strerror}") from error
        try:
            with os.fdopen(opened, "rb") as stream:
                return msgspec.json.decode(stream.read(4096), type=State)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CaptureError("InternalError", f"{STATE_FILE} of the engine's container: {error}") from error


def _how(state: State) -> str:
    code = "" if state.exit_code is None else f" with exit code {state.exit_code}"
    return f"the engine ended{code} without an order to stop"


_RECORDER_POLL_S: Final = 0.2


class Recorders:
    """Waits for the recorders, watches them during the load, and closes them."""

    def __init__(self, places: pod_files.Places) -> None:
        self._places = places
        self._boots: frozenset[str] = frozenset()
        self.failure: CaptureError | None = None

    async def wait_until_recording(self, within_s: float) -> None:
        """Wait until every API server of the engine records."""
        folder, until_s = self._places.segments, time.monotonic() + within_s
        while not (current := segments.current_start(folder)) or len(current) < current[0].header.client_count:
            if time.monotonic() >= until_s:
                # On a full volume a recorder cannot even report that it is full.
                probe = folder / "probe"
                with pod_files.volume_errors(self._places.root):
                    try:
                        probe.write_bytes(os.urandom(2 * RESERVE_BYTES))
                    finally:
                        probe.unlink(missing_ok=True)
                raise CaptureError(
                    "RecorderMissing",
                    f"{len(current)} API servers record {within_s:g} s after the engine was ready: see its log;"
                    " it must load plugins (VLLM_PLUGINS), have the recorder on its PYTHONPATH, and answer from Python"
                    " (no VLLM_USE_RUST_FRONTEND, its image's included)",
                )
            await asyncio.sleep(_RECORDER_POLL_S)
        self._boots = segments.boots(current)
        if (failure := self._failure(current)) is not None:
            raise failure

    async def watch(self, stop: Stop) -> None:
        """Stop the load when a recorder ends or the engine restarts; never returns."""
        while True:
            await asyncio.sleep(1.0)
            # In a thread, so that a slow volume does not delay the load.
            failure = await asyncio.to_thread(self._check)
            if failure is not None and self.failure is None:
                self.failure = failure
                stop.set(failure.message)

    async def close(self, within_s: float) -> None:
        """Order the recorders to finish, and wait for their last lines."""
        self._places.close_file.touch()
        until_s = time.monotonic() + within_s
        while not segments.recorders_closed(self._places.segments):
            if time.monotonic() >= until_s:
                raise self.failure or CaptureError(
                    "RecorderNotClosed",
                    f"the recorders did not finish within {within_s:g} s: the engine hangs or is gone; see its log",
                )
            await asyncio.sleep(_RECORDER_POLL_S)
        if self.failure is None:
            self.failure = self._failure(segments.current_start(self._places.segments))
        if self.failure is not None:
            raise self.failure

    def segments(self) -> list[Segment]:
        """Return the segments of the recorded start of the engine."""
        return [each for each in segments.list_segments(self._places.segments) if each.header.boot in self._boots]

    def _check(self) -> CaptureError | None:
        try:
            return self._failure(segments.current_start(self._places.segments))
        except CaptureError as unreadable:
            return unreadable

    def _failure(self, current: list[Segment]) -> CaptureError | None:
        if segments.boots(current) != self._boots:
            return CaptureError(
                "EngineRestarted", "the engine restarted during the recording: see the log of its last start"
            )
        for segment in current:
            if segment.closed is not None and segment.closed.reason != ORDERED:
                return _ended(segment, segment.closed.reason)
        return None


def _ended(segment: Segment, reason: str) -> CaptureError:
    if reason == DISK_FULL:
        return CaptureError("DiskFull", "the recorder stopped: the volume is full; use a larger one")
    if reason == EXIT:
        return CaptureError("EngineExited", "the engine ended during the recording: see its log")
    why = segments.off_reason(segment.path) or reason
    fix = f": capture a version that it is tested with, vLLM {TRIED} (spec.engine of the deployment)"
    engine = f"the engine (vLLM {clip(printable(segment.header.vllm), 64)}) kept running"
    message = f"the recorder turned itself off, but {engine}: {why}{fix if reason == UNKNOWN_SHAPE else ''}"
    return CaptureError("RecorderOff", message)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a job in seconds."""

    ready_s: float = 3600.0  # for the engine of a capture without a deadline
    recording_s: float = 30.0  # for the recorders of an engine that is ready
    closed_s: float = 120.0  # for the recorders' last lines, at most some megabytes
    closed_anyway_s: float = 10.0  # for the same after a failure
    image_id_s: float = 60.0  # for the operator to write the image ID, from the start of the load


PATIENT: Final = Timeouts()


@dataclass(frozen=True)
class Pod:
    """Environment of a part in its pod."""

    node: str | None = None
    image_id_file: Path = pod_files.IMAGE_ID_FILE
    switch_folder: Path = Path(pod_files.SWITCH_FOLDER)


Load = Callable[[run_settings.RunSettings, Path, Stop], Awaitable[LoadResult]]


class Recording:
    """A part of a capture under way."""

    def __init__(self, part: Part, timeouts: Timeouts, pod: Pod) -> None:
        self._part = part
        self._settings = part.settings
        self._places = part.places
        self._timeouts = timeouts
        self._pod = pod
        self._recorders = Recorders(part.places)

    async def run(self, load: Load) -> Run:
        """Record the part, and return the facts about it that are not in its files."""
        stop = Stop()
        stop_on_signals(stop)
        if self._part.arm is None:
            return await self._record(load, stop)
        switch = EngineSwitch(self._pod.switch_folder)
        folder = {FOLDER_VARIABLE: str(self._places.segments)}
        await switch.start(self._part.arm.command, self._part.arm.env | folder)
        async with beside(self._watch_switch(switch, stop)):
            run = await self._record(load, stop)
            # The answers of each arm are compared once, after the measurement.
            compares = self._part.asked.experiment is not None and self._places.repetition == 1
            if compares and self._settings.checks != _NO_CHECKS:
                await self._check(stop)
        await switch.stop()
        return run

    async def _check(self, stop: Stop) -> None:
        source = await asyncio.to_thread(prompt_source, self._settings)
        checking = asyncio.create_task(check_answers(self._settings, self._settings.checks, source))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({checking, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if stop.is_set:
            checking.cancel()
            raise self._stopped(stop)
        with pod_files.volume_errors(self._places.root):
            part = self._places.folder / f"{CHECKS}{PART_SUFFIX}"
            part.write_bytes(msgspec.json.encode(await checking) + b"\n")

    def _stopped(self, stop: Stop) -> CaptureError:
        return self._recorders.failure or CaptureError("Cancelled", f"stopped before its end: {stop.reason}")

    async def _record(self, load: Load, stop: Stop) -> Run:
        recorders = self._recorders
        await self._wait_for_engine(stop)
        await recorders.wait_until_recording(self._timeouts.recording_s)
        watches = [asyncio.create_task(recorders.watch(stop)), asyncio.create_task(self._watch_engine(stop))]
        deadline_s = self._settings.deadline_seconds or self._timeouts.ready_s
        message = f"the load did not end within spec.deadlineSeconds ({deadline_s:g}): raise it, or send fewer requests"
        late = CaptureError("DeadlineExceeded", message)
        deadline = asyncio.get_running_loop().call_later(deadline_s, self._fail, late, stop)
        image_id_until_s = time.monotonic() + self._timeouts.image_id_s
        try:
            result = await self._load(load, stop)
        except CaptureError:
            await self._close_anyway()
            raise
        finally:
            for watch in watches:
                watch.cancel()
            deadline.cancel()
        if stop.is_set:
            await self._close_anyway()
            raise self._stopped(stop)
        with pod_files.volume_errors(self._places.root):
            await recorders.close(self._timeouts.closed_s)
        return Run(
            zero_monotonic_s=result.zero_monotonic_s,
            zero_wall_s=result.zero_wall_s,
            segments=recorders.segments(),
            counters=_counters(result.metrics),
            no_counters=result.metrics.reason if isinstance(result.metrics, NoMetrics) else None,
            node=self._pod.node,
            image_id=await pod_files.engine_image_id(self._pod.image_id_file, self._places.attempt, image_id_until_s),
        )

    async def _watch_engine(self, stop: Stop) -> None:
        """Stop the load when the engine is gone: a killed engine sends no report, and its restart takes minutes."""
        async with self._monitor() as monitor:
            await monitor.wait_until_gone()
        message = "the engine ended during the recording: its port is closed; see its log"
        self._fail(CaptureError("EngineExited", message), stop)

    async def _watch_switch(self, switch: EngineSwitch, stop: Stop) -> None:
        """Stop the load when the switcher reports the end of the engine, which may never have listened."""
        self._fail(CaptureError("EngineExited", f"{await switch.wait_until_ended()}: see its log"), stop)

    def _fail(self, failure: CaptureError, stop: Stop) -> None:
        self._recorders.failure = self._recorders.failure or failure
        stop.set(failure.message)

    async def _wait_for_engine(self, stop: Stop) -> None:
        arm = self._part.arm
        within_s = arm.start_seconds if arm else self._settings.deadline_seconds or self._timeouts.ready_s
        async with self._monitor() as monitor:
            try:
                await monitor.wait_until_ready(within_s, stop)
            except EngineNotReadyError as error:
                reason = "Cancelled" if stop.is_set else "EngineNotReady"
                raise self._recorders.failure or CaptureError(reason, f"the engine: {error}") from error

    def _monitor(self) -> EngineMonitor:
        engine = self._settings.engine
        try:
            return EngineMonitor(engine.url, run_settings.tls_of(engine))
        except run_settings.InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error

    async def _load(self, load: Load, stop: Stop) -> LoadResult:
        try:
            return await load(self._settings, self._places.folder, stop)
        except BadDatasetError as error:
            raise CaptureError("InvalidDataset", str(error)) from error
        except run_settings.InvalidSettingsError as error:
            raise CaptureError("InvalidSettings", str(error)) from error
        except OSError as error:
            # The client's log keeps only the message of its own error.
            why = stop.reason or ""
            if error.errno == errno.ENOSPC or os.strerror(errno.ENOSPC) in why or "took only part" in why:
                message = f"the volume at {self._places.root} is full: use a larger one"
                raise CaptureError("DiskFull", message) from error
            raise CaptureError("VolumeFailed", f"{error}{f' ({why})' if why else ''}") from error

    async def _close_anyway(self) -> None:
        """Complete the recorded files after a failure."""
        with suppress(CaptureError, OSError):
            await self._recorders.close(self._timeouts.closed_anyway_s)


def _counters(metrics: MetricsDelta | NoMetrics) -> EngineCounters | None:
    if isinstance(metrics, NoMetrics):
        return None
    speculation = metrics.speculation
    return EngineCounters(
        generation_tokens=metrics.generation_tokens,
        drafts=speculation.drafts if speculation else None,
        draft_tokens=speculation.draft_tokens if speculation else None,
        accepted_tokens=speculation.accepted_tokens if speculation else None,
        num_gpu_blocks=metrics.num_gpu_blocks,
        kv_cache_tokens=metrics.kv_cache_tokens,
    )


_LARGEST_ANSWER_BYTES: Final = 2**22
_SEED: Final = 0
_TOOL: Final = "answer"
# Every member has few values, so that the answer of any model ends.
_PROPERTIES: Final[Mapping[str, Any]] = {
    "answer": {"type": "string", "enum": ["yes", "no", "unknown"]},
    "certain": {"type": "boolean"},
    "score": {"type": "integer", "enum": [1, 2, 3, 4, 5]},
}
_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": _PROPERTIES,
    "required": list(_PROPERTIES),
    "additionalProperties": False,
}


class NotAnsweredError(Exception):
    """A request got no readable answer."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # rejected by the engine, which would reject it again


class _Form(Struct, forbid_unknown_fields=True):
    answer: Literal["yes", "no", "unknown"]
    certain: bool
    score: Annotated[int, Meta(ge=1, le=5)]


class _Logprobs(Struct):
    top_logprobs: list[dict[str, float] | None] | None = None


class _Function(Struct):
    name: str
    arguments: str


class _ToolCall(Struct):
    function: _Function


class _Message(Struct):
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    text: str | None = None
    token_ids: list[formats.Word] | None = None
    logprobs: _Logprobs | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: formats.Count = 0


class _Answer(Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage = _Usage()


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_FORM: Final = msgspec.json.Decoder(_Form)


class CheckRequests:
    """Client that sends one request at a time to one engine."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        # The engine is in the same pod, so proxy variables do not apply.
        self._client = httpx.AsyncClient(
            base_url=f"http{'s' if server.tls else ''}://{server.host}:{server.port}{server.path}",
            headers=headers,
            timeout=timeout_s,
            trust_env=False,
            verify=server.tls or True,
        )
        self._model = server.model

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def greedy(
        self, prompt: Sequence[int] | str, sha256: str, most_tokens: int, *, ignore_eos: bool
    ) -> formats.GreedyAnswer:
        """Return the greedy continuation of a prompt."""
        wanted = {"ignore_eos": ignore_eos, "logprobs": 2, "return_token_ids": True}
        # Different tokens may have the same text, so token ids are returned.
        wanted |= {"return_tokens_as_token_ids": True}
        answer = await self._ask("/completions", {"prompt": prompt, "max_tokens": most_tokens, **wanted}, sha256)
        choice = answer.choices[0]
        if choice.token_ids is None:
            raise NotAnsweredError("the engine does not return the token ids of its answer", refused=True)
        likeliest = (choice.logprobs.top_logprobs if choice.logprobs else None) or []
        # How far the most likely token is ahead of the second.
        best = [sorted((each or {}).values(), reverse=True) for each in likeliest]
        margins = [each[0] - each[1] if len(each) > 1 else None for each in best]
        tokens = choice.token_ids[: formats.MOST_CHECK_TOKENS]
        missing: list[float | None] = [None] * len(tokens)
        return formats.GreedyAnswer(
            prompt_sha256=sha256,
            prompt_tokens=len(prompt) if not isinstance(prompt, str) else answer.usage.prompt_tokens,
            tokens=tokens,
            top2_margin=(margins + missing)[: len(tokens)],
        )

    async def structured(self, prompt: Sequence[int] | str, salt: str) -> str | None:
        """Request JSON of the schema; return None if it is valid, or the problem without the content."""
        form = {"type": "json_schema", "json_schema": {"name": _TOOL, "schema": _SCHEMA}}
        document = {"prompt": prompt, "max_tokens": formats.MOST_CHECK_TOKENS, "response_format": form}
        choice = (await self._ask("/completions", document, salt)).choices[0]
        return _wrong_form(choice.text or "", choice.finish_reason)

    async def tool_call(self, question: str, salt: str) -> str | None:
        """Request a call of a named function; return as `structured` does."""
        # Without `strict`, some parsers accept any JSON.
        function = {"name": _TOOL, "parameters": _SCHEMA, "strict": True}
        document = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": formats.MOST_CHECK_TOKENS,
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": _TOOL}},
        }
        choice = (await self._ask("/chat/completions", document, salt)).choices[0]
        calls = (choice.message.tool_calls if choice.message else None) or []
        if [call.function.name for call in calls] != [_TOOL]:
            return f"{len(calls)} calls instead of one call of the named function"
        return _wrong_form(calls[0].function.arguments, choice.finish_reason)

    async def _ask(self, path: str, document: Mapping[str, Any], salt: str) -> _Answer:
        # The prefix cache of the load was computed in batches, so a salt excludes it.
        always = {"model": self._model, "temperature": 0, "seed": _SEED, "cache_salt": f"specdecode-{salt}"}
        try:
            async with self._client.stream("POST", path, json={**always, **document}) as response:
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > _LARGEST_ANSWER_BYTES:
                        raise NotAnsweredError(f"an answer of more than {_LARGEST_ANSWER_BYTES} bytes")
        except httpx.HTTPError as error:
            raise NotAnsweredError(f"{type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            status = f"HTTP {response.status_code}: {error_text(body)}"
            raise NotAnsweredError(status, refused=response.is_client_error)
        try:
            return _ANSWER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotAnsweredError("an unreadable answer") from error


def _wrong_form(text: str, finish_reason: str | None) -> str | None:
    try:
        _FORM.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return f"{len(text)} characters that do not match the schema, ended by {clip(str(finish_reason), 20)}"
    return None


_BUDGET_S: Final = 180.0  # time limit of each check; requests answered by then count
_NONE_ASKED: Final = "spec.checks requests none"
_NO_TIME: Final = "there was no time for any"
_SHOWN_FAILURES: Final = 5
_LONGEST_REASON: Final = 500
# Replaces random token ids, which no chat template accepts.
_QUESTION: Final = "Is {} an even number? Answer through the function."

_Subject = TypeVar("_Subject")


async def check_answers(
    settings: RunSettings, wanted: CheckSettings, source: PromptSource, budget_s: float = _BUDGET_S
) -> formats.Checks:
    """Send an engine the questions for all arms; missing answers are reported and not raised."""
    phases = [phase.name for phase in settings.workload.phases]

    def asked(count: int) -> list[tuple[Sequence[int] | str, int]]:
        """Return prompts and output limits, by turns of the workload's phases."""
        places = [(phases[number % len(phases)], number // len(phases)) for number in range(count)]
        return [
            (source.first(*place).content, min(source.output_tokens(*place), formats.MOST_CHECK_TOKENS))
            for place in places
        ]

    prompts = [prompt for prompt, _ in asked(wanted.structured_requests)]
    questions = [
        prompt if isinstance(prompt, str) else _QUESTION.format(number) for number, prompt in enumerate(prompts)
    ]
    async with CheckRequests(server_of(settings.engine), settings.workload.timeout_seconds) as requests:
        return formats.Checks(
            greedy=await _greedy(requests, asked(wanted.greedy_prompts), budget_s, ignore_eos=source.ignore_eos),
            structured=await _parsing(requests.structured, prompts, budget_s),
            tool_calls=await _parsing(requests.tool_call, questions, budget_s),
        )


async def _greedy(
    requests: CheckRequests, asked: Sequence[tuple[Sequence[int] | str, int]], budget_s: float, *, ignore_eos: bool
) -> formats.GreedyCheck:
    answers: list[formats.GreedyAnswer] = []
    rejected = _NONE_ASKED
    until_s = time.monotonic() + budget_s
    for prompt, most_tokens in asked:
        if time.monotonic() >= until_s:
            rejected = _NO_TIME
            break
        sha256 = hashlib.sha256(msgspec.json.encode(prompt)).hexdigest()
        try:
            answers.append(await requests.greedy(prompt, sha256, most_tokens, ignore_eos=ignore_eos))
        except NotAnsweredError as error:
            reason = clip(str(error), _LONGEST_REASON)
            if not error.refused:
                return formats.GreedyCheck(not_measured=reason)
            # Every arm rejects it, for example because the prompt is too long.
            rejected = reason
    return formats.GreedyCheck(answers=answers, not_measured=None if answers else rejected)


async def _parsing(
    ask: Callable[[_Subject, str], Awaitable[str | None]], asked: Sequence[_Subject], budget_s: float
) -> formats.ParsingCheck:
    failures: list[str] = []
    number = 0
    until_s = time.monotonic() + budget_s
    for subject in asked:
        if time.monotonic() >= until_s:
            break
        try:
            wrong = await ask(subject, str(number))
        except NotAnsweredError as error:
            wrong = clip(str(error), _LONGEST_REASON)
            if error.refused and number == len(failures):
                # It would reject all of them, for example because the tokenizer has no chat template.
                return formats.ParsingCheck(not_measured=wrong)
        number += 1
        failures += [wrong] if wrong is not None else []
    return formats.ParsingCheck(
        asked=number,
        parsed=number - len(failures),
        failures=failures[:_SHOWN_FAILURES],
        not_measured=None if number else _NO_TIME if asked else _NONE_ASKED,
    )
