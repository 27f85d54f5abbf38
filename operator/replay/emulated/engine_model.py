"""Settings of the emulated engine, and the model sections `acceptance` and `step_time`.

A request stays in one difficulty class from its first token to its last. Within a class the outcome of a step,
drafted and accepted tokens, is drawn as a whole; it may depend on the outcome before.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

Outcome = tuple[int, int]
"""Tokens drafted for a step of one request (0 without a match), and how many of them were accepted."""


NotNegative = Annotated[float, Meta(ge=0, le=1e300)]
Count = Annotated[int, Meta(ge=0)]
Pair = tuple[NotNegative, NotNegative]
_Section = TypeVar("_Section")


class Difficulty(Struct, frozen=True, forbid_unknown_fields=True):
    """A class of similar requests."""

    share: NotNegative  # of requests
    outcomes: Sequence[NotNegative]  # chance of each outcome of the section
    after: Sequence[Sequence[NotNegative]] = ()
    """If outcomes depend on the step before: their chances after each outcome, in the section's order. An empty row
    means ``outcomes``."""

    temperature: NotNegative | None = None  # of the requests it was fitted on


class Acceptance(Struct, frozen=True, forbid_unknown_fields=True):
    """Acceptance of drafts."""

    num_speculative_tokens: Annotated[int, Meta(ge=1)]
    outcomes: Annotated[Sequence[tuple[Count, Count]], Meta(min_length=1)]
    classes: Annotated[Sequence[Difficulty], Meta(min_length=1)]
    ranges: Mapping[str, int] = {}  # number of fitted requests and chunks

    def __post_init__(self) -> None:
        """Reject outcomes and chances that contradict each other."""
        if not all(accepted <= drafted <= self.num_speculative_tokens for drafted, accepted in self.outcomes):
            raise ValueError("outcomes: must be [drafted, accepted] with accepted <= drafted <= num_speculative_tokens")
        for each in self.classes:
            rows = [each.outcomes, *filter(None, each.after)]
            if len(each.after) not in (0, len(self.outcomes)) or not all(map(self._is_row, rows)):
                raise ValueError("classes: outcomes, and rows of after, need a weight per outcome, one of them above 0")
        if not any(each.share for each in self.classes):
            raise ValueError("classes: at least one share must be above 0")

    def _is_row(self, row: Sequence[float]) -> bool:
        return len(row) == len(self.outcomes) and any(row)

    def draw_class(self, temperature: float | None, random: Random) -> Difficulty:
        """Return the class of a new request: of those nearest to its temperature, by their shares."""
        near = self.classes
        known = [each.temperature for each in near if each.temperature is not None]
        if known:
            nearest = min(known, key=lambda value: abs(value - (1.0 if temperature is None else temperature)))
            near = [each for each in near if each.temperature in (None, nearest)]
        return random.choices(near, [each.share for each in near])[0]


class Drafting:
    """Outcomes of the drafts of one request, step by step.

    If outcomes depend on the step before, the text has easy passages: whether each token can be guessed is drawn as
    fitted, and a draft of any length accepts as many of them as it can. So a longer draft than was fitted gets through
    an easy passage in fewer steps. Otherwise each position has its own chance: a shorter draft has the first ones, and
    a longer one repeats the last. Chances beyond the longest fitted draft were not measured: they equal the last one.
    """

    def __init__(self, acceptance: Acceptance, difficulty: Difficulty, random: Random) -> None:
        """Begin a request of a class."""
        self._acceptance = acceptance
        self._difficulty = difficulty
        self._random = random
        self._before: int | None = None
        self._ahead: list[bool] = []  # whether each token that was drawn and not yet reached can be guessed

    def interrupt(self) -> None:
        """Forget the step before: the next one does not depend on it."""
        self._before, self._ahead = None, []

    def next(self, width: int) -> Outcome:
        """Return the outcome of a step that drafts ``width`` tokens."""
        if not self._ahead:
            drafted, accepted, rate = self._draw()
            most = self._acceptance.num_speculative_tokens
            if drafted < most:
                return min(drafted, width), min(accepted, width)
            if not self._difficulty.after:
                while accepted == drafted < width and self._random.random() < rate:
                    accepted = drafted = drafted + 1
                return width, min(accepted, width)
            self._foresee(accepted, rate)
        return width, self._take(width)

    def _draw(self) -> tuple[int, int, float]:
        """Return tokens drafted and accepted, and the chance of the last position."""
        outcomes, most = self._acceptance.outcomes, self._acceptance.num_speculative_tokens
        row = self._difficulty.outcomes
        if self._before is not None and self._difficulty.after and self._difficulty.after[self._before]:
            row = self._difficulty.after[self._before]
        self._before = self._random.choices(range(len(row)), row)[0]
        drafted, accepted = outcomes[self._before]
        chances = dict(zip(outcomes, row, strict=True))
        whole, refused = chances.get((most, most), 0.0), chances.get((most, most - 1), 0.0)
        return drafted, accepted, whole / (whole + refused) if whole else 0.0

    def _foresee(self, accepted: int, rate: float) -> None:
        self._ahead += [True] * accepted
        # The target's own token: after a whole draft it was not guessed at all.
        whole = accepted == self._acceptance.num_speculative_tokens
        self._ahead.append(whole and self._random.random() < rate)

    def _take(self, width: int) -> int:
        """Return how many drafted tokens are accepted, and consume them and the target's own token after them."""
        for accepted in range(width + 1):
            if not self._ahead:
                drafted, more, rate = self._draw()
                self._foresee(more if drafted else 0, rate)
            if not self._ahead.pop(0):
                most, outcomes = self._acceptance.num_speculative_tokens, self._acceptance.outcomes
                if most <= accepted < width and not self._ahead and (most, most - 1) in outcomes:
                    # The draft was rejected beyond the longest fitted one: continue as after its last position.
                    self._before = outcomes.index((most, most - 1))
                return min(accepted, width)
        return width


