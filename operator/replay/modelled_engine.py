"""Draw step times and bursts for a stepped engine from a fitted model (`--mode modelled`)."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Final

from specdecode_operator.replay.drafting import position_chance
from specdecode_operator.replay.emulated.engine_model import StepShape, step_time_from_json
from specdecode_operator.replay.engine import Incoming
from specdecode_operator.replay.model_file import (
    BURST,
    CONTEXT,
    DECODING,
    PACES,
    POSITION,
    PREFILL_TOKENS,
    Bursts,
    Cell,
    Donors,
    FittedModel,
    bucket,
    value_at,
)

Key = tuple[int, ...]
"""Class, pace, burst before, decoding requests, position, context, each as its bucket; or a beginning of it."""

_DEVIATIONS: Final = 3.0
_DEPTHS: Final = (0, 1, 2, 3, 4, 5, 6)
_PRIOR: Final = 10.0
"""What the level above says counts as so many bursts."""


class BurstChances:
    """Chances of each size, summed up to it, by key."""

    def __init__(self, bursts: Bursts) -> None:
        """Add up what was recorded, at each level."""
        self._counts: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._below: dict[Key, set[Key]] = defaultdict(set)
        self._parted: dict[Key, bool] = {}
        self._found: dict[Key, Sequence[float]] = {}
        columns = (bursts.classes, bursts.paces, bursts.before, bursts.decoding, bursts.positions, bursts.contexts)
        for *key, tokens, count in zip(*columns, bursts.tokens, bursts.counts, strict=True):
            for depth in _DEPTHS:
                self._counts[tuple(key[:depth])][tokens] += count
                if depth:
                    self._below[tuple(key[: depth - 1])].add(tuple(key[:depth]))
        self.sizes: Sequence[int] = sorted(self._counts[()]) or [1]
        self._chances: dict[Key, dict[int, float]] = {}

    def up_to(self, key: Key) -> Sequence[float]:
        """Return, for each of `sizes`, the chance that a burst is not larger."""
        found = self._found.get(key)
        if found is None:
            total, sums = 0.0, list[float]()
            chances = self._of(key)
            for size in self.sizes:
                total += chances.get(size, 0.0)
                sums.append(total)
            sums[-1] = 1.0
            found = self._found[key] = sums
        return found

    def _of(self, key: Key) -> dict[int, float]:
        if key not in self._chances:
            self._chances[key] = (
                self._mixed(key, self._of(key[:-1])) if key else _shares(self._counts.get(()) or {1: 1})
            )
        return self._chances[key]

    def _mixed(self, key: Key, above: dict[int, float]) -> dict[int, float]:
        counts = self._counts.get(key)
        if counts is None or not self._parts(key[:-1]):
            return above
        total = sum(counts.values()) + _PRIOR
        return {size: (counts.get(size, 0.0) + _PRIOR * share) / total for size, share in above.items()}

    def _parts(self, key: Key) -> bool:
        """Whether what is known next parts these bursts by more than chance: a G test, at three deviations.

        Of all or none of the parts: if only those were taken that differ most, bursts would drift to their side.
        """
        if key not in self._parted:
            parts = [self._counts[each] for each in self._below[key]]
            shares = _shares(self._counts[key])
            apart = sum(
                2 * count * math.log(count / (sum(part.values()) * shares[size]))
                for part in parts
                for size, count in part.items()
            )
            free = (len(parts) - 1) * (len(shares) - 1)
            self._parted[key] = free > 0 and apart > free + _DEVIATIONS * math.sqrt(2 * free)
        return self._parted[key]


def _shares(counts: Mapping[int, float]) -> dict[int, float]:
    total = sum(counts.values())
    return {size: count / total for size, count in counts.items()}


AcceptanceNow = Callable[[], float | None]
"""Share of drafted tokens that is to be accepted at this moment; None: as it was recorded."""

_OTHER_PREFILL: Final = 3
"""How much less alike steps of another bucket of prompt tokens are than of another number of requests."""
_GOLDEN: Final = 0.6180339887498949
_LEAST_MS: Final = 0.2
_MOST_STEP_MS: Final = 3_600_000.0
_NORMAL: Final = NormalDist()


class NoDonorsError(Exception):
    """A model that was not fitted for this: what is missing, and what to do."""


@dataclass(slots=True)
class _Course:
    behaviour: "ModelledBehaviour"
    of_class: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    before: int = 0

    def first(self) -> int:
        self.before = 0
        return self.behaviour.draw_first()

    def planned(self) -> int:
        return self.behaviour.draw_planned()

    def next(self, output_tokens: int) -> tuple[int, int]:
        behaviour = self.behaviour
        if (wanted := behaviour.acceptance_now()) is not None:
            return behaviour.draw_accepted(wanted)
        tokens = behaviour.draw_tokens(self.of_class, self.before, output_tokens, self.prompt_tokens + output_tokens)
        self.before = bucket(tokens, BURST)
        return behaviour.draw_drafted(tokens), tokens - 1


_LENGTH: Final = "tokens of a request"


class ModelledBehaviour:
    """Draws steps and bursts from the donors of a model."""

    def __init__(self, model: FittedModel, seed: int, acceptance: AcceptanceNow | None = None) -> None:
        """Take a model, and where it is to be overruled, what share of drafts is accepted when.

        Raises
        ------
        NoDonorsError
            Where the model has no donors.
        """
        if model.donors is None:
            raise NoDonorsError("the model has no donors: fit it again")
        self._donors: Donors = model.donors
        self.num_speculative_tokens = self._donors.num_speculative_tokens
        self._random = Random(f"{seed}/modelled")  # noqa: S311  not for secrets
        self._trend = step_time_from_json(self._donors.trend)
        self._leads_ms = model.ttft.lead_ms if model.ttft else []
        self._chances = BurstChances(self._donors.bursts)
        self._planned = _usually_drafted(self._donors)
        self._plans = Random(f"{seed}/plans")  # noqa: S311  not for secrets
        self._classes = list(accumulate(self._donors.classes))
        self._spread = self._random.random()
        self._cells: dict[tuple[int, int], Cell] = {}
        # Of uniform ranks, as the correlation of the normal ones that they are made of.
        self._persistence = 2 * math.sin(math.pi * self._donors.persistence / 6)
        self._mood = 0.0
        self._pace = self._decoding = 0
        self.acceptance_now: AcceptanceNow = acceptance or _as_recorded
        self._rates: dict[float, float] = {}
        self._seen: dict[str, float] = {}

    def lead_ms(self) -> float:
        """Return how long a request takes to the scheduler."""
        return value_at(self._leads_ms, self._random.random()) if self._leads_ms else 0.0

    def begin(self, request: Incoming) -> _Course:
        """Return how a request goes: of a class from its first token to its last."""
        random, donors = self._random, self._donors
        # Spread evenly, and not by chance: of few requests, too, as many are easy as were.
        self._spread = (self._spread + _GOLDEN) % 1
        of_class = min(bisect_left(self._classes, self._spread), len(self._classes) - 1)
        output_tokens, reason = request.max_tokens, "length"
        stops = donors.stops
        if not request.ignore_eos and stops.output_tokens and random.random() < stops.share:
            stopped = max(1, round(value_at(stops.output_tokens, random.random())))
            if stopped <= output_tokens:
                output_tokens, reason = stopped, "stop"
        self._see("tokens of a prompt", request.prompt_tokens)
        self._see(_LENGTH, request.prompt_tokens + output_tokens)
        return _Course(self, of_class, request.prompt_tokens, output_tokens, reason)

    def step_ms(self, step: StepShape, decoding: int) -> float:
        """Return how long a step takes: a recorded one like it, as much longer as this one is larger."""
        persistence = self._persistence
        self._mood = persistence * self._mood + math.sqrt(1 - persistence**2) * self._random.gauss(0, 1)
        share = _NORMAL.cdf(self._mood)
        self._pace = min(int(share * PACES), PACES - 1)
        self._decoding = bucket(decoding, DECODING)
        cell = self._cell(self._decoding, bucket(step.prefill_tokens, PREFILL_TOKENS))
        self._see("requests decoding at once", decoding)
        self._see("prompt tokens in a step", step.prefill_tokens)
        duration_ms = self._trend.ms(step) * value_at(cell.ratios, share)
        return min(max(duration_ms, _LEAST_MS), _MOST_STEP_MS)

    def draw_first(self) -> int:
        """Return how many tokens come at the end of a prefill."""
        firsts = self._donors.firsts
        if len(firsts) <= 1:
            return firsts[0][0] if firsts else 1
        return self._random.choices([tokens for tokens, _ in firsts], [count for _, count in firsts])[0]

    def draw_tokens(self, of_class: int, before: int, output_tokens: int, attended: int) -> int:
        """Return how many tokens a request gets in this step."""
        place = (bucket(output_tokens, POSITION), bucket(attended, CONTEXT))
        sums = self._chances.up_to((of_class, self._pace, before, self._decoding, *place))
        return self._chances.sizes[bisect_left(sums, self._random.random())]

    def draw_planned(self) -> int:
        """Return how many drafted tokens a request's next step has: as many as usual, before it is drawn what comes."""
        return math.floor(self._planned + self._plans.random())

    def draw_drafted(self, tokens: int) -> int:
        """Return how many tokens were drafted for a burst: as the engine counted them."""
        k, drafts = self.num_speculative_tokens, self._donors.drafts
        if not k or (tokens == 1 and self._random.random() >= drafts.singles):
            return 0
        drafted = math.floor(min(drafts.tokens, k) + self._random.random()) if drafts.tokens < k else k
        return max(tokens - 1, drafted, 1)

    def draw_accepted(self, wanted: float) -> tuple[int, int]:
        """Return what comes of a draft of which this share is to be accepted on average."""
        k = self.num_speculative_tokens
        if not k:
            return 0, 0
        rate = self._rates.get(wanted)
        if rate is None:
            rate = self._rates[wanted] = position_chance(wanted, k)
        accepted = 0
        while accepted < k and self._random.random() < rate:
            accepted += 1
        return k, accepted

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt and answer that were asked for."""
        return int(self._seen.get(_LENGTH, 0))

    def outside(self) -> list[str]:
        """Return what was asked of the model that lies outside of what it was fitted on, and how far."""
        ranges: Mapping[str, object] = self._donors.ranges
        said = [self._donors.ranges[name].outside(name, value) for name, value in self._seen.items() if name in ranges]
        return [line for line in said if line is not None]

    def _see(self, name: str, value: float) -> None:
        if value > self._seen.get(name, 0):
            self._seen[name] = value

    def _cell(self, decoding: int, prefill: int) -> Cell:
        found = self._cells.get((decoding, prefill))
        if found is None:
            found = min(self._donors.cells, key=lambda cell: _distance(cell, decoding, prefill))
            self._cells[decoding, prefill] = found
        return found


def _as_recorded() -> float | None:
    return None


def _usually_drafted(donors: Donors) -> float:
    """Return the tokens drafted for a request's step on average: fewer than K where a drafter often finds none."""
    bursts = donors.bursts
    singles = sum(count for tokens, count in zip(bursts.tokens, bursts.counts, strict=True) if tokens == 1)
    undrafted = (1 - donors.drafts.singles) * singles / max(1, sum(bursts.counts))
    return (1 - undrafted) * min(donors.drafts.tokens, donors.num_speculative_tokens)


def _distance(cell: Cell, decoding: int, prefill: int) -> tuple[int, int]:
    """Return how little alike a cell is; of two as near as each other the one with more steps is taken."""
    other_kind = 100 * ((cell.prefill > 0) != (prefill > 0))
    return other_kind + abs(cell.decoding - decoding) + _OTHER_PREFILL * abs(cell.prefill - prefill), -cell.steps
