"""Draw step times and bursts for a stepped engine from a fitted model (`--mode modelled`)."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from specdecode_operator.replay.drafting import draw_accepted
from specdecode_operator.replay.emulated.engine_model import StepShape, next_mood, step_time_from_json
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
    FittedModel,
    value_at,
)

Key = tuple[int, ...]
"""Class, pace, previous burst, decoding requests, position, context, each as its bucket; or a prefix of the key."""

_DEVIATIONS: Final = 3.0
_PRIOR: Final = 10.0  # weight of the level above, in bursts


class BurstChances:
    """Cumulative chances of burst sizes, by key."""

    def __init__(self, bursts: Bursts) -> None:
        """Sum the recorded bursts at each level."""
        self._counts: dict[Key, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._below: dict[Key, set[Key]] = defaultdict(set)
        self._parted: dict[Key, bool] = {}
        self._sums: dict[Key, list[float]] = {}
        self._chances: dict[Key, dict[int, float]] = {}
        columns = (bursts.classes, bursts.paces, bursts.before, bursts.decoding, bursts.positions, bursts.contexts)
        for *key, tokens, count in zip(*columns, bursts.tokens, bursts.counts, strict=True):
            for depth in range(len(key) + 1):
                self._counts[tuple(key[:depth])][tokens] += count
                if depth:
                    self._below[tuple(key[: depth - 1])].add(tuple(key[:depth]))
        self.sizes: Sequence[int] = sorted(self._counts[()]) or [1]

    def up_to(self, key: Key) -> Sequence[float]:
        """Return the chance that a burst is not larger than each of `sizes`."""
        if (found := self._sums.get(key)) is None:
            chances = self._of(key)
            found = self._sums[key] = list(accumulate(chances.get(size, 0.0) for size in self.sizes))
            found[-1] = 1.0
        return found

    def _of(self, key: Key) -> dict[int, float]:
        if (known := self._chances.get(key)) is not None:
            return known
        counts = self._counts.get(key)
        if not key:
            chances = _shares(counts or {1: 1})
        else:
            chances = self._of(key[:-1])
            if counts is not None and self._parts(key[:-1]):
                total = sum(counts.values()) + _PRIOR
                chances = {size: (counts.get(size, 0.0) + _PRIOR * share) / total for size, share in chances.items()}
        self._chances[key] = chances
        return chances

    def _parts(self, key: Key) -> bool:
        """Return whether burst sizes depend on the next field of the key, by a G test at three standard deviations.

        The answer holds for all values of that field. Splitting off only the values with the most unusual bursts would
        bias the drawn sizes towards those.
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
"""Returns the share of drafted tokens to accept now; None to accept as recorded."""

_GOLDEN: Final = 0.6180339887498949
_LEAST_MS: Final = 0.2
_MOST_STEP_MS: Final = 3_600_000.0


class NoDonorsError(Exception):
    """A model without donors: the reason and the fix."""


@dataclass(slots=True)
class _Course:
    behaviour: "ModelledBehaviour"
    of_class: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    before: int = 0

    def first(self) -> int:
        """Draw the tokens at the end of a prefill."""
        self.before = 0
        firsts = self.behaviour.donors.firsts
        if len(firsts) <= 1:
            return firsts[0][0] if firsts else 1
        return self.behaviour.random.choices([tokens for tokens, _ in firsts], [count for _, count in firsts])[0]

    def planned(self) -> int:
        """Draw the drafted tokens that the next step is planned with, before its outcome is drawn."""
        return math.floor(self.behaviour.planned + self.behaviour.plans.random())

    def next(self, output_tokens: int) -> tuple[int, int]:
        behaviour, random = self.behaviour, self.behaviour.random
        k, drafts = behaviour.num_speculative_tokens, behaviour.donors.drafts
        if (wanted := behaviour.acceptance_now()) is not None:
            return k, draw_accepted(wanted, k, random) if k else 0
        position = bisect_left(POSITION, output_tokens)
        context = bisect_left(CONTEXT, self.prompt_tokens + output_tokens)
        key = (self.of_class, behaviour.pace, self.before, behaviour.decoding, position, context)
        tokens = behaviour.chances.sizes[bisect_left(behaviour.chances.up_to(key), random.random())]
        self.before = bisect_left(BURST, tokens)
        # Draw the drafted tokens by the engine's counters.
        if not k or (tokens == 1 and random.random() >= drafts.singles):
            return 0, tokens - 1
        drafted = math.floor(min(drafts.tokens, k) + random.random()) if drafts.tokens < k else k
        return max(tokens - 1, drafted, 1), tokens - 1