def from_rates(rates: Sequence[float], drafting: float = 1.0) -> Acceptance:
    """Return an acceptance model with the given rates, one class, and independent steps.

    ``rates`` has the share of drafts that are accepted at each position; it must not rise. ``drafting`` is the share
    of steps in which a lookup drafter finds tokens; 1 for draft models.
    """
    falls = [before - after for before, after in zip((1.0, *rates), (*rates, 0.0), strict=True)]
    if min(falls) < 0 or not rates:
        raise ValueError(f"acceptance rates must not rise, from 1 at most to 0 at least: {list(rates)}")
    width = len(rates)
    outcomes = [(0, 0), *((width, accepted) for accepted in range(width + 1))]
    chances = (1 - drafting, *(drafting * fall for fall in falls))
    return Acceptance(width, outcomes, [Difficulty(1.0, chances)])


def acceptance_from_json(section: Any) -> Acceptance:
    """Return the section ``acceptance``, or raise a ValueError that names the field."""
    return _converted("acceptance", section, Acceptance)


def _converted(name: str, section: Any, kind: type[_Section]) -> _Section:
    try:
        return msgspec.convert(section, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class StepShape:
    """Content of a step, known before it runs."""

    requests: int
    scheduled_tokens: int  # of prompts and of outputs, drafted ones to be verified with them
    prefill_tokens: int = 0  # those of them that are of prompts, or are computed again after a preemption
    context_tokens: int = 0  # tokens in the KV cache that requests attend to at the end of the step, summed
    prefill_pairs: int = 0  # summed over prefilling requests: tokens scheduled times tokens attended to
    drafted: int = 0  # positions that are drafted in this step for the next: passes of the draft


class StepTime(Struct, frozen=True, forbid_unknown_fields=True):
    """Model of the duration of a step: a curve over scheduled tokens, and further costs, all of them 0 or more.

    It holds for the GPU and the tensor-parallel size that it was fitted to.
    """

    curve: Annotated[Sequence[Pair], Meta(min_length=1)]
    """Points (scheduled tokens, ms), in ascending order of tokens, with linear interpolation.

    The curve is constant before the first point and keeps its last slope after the last one. Reading the weights
    dominates small steps, arithmetic large ones.
    """

    request_us: NotNegative = 0.0  # each request
    prefill_token_us: NotNegative = 0.0  # each prompt token, beside what the curve says
    context_ns: NotNegative = 0.0  # each token attended to
    prefill_pair_ps: NotNegative = 0.0  # each pair of a prompt token and a token that it attends to
    draft_ms: NotNegative = 0.0  # each drafted position
    draft_request_us: NotNegative = 0.0  # each drafted position of each request
    one_pass: bool = False  # All positions are drafted in one pass: draft_ms once
    host_ms: NotNegative = 0.0
    """Host time between two steps, already included in the costs above; an emulated host adds only what exceeds it."""

    residuals: Sequence[NotNegative] = ()
    """Ratios of measured to modelled time, ascending and evenly spread over quantiles, with a mean of 1."""

    persistence: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Correlation of the quantiles of consecutive steps' residuals, 0 to 1: a slow machine stays slow."""

    ranges: Mapping[str, Pair] = {}
    """Lowest and highest fitted value of each field of StepShape."""

    def __post_init__(self) -> None:
        """Sort residuals; reject a curve that is not ascending, and ranges of unknown fields."""
        msgspec.structs.force_setattr(self, "residuals", tuple(sorted(self.residuals)))
        if any(later[0] <= earlier[0] for earlier, later in pairwise(self.curve)):
            raise ValueError("curve: scheduled tokens must increase from pair to pair")
        if not self.ranges.keys() <= {each.name for each in fields(StepShape)}:
            raise ValueError("ranges: has names that are not fields of a step")

    def ms(self, step: StepShape) -> float:
        """Return the expected duration of the step."""
        passes = min(1, step.drafted) if self.one_pass else step.drafted
        drafts = passes * self.draft_ms + 1e-3 * self.draft_request_us * step.drafted * step.requests
        each_us = self.request_us * step.requests + self.prefill_token_us * step.prefill_tokens
        attention = 1e-6 * self.context_ns * step.context_tokens + 1e-9 * self.prefill_pair_ps * step.prefill_pairs
        return self._on_curve(step.scheduled_tokens) + drafts + 1e-3 * each_us + attention

    def outside(self, step: StepShape) -> dict[str, float]:
        """Return the fields outside the fitted ranges with their factor: 2 is twice the highest."""
        far = {}
        for name, (low, high) in self.ranges.items():
            value = getattr(step, name)
            if value > high or value < low:
                far[name] = value / high if value > high and high else value / low if low else float("inf")
        return far

    def _on_curve(self, tokens: float) -> float:
        points = self.curve
        if len(points) == 1 or tokens <= points[0][0]:
            return points[0][1]
        above = min(bisect_right(points, tokens, key=lambda point: point[0]), len(points) - 1)
        (left, low), (right, high) = points[above - 1], points[above]
        return max(0.0, _between(low, high, (tokens - left) / (right - left)))


def next_mood(mood: float, persistence: float, random: Random) -> tuple[float, float]:
    """Draw the next of normal values with this correlation; return it and its quantile."""
    mood = persistence * mood + math.sqrt(1 - persistence**2) * random.gauss(0, 1)
    return mood, 0.5 * (1 + math.erf(mood / math.sqrt(2)))


class Paces:
    """Draws the durations of steps, one after another."""

    def __init__(self, step_time: StepTime, random: Random) -> None:
        """Begin at a random pace."""
        self._step_time = step_time
        self._random = random
        self._mood = random.gauss(0, 1)

    def draw_ms(self, step: StepShape) -> float:
        """Draw the duration of the next step."""
        residuals = self._step_time.residuals
        self._mood, quantile = next_mood(self._mood, self._step_time.persistence, self._random)
        ms = self._step_time.ms(step)
        if not residuals:
            return ms
        place = quantile * (len(residuals) - 1)
        below = int(place)
        above = min(below + 1, len(residuals) - 1)
        return ms * _between(residuals[below], residuals[above], place - below)


def step_time_from_json(section: Any) -> StepTime:
    """Return the section ``step_time``, or raise a ValueError that names the field."""
    return _converted("step_time", section, StepTime)


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


KEY: Final = "specdecode_emulated"
"""Key in --additional-config whose value is the path of the settings file."""


class CachedLayers(Struct, frozen=True):
    """Equal layers, and the cache of each of them on one rank."""

    count: int
    kind: str  # full, latent, sliding, chunked or state
    of_draft: bool = False
    block_size: int = 0  # tokens in its blocks; 0 for a state
    page_bytes: int = 0  # of a block in this layer
    # Of attention
    token_bytes: int = 0
    head_width: int = 0
    element_bytes: int = 0
    reach_tokens: int = 0  # of a window or a chunk
    # Of a state: bytes with room for the speculated tokens
    state_bytes: int = 0
    exports_checkpoint: bool = False


class Settings(Struct, frozen=True):
    """Settings of the executor."""

    step_time: StepTime
    layers: Sequence[CachedLayers]
    kv_cache_bytes: int  # of each rank
    acceptance: Acceptance | None = None  # None without speculation
    text: tuple[int, int] = (300, 1000)  # first and last token id of generated text; none of them ends it
    seed: int = 0
    gpu: str | None = None  # as captures name it
    folder: Path | None = None  # for reports of the steps
    tells_steps: bool = False  # report each step, too


def read_settings(additional_config: Any) -> Settings:
    """Return the settings that vLLM's additional_config names."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        message = f'emulated: --additional-config \'{{"{KEY}": "FILE"}}\' is needed: use specdecode replay serve'
        raise ValueError(message)
    text = Path(additional_config[KEY]).read_bytes()
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda kind, value: kind(value))
