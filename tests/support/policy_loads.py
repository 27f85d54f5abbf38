"""Days of scripted load for a policy: what settings bring is asked of replay engines in virtual time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from random import Random
from typing import Final

from specdecode_operator.deployment.speculation_policy import Evidence, Memory, Point, Rules, Seen, Setting, decide
from specdecode_operator.enums import PolicyAction, PolicyOutcome
from specdecode_operator.replay.clocks import VirtualClock
from specdecode_operator.replay.emulated.engine_model import StepTime, from_rates
from specdecode_operator.replay.engine import Burst, Incoming
from specdecode_operator.replay.model_file import Limits
from specdecode_operator.replay.stepped_engine import SteppedEngine
from specdecode_operator.replay.virtual_run import GivenBehaviour
from specdecode_operator.stats.engine_window import Sample, Window, Work

HOUR_S: Final = 3600.0
START_S: Final = 240.0
REPLICAS: Final = 3
DRAFTS: Final = {"off": 0, "k1": 1, "k3": 3}
"""Settings, with the tokens of their drafts."""

MEASURED: Final = (2, 8, 32, 64, 128)
USUAL: Final = 0.68
"""Chance of each drafted token to be accepted, after those before it."""

_STEP_TIME: Final = StepTime(
    curve=((1, 20.0), (64, 21.0), (128, 25.0), (512, 75.0)), request_us=20.0, draft_ms=4.5, draft_request_us=8.0
)
_STEPS: Final = 60
_HALF_WIDTH: Final = 0.015


@cache
def goodput(setting: str, running: int, chance: float) -> tuple[float, float, float]:
    """Return tokens, drafts and accepted tokens a second of an engine that always has so many requests."""
    if running == 0:
        return 0.0, 0.0, 0.0
    width = DRAFTS[setting]
    acceptance = from_rates([chance ** (place + 1) for place in range(width)], 1.0) if width else None
    clock, tokens = VirtualClock(), Counter[str]()
    behaviour = GivenBehaviour(_STEP_TIME, acceptance, seed=running)
    engine = SteppedEngine(clock, behaviour, Limits(max_num_seqs=256, num_gpu_blocks=100_000))

    def take(burst: Burst) -> None:
        tokens.update(tokens=burst.tokens, drafts=bool(burst.drafted), accepted=burst.accepted)

    for number in range(running):
        engine.submit(Incoming(request_id=str(number), prompt_tokens=16, max_tokens=10**6), take)
    clock.run(until_ms=2000.0)
    tokens.clear()
    clock.run(until_ms=2000.0 + _STEPS * 50)
    seconds = _STEPS * 50 / 1000
    return tokens["tokens"] / seconds, tokens["drafts"] / seconds, tokens["accepted"] / seconds


def measured() -> Evidence:
    """Return what a capture with these settings says, against speculation that is on."""
    baseline = "k3"
    settings = []
    for name, drafts in DRAFTS.items():
        _, begun, accepted = goodput(name, 32, USUAL)
        ratios = [(load, goodput(name, load, USUAL)[0] / goodput(baseline, load, USUAL)[0]) for load in MEASURED]
        width = 0.0 if name == baseline else _HALF_WIDTH
        points = [Point(load, load, ratio, ratio * (1 - width), ratio * (1 + width)) for load, ratio in ratios]
        settings.append(Setting(name, points, drafts, accepted / (begun * drafts) if drafts else None))
    return Evidence("nightly", settings, [(load, goodput(baseline, load, USUAL)[0]) for load in MEASURED])


@dataclass(frozen=True)
class Script:
    """A day: how many requests run in a replica, and what of drafts is accepted, by the hour."""

    name: str
    running: Callable[[float], int]
    chance: Callable[[float, int], float] = lambda _hour, _replica: USUAL
    """By the hour and the replica; a replica that decays is well again after its start."""

    expected: tuple[PolicyAction, ...] = ()
    """What is done, and nothing else."""

    hours: float = 24.0
    answers: Callable[[float], bool] = lambda _hour: True
    """Whether engines answer."""

    def rounds(self, round_s: float) -> list[float]:
        """Return the seconds at which it is looked."""
        return [number * round_s for number in range(round(self.hours * HOUR_S / round_s))]


def _decays(hour: float, replica: int) -> float:
    return max(0.1, USUAL - 0.2 * max(0.0, hour - 6)) if replica == 1 else USUAL


_OFF, _AGAIN = PolicyAction.TURN_OFF, PolicyAction.TRY_AGAIN
SCRIPTS: Final = (
    Script("acceptance drops for good", lambda _: 8, lambda hour, _: USUAL if hour < 4 else 0.05, (_OFF, _AGAIN, _OFF)),
    Script(
        "acceptance drops and recovers", lambda _: 8, lambda hour, _: 0.05 if 4 <= hour < 6 else USUAL, (_OFF, _AGAIN)
    ),
    *(
        Script(
            f"load oscillates each {minutes} minutes",
            lambda hour, minutes=minutes: 96 if hour * 60 // minutes % 2 else 8,  # type: ignore[misc]
            expected=(PolicyAction.CHANGE,),
        )
        for minutes in (5, 20, 30, 60, 90)
    ),
    Script(
        "day and night", lambda hour: 96 if 8 <= hour < 20 else 8, expected=(PolicyAction.CHANGE, PolicyAction.CHANGE)
    ),
    Script(
        "spike of four hours at good acceptance", lambda hour: 128 if 10 <= hour < 14 else 8, expected=(_OFF, _AGAIN)
    ),
    Script("spike of ten minutes", lambda hour: 128 if 10 <= hour < 10 + 1 / 6 else 8),
    Script("starved of samples", lambda hour: 2 if hour * 60 % 40 < 1 else 0, answers=lambda hour: hour * 60 % 30 < 10),
    Script("one replica decays", lambda _: 8, _decays, (PolicyAction.RESTART,)),
)


@dataclass
class Day:
    """What came of a day."""

    tokens: float = 0.0
    best_tokens: float = 0.0
    done: list[PolicyAction] = field(default_factory=list)
    at_hours: list[float] = field(default_factory=list)
    outcomes: set[PolicyOutcome] = field(default_factory=set)
    best_changes: int = 0

    @property
    def regret(self) -> float:
        """Share of the tokens of an oracle that are missing."""
        return 1 - self.tokens / self.best_tokens

    @property
    def in_vain(self) -> int:
        """How often speculation was tried again and turned off again: the price of not seeing it while it is off."""
        return sum(pair == (_AGAIN, _OFF) for pair in pairwise(self.done))

    @property
    def flaps(self) -> int:
        """Changes more than the oracle's, but for tries in vain."""
        changes = sum(action is not PolicyAction.RESTART for action in self.done)
        return max(0, changes - self.best_changes - 2 * self.in_vain)


