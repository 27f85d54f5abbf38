"""A load on an engine in virtual time: what the load generator of a capture does, without waiting."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from specdecode_operator.api.capture_workload import Pattern, Phase
from specdecode_operator.capture.load.arrivals import arrival_offsets_s
from specdecode_operator.capture.load.workload import needed
from specdecode_operator.replay.engines.engine import Burst, Incoming, ReplayEngine
from specdecode_operator.replay.engines.virtual_clock import VirtualClock
from specdecode_operator.replay.recording.recording import RecordedRequest
from specdecode_operator.replay.synth.prompts import Prompts

Done = Callable[[], None]


class Watcher(Protocol):
    """Who writes down what becomes of requests."""

    def watch(self, request: Incoming, phase: str | None, done: Done) -> Callable[[Burst], None]:
        """Return who takes its bursts, and says when it is over."""


@dataclass(kw_only=True)
class VirtualLoad:
    """Sends phases, one after another, each until all of its requests are answered."""

    clock: VirtualClock
    engine: ReplayEngine
    watcher: Watcher
    prompts: Prompts
    name: str
    turnarounds_ms: Sequence[float] = (0.0,)  # from a client's last token to its next request: one of them each time
    random: Random = field(default_factory=lambda: Random(0))  # noqa: S311  not for secrets

    def run(self, phase: Phase) -> None:
        """Send a phase and wait for its end."""
        match phase.pattern:
            case Pattern.CLOSED | Pattern.MULTITURN:
                _Clients(self, phase).start()
            case _:
                offsets_ms = (1000 * offset_s for offset_s in arrival_offsets_s(phase, self.prompts.seed))
                _Open(self, phase, self.clock.now_ms(), enumerate(offsets_ms)).next()
        self.clock.run()

    def send(self, request: Incoming, phase: str | None, done: Done) -> None:
        """Send one request now."""
        self.engine.submit(request, self.watcher.watch(request, phase, done))

    def turnaround_ms(self) -> float:
        """Return how long a client takes this time."""
        return self.random.choice(self.turnarounds_ms)

    def first(self, phase: Phase, index: int) -> Incoming:
        """Return a request that has nothing to do with others, but for the shared prefix."""
        name = f"{phase.name}-{index}"
        own, output = self.prompts.lengths(name)
        tokens = self.prompts.shared_prefix_tokens + own
        return Incoming(
            request_id=f"{self.name}-{name}",
            prompt_tokens=tokens,
            max_tokens=output,
            block_hashes=self.prompts.hashes(name, tokens),
            ignore_eos=True,
        )


@dataclass
class _Open:
    """Requests that come at their times, whatever becomes of those before."""

    load: VirtualLoad
    phase: Phase
    start_ms: float
    offsets_ms: Iterator[tuple[int, float]]

    def next(self) -> None:
        """Wait for the next request's time."""
        if (planned := next(self.offsets_ms, None)) is not None:
            index, offset_ms = planned
            self.load.clock.call_at(self.start_ms + offset_ms, partial(self._send, index))

    def _send(self, index: int) -> None:
        self.next()
        self.load.send(self.load.first(self.phase, index), self.phase.name, _nothing)


@dataclass
class _Clients:
    """Clients that send one request after another, or hold one conversation after another."""

    load: VirtualLoad
    phase: Phase
    sent: int = 0
    conversations: int = 0
    until_ms: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin now."""
        duration_s = self.phase.duration_seconds
        self.until_ms = float("inf") if duration_s is None else self.load.clock.now_ms() + 1000 * duration_s

    def start(self) -> None:
        """Let all clients begin."""
        for _ in range(needed(self.phase.concurrency)):
            self._begin()

    def _begin(self) -> None:
        """Have a client send its next request, or begin its next conversation; nothing when the phase is over."""
        if not self._goes_on():
            return
        if self.phase.pattern == Pattern.MULTITURN:
            self.conversations += 1
            self._say(self.conversations - 1, 0, self.load.prompts.shared_prefix_tokens)
        else:
            self.sent += 1
            self.load.send(self.load.first(self.phase, self.sent - 1), self.phase.name, self._next)

    def _next(self) -> None:
        self.load.clock.call_at(self.load.clock.now_ms() + self.load.turnaround_ms(), self._begin)

    def _say(self, conversation: int, turn: int, said_before: int) -> None:
        """Send a turn: all that was said before, and some tokens more."""
        if not self._goes_on():
            return
        self.sent += 1
        load, name = self.load, f"{self.phase.name}/{conversation}"
        own, output = load.prompts.lengths(f"{name}/{turn}")
        tokens = said_before + own
        hashes = load.prompts.hashes(name, tokens + output)
        known = tokens // load.prompts.block_size
        request = Incoming(
            request_id=f"{load.name}-{self.phase.name}-{self.sent - 1}",
            prompt_tokens=tokens,
            max_tokens=output,
            block_hashes=hashes[:known],
            answer_hashes=hashes[known:],
            ignore_eos=True,
        )
        last = turn + 1 == needed(self.phase.turns)
        load.send(
            request, self.phase.name, self._next if last else partial(self._think, conversation, turn, tokens + output)
        )

    def _think(self, conversation: int, turn: int, said: int) -> None:
        when_ms = self.load.clock.now_ms() + 1000 * (self.phase.think_seconds or 0) + self.load.turnaround_ms()
        self.load.clock.call_at(when_ms, partial(self._say, conversation, turn + 1, said))

    def _goes_on(self) -> bool:
        if self.phase.requests is not None and self.sent >= self.phase.requests:
            return False
        return self.load.clock.now_ms() < self.until_ms


def _nothing() -> None:
    pass


def replayed(
    requests: Sequence[RecordedRequest], load_factor: float, block_size: int
) -> Iterator[tuple[float, Incoming, str | None]]:
    """Return recorded requests with the moments in which they come: earlier by the factor, each as long as it was."""
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
    """Return the hashes of answers that a later prompt begins with: that of the next turn of a conversation."""
    found: dict[int, Sequence[int]] = {}
    ends: dict[int, int] = {}
    """By the hash of a prompt's last full block, which stands for all before it: whose prompt it is."""
    for index, each in enumerate(requests):
        hashes = each.block_hashes or ()
        for place, value in enumerate(hashes[:-1], start=1):
            if (earlier := ends.get(value)) is not None and earlier not in found:
                said = requests[earlier].prompt_tokens + requests[earlier].output_tokens
                found[earlier] = hashes[place : said // block_size]
        if hashes:
            ends[hashes[-1]] = index
    return found
