"""Bursty traffic on the engines of two pools, and the counters that an engine shows at each scrape."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from specdecode_operator.stats.pool_comparison import Served

SCRAPE_S = 15.0
PROMPT_TOKENS_PER_S = 20_000.0


@dataclass(frozen=True)
class Engine:
    """How fast an engine is: its figures relative to those of the other pool."""

    step_time: float = 1.0
    tokens_per_step: float = 1.0
    prefill_time: float = 1.0
    errors: float = 0.002  # share of requests


@dataclass(frozen=True)
class Traffic:
    """Requests of one run."""

    sessions_per_s: float = 0.4  # for each engine
    requests_a_session: float = 4.0  # all of them go to the same engine, as with connections that are kept
    burst: float = 0.7  # standard deviation of the logarithm of the rate, which changes each minute
    spread: float = 1.0  # of the logarithm of prompt and output lengths
    prompt_tokens: float = 800.0
    output_tokens: float = 200.0
    skew: float = 0.0  # standard deviation of the logarithm of an engine's share of the sessions, for the whole run


def rates(traffic: Traffic, minutes: int, random: Random) -> list[float]:
    """Return the sessions per second and engine in each minute, which are equal for all engines."""
    found, level = [], random.gauss(0, 1)
    for _ in range(minutes):
        found.append(traffic.sessions_per_s * math.exp(traffic.burst * level - traffic.burst**2 / 2))
        level = 0.5 * level + math.sqrt(0.75) * random.gauss(0, 1)
    return found


def _arrivals(traffic: Traffic, per_minute: list[float], random: Random) -> list[float]:
    found, stay = [], 1 - 1 / traffic.requests_a_session
    factor = math.exp(random.gauss(0, traffic.skew)) if traffic.skew else 1.0
    for minute, rate in enumerate(per_minute):
        at_s = 60.0 * minute + random.expovariate(rate * factor)
        while at_s < 60 * (minute + 1):
            next_s = at_s
            found.append(next_s)
            while random.random() < stay:
                next_s += random.expovariate(0.2)
                found.append(next_s)
            at_s += random.expovariate(rate * factor)
    return sorted(found)


def scrapes(engine: Engine, traffic: Traffic, per_minute: list[float], random: Random) -> Iterator[Served]:
    """Yield the counters of one engine at each scrape.

    Prompts are processed one after the other; running requests share the engine, whose step takes longer the more of
    them there are, and whose speed varies by a few percent.
    """
    starts, free_s = [], 0.0
    for at_s in _arrivals(traffic, per_minute, random):
        tokens = traffic.prompt_tokens * math.exp(random.gauss(0, traffic.spread))
        free_s = max(at_s, free_s) + engine.prefill_time * tokens / PROMPT_TOKENS_PER_S
        starts.append((free_s, free_s + 0.01 - at_s, tokens))
    running: list[tuple[float, float]] = []
    gain = done = clock_s = noise = 0.0
    place, end_s = 0, 60.0 * len(per_minute)
    steps = tokens = seconds = first_s = prompts = 0.0
    firsts = finished = answered = 0
    look_s = SCRAPE_S
    while look_s <= end_s:
        start_s = starts[place][0] if place < len(starts) else math.inf
        next_s = min(start_s, look_s)
        step_s = engine.step_time * (0.02 + 0.0006 * len(running)) * (1 + noise)
        if running:
            left_s = (running[0][0] - done) * step_s
            next_s = min(next_s, clock_s + left_s)
        passed = (next_s - clock_s) / step_s
        done += passed if running else 0.0
        steps += len(running) * passed
        tokens += gain * passed
        seconds += len(running) * (next_s - clock_s)
        clock_s = next_s
        if running and running[0][0] <= done + 1e-9:
            gain -= heappop(running)[1]
            finished += 1
            answered += random.random() >= engine.errors
        elif clock_s == start_s:
            accepted = engine.tokens_per_step * 2.5 * math.exp(random.gauss(0, 0.25))
            length = traffic.output_tokens * math.exp(random.gauss(0, traffic.spread))
            heappush(running, (done + length / accepted, accepted))
            gain += accepted
            firsts, first_s, prompts = firsts + 1, first_s + starts[place][1], prompts + starts[place][2]
            place += 1
        else:
            yield Served(firsts, first_s, int(prompts), int(tokens), seconds, int(steps), finished, answered)
            noise = 0.8 * noise + 0.6 * random.gauss(0, 0.02)
            look_s += SCRAPE_S


def looks(
    seed: int,
    stable: int = 3,
    canary: int = 1,
    engine: Engine = Engine(),
    traffic: Traffic = Traffic(),
    minutes: int = 60,
) -> Iterator[tuple[float, dict[str, Served], dict[str, Served]]]:
    """Yield the time and the counters of both pools at each scrape; ``engine`` is that of the canary."""
    per_minute = rates(traffic, minutes, Random(f"{seed}"))
    engines = [Engine()] * stable + [engine] * canary
    series = [scrapes(each, traffic, per_minute, Random(f"{seed}-{number}")) for number, each in enumerate(engines)]
    for look, counters in enumerate(zip(*series, strict=True), start=1):
        named = {f"engine-{number}": each for number, each in enumerate(counters)}
        pools = [
            {name: each for name, each in named.items() if (name >= f"engine-{stable}") is new} for new in (False, True)
        ]
        yield SCRAPE_S * look, pools[0], pools[1]