def live(script: Script, rules: Rules, evidence: Evidence, window_s: float, round_s: float = 60.0) -> Day:
    """Let a policy serve a day, and an oracle that knows all of it beforehand."""
    random, day, memory = Random(script.name), Day(), Memory("k3")
    window, counters = Window(window_s), [Work() for _ in range(REPLICAS)]
    healed, busy_until_s = False, -1.0
    for now_s in script.rounds(round_s):
        hour = now_s / HOUR_S
        running = script.running(hour)
        engines = [
            goodput(memory.in_force, running, USUAL if healed else round(script.chance(hour, each), 2))
            for each in range(REPLICAS)
        ]
        settled = now_s >= busy_until_s
        day.tokens += sum(each[0] for each in engines) * round_s * (1 if settled else 1 - 1 / REPLICAS)
        for each, (_, drafts, accepted) in enumerate(engines):
            begun = round(drafts * round_s)
            counters[each] += Work(0, begun, begun * DRAFTS[memory.in_force], round(accepted * round_s))
        if not settled:
            window = Window(window_s)
        elif script.answers(hour):
            seen = max(0.0, random.gauss(running, 0.3 * running**0.5)) if running else 0.0
            window = window.add(Sample(now_s, seen, {str(each): counters[each] for each in range(REPLICAS)}))
        at = Seen(now_s, window, settled, START_S)
        decision, memory = decide(rules, evidence, at, memory, lambda _: "")
        day.outcomes.add(decision.outcome)
        if decision.outcome is PolicyOutcome.DONE:
            restarts_one = decision.action is PolicyAction.RESTART
            healed = healed or restarts_one
            busy_until_s = now_s + START_S * (1 if restarts_one else REPLICAS)
            day.done.append(decision.action)
            day.at_hours.append(hour)
    day.best_tokens, day.best_changes = _oracle(script, round_s)
    return day


def _oracle(script: Script, round_s: float) -> tuple[float, int]:
    """Return the most tokens that changes at any moment could bring, each at the price of a start, and how many."""
    best = {name: (0.0 if name == "k3" else float("-inf"), 0) for name in DRAFTS}
    for now_s in script.rounds(round_s):
        hour = now_s / HOUR_S
        running = script.running(hour)
        now: dict[str, tuple[float, int]] = {}
        for name in DRAFTS:
            # A replica that decays is started anew at once, at no price.
            chance = round(script.chance(hour, 0), 2)
            rate = REPLICAS * goodput(name, running, chance)[0]
            stayed = best[name]
            came = max(
                (tokens - START_S * rate, -changes - 1) for other, (tokens, changes) in best.items() if other != name
            )
            tokens, changes = max((stayed[0], -stayed[1]), came)
            now[name] = (tokens + rate * round_s, -changes)
        best = now
    return max(best.values(), key=lambda each: (each[0], -each[1]))