_LENGTH: Final = "tokens of a request"


class ModelledBehaviour:
    """Draws steps and bursts from the donors of a model."""

    def __init__(self, model: FittedModel, seed: int, acceptance: AcceptanceNow | None = None) -> None:
        """Take a model with donors, and the acceptance that overrides the model's."""
        if model.donors is None:
            raise NoDonorsError("the model has no donors: fit it again")
        self.donors = donors = model.donors
        self.num_speculative_tokens = donors.num_speculative_tokens
        self.random = Random(f"{seed}/modelled")  # noqa: S311  not for secrets
        self.plans = Random(f"{seed}/plans")  # noqa: S311  not for secrets
        self.chances = BurstChances(donors.bursts)
        self.pace = self.decoding = 0  # buckets of the current step
        self.acceptance_now: AcceptanceNow = acceptance or (lambda: None)
        # The mean of drafted tokens per step of a request: below K if the drafter often finds none.
        ones = sum(count for size, count in zip(donors.bursts.tokens, donors.bursts.counts, strict=True) if size == 1)
        undrafted = (1 - donors.drafts.singles) * ones / max(1, sum(donors.bursts.counts))
        self.planned = (1 - undrafted) * min(donors.drafts.tokens, donors.num_speculative_tokens)
        self._trend = step_time_from_json(donors.trend)
        self._leads_ms = model.ttft.lead_ms if model.ttft else []
        self._classes = list(accumulate(donors.classes))
        self._spread = self.random.random()
        self._cells: dict[tuple[int, int], Cell] = {}
        # Correlation of the normal values behind the uniform ranks.
        self._persistence = 2 * math.sin(math.pi * donors.persistence / 6)
        self._mood = 0.0
        self._seen: dict[str, float] = {}

    def lead_ms(self) -> float:
        """Return the time from the arrival of a request to the scheduler."""
        return value_at(self._leads_ms, self.random.random()) if self._leads_ms else 0.0

    def begin(self, request: Incoming) -> _Course:
        """Draw the class and the end of a request."""
        random, donors = self.random, self.donors
        # Spread classes evenly instead of by chance, so that a few requests have the right shares, too.
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
        """Draw the duration of a similar recorded step, scaled by the trend."""
        self._mood, share = next_mood(self._mood, self._persistence, self.random)
        self.pace = min(int(share * PACES), PACES - 1)
        self.decoding = bisect_left(DECODING, decoding)
        cell = self._cell(self.decoding, bisect_left(PREFILL_TOKENS, step.prefill_tokens))
        self._see("requests decoding at once", decoding)
        self._see("prompt tokens in a step", step.prefill_tokens)
        duration_ms = self._trend.ms(step) * value_at(cell.ratios, share)
        return min(max(duration_ms, _LEAST_MS), _MOST_STEP_MS)

    @property
    def longest_request(self) -> int:
        """Prompt and answer tokens of the longest request so far."""
        return int(self._seen.get(_LENGTH, 0))

    def outside(self) -> list[str]:
        """Return one line for each requested value outside the range that the model was fitted on."""
        ranges = self.donors.ranges
        lines = (ranges[name].outside(name, value) for name, value in self._seen.items() if name in ranges)
        return [line for line in lines if line is not None]

    def _see(self, name: str, value: float) -> None:
        if value > self._seen.get(name, 0):
            self._seen[name] = value

    def _cell(self, decoding: int, prefill: int) -> Cell:
        def distance(cell: Cell) -> tuple[int, int]:
            """Weigh another bucket of prompt tokens more; of equally near cells, prefer the one with more steps."""
            other_kind = 100 * ((cell.prefill > 0) != (prefill > 0))
            return other_kind + abs(cell.decoding - decoding) + 3 * abs(cell.prefill - prefill), -cell.steps

        if (decoding, prefill) not in self._cells:
            self._cells[decoding, prefill] = min(self.donors.cells, key=distance)
        return self._cells[decoding, prefill]
