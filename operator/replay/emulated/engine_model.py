"""Settings of the emulated engine, and the model sections `acceptance` and `step_time`; standard library only.

A request stays in one difficulty class from its first token to its last. Within a class the outcome of a step,
drafted and accepted tokens, is drawn as a whole; it may depend on the outcome before.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

Outcome = tuple[int, int]
"""Tokens drafted for a step of one request (0 without a match), and how many of them were accepted."""


@dataclass(frozen=True)
class Difficulty:
    """A class of similar requests."""

    share: float  # of requests
    outcomes: Sequence[float]  # chance of each outcome of the section
    after: Sequence[Sequence[float]] = ()
    """If outcomes depend on the step before: their chances after each outcome, in the section's order. An empty row
    means ``outcomes``."""

    temperature: float | None = None  # of the requests it was fitted on


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts."""

    num_speculative_tokens: int
    outcomes: Sequence[Outcome]
    classes: Sequence[Difficulty]

    def draw_class(self, temperature: float | None, random: Random) -> Difficulty:
        """Return the class of a new request: of those nearest to its temperature, by their shares."""
        near = self.classes
        known = [each.temperature for each in near if each.temperature is not None]
        if known:
            nearest = min(known, key=lambda value: abs(value - (1.0 if temperature is None else temperature)))
            near = [each for each in near if each.temperature in (None, nearest)]
        return random.choices(near, [each.share for each in near])[0]

    def rates(self, width: int) -> list[float]:
        """Return the share of drafts of which each position was accepted, as vLLM counts it; without ``after``."""
        chances = [0.0] * len(self.outcomes)
        for each in self.classes:
            for index, chance in enumerate(each.outcomes):
                chances[index] += each.share * chance / sum(each.outcomes)
        drafts = sum(chance for chance, (drafted, _) in zip(chances, self.outcomes, strict=True) if drafted) or 1.0
        each_position = range(1, min(width, self.num_speculative_tokens) + 1)
        of = [(chance, accepted) for chance, (_, accepted) in zip(chances, self.outcomes, strict=True)]
        return [sum(chance for chance, accepted in of if accepted >= position) / drafts for position in each_position]


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


def acceptance_from_json(section: Mapping[str, Any]) -> Acceptance:
    """Return the section ``acceptance``.

    Raises
    ------
    ValueError
        The section is invalid; the message names the field.
    """
    known = {each.name for each in fields(Acceptance)} | {"ranges"}
    if unknown := sorted(set(section) - known):
        raise ValueError(f"acceptance: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    width = section.get("num_speculative_tokens")
    if not _is_count(width) or not width:
        raise ValueError(f"acceptance.num_speculative_tokens: must be an integer of 1 or more, not {width!r:.40}")
    outcomes = _outcomes(section.get("outcomes"), width)
    classes = section.get("classes")
    if not isinstance(classes, list) or not classes:
        raise ValueError("acceptance.classes: must be a list of one or more classes")
    made = [_class(f"acceptance.classes[{index}]", each, len(outcomes)) for index, each in enumerate(classes)]
    if not any(each.share for each in made):
        raise ValueError("acceptance.classes: at least one share must be above 0")
    return Acceptance(width, outcomes, made)


def _outcomes(given: Any, width: int) -> list[Outcome]:
    found: list[Outcome] = []
    for each in given if isinstance(given, list) else []:
        match each:
            case [drafted, accepted] if _is_count(drafted) and _is_count(accepted) and accepted <= drafted <= width:
                found.append((drafted, accepted))
            case _:
                found = []
                break
    if not found:
        raise ValueError(
            f"acceptance.outcomes: must be a list of pairs [drafted, accepted] with accepted <= drafted <= {width}"
        )
    return found


def _class(name: str, given: Any, outcomes: int) -> Difficulty:
    if not isinstance(given, Mapping) or not {each.name for each in fields(Difficulty)}.issuperset(given):
        raise ValueError(f"{name}: must have share and outcomes, and may have after and temperature, but no other keys")
    share = _number(f"{name}.share", given.get("share"))
    temperature = given.get("temperature")
    if temperature is not None:
        temperature = _number(f"{name}.temperature", temperature)
    after = given.get("after") or []
    if not isinstance(after, list) or len(after) not in (0, outcomes):
        raise ValueError(f"{name}.after: must have one row for each of the {outcomes} outcomes, or be empty")
    rows = [_row(f"{name}.after", row, outcomes) if row else () for row in after]
    return Difficulty(share, _row(f"{name}.outcomes", given.get("outcomes"), outcomes), rows, temperature)


def _row(name: str, given: Any, outcomes: int) -> Sequence[float]:
    if not isinstance(given, list) or len(given) != outcomes or not all(map(_is_number, given)) or not sum(given):
        raise ValueError(f"{name}: must have one weight for each of the {outcomes} outcomes, at least one above 0")
    return tuple(given)


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < float("inf")


@dataclass(frozen=True)
class StepShape:
    """Content of a step, known before it runs."""

    requests: int
    scheduled_tokens: int  # of prompts and of outputs, drafted ones to be verified with them
    prefill_tokens: int = 0  # those of them that are of prompts, or are computed again after a preemption
    context_tokens: int = 0  # tokens in the KV cache that requests attend to at the end of the step, summed
    prefill_pairs: int = 0  # summed over prefilling requests: tokens scheduled times tokens attended to
    drafted: int = 0  # positions that are drafted in this step for the next: passes of the draft


@dataclass(frozen=True)
class StepTime:
    """Model of the duration of a step: a curve over scheduled tokens, and further costs, all of them 0 or more.

    It holds for the GPU and the tensor-parallel size that it was fitted to.
    """

    curve: Sequence[tuple[float, float]]
    """Points (scheduled tokens, ms), in ascending order of tokens, with linear interpolation.

    The curve is constant before the first point and keeps its last slope after the last one. Reading the weights
    dominates small steps, arithmetic large ones.
    """

    request_us: float = 0.0  # each request
    prefill_token_us: float = 0.0  # each prompt token, beside what the curve says
    context_ns: float = 0.0  # each token attended to
    prefill_pair_ps: float = 0.0  # each pair of a prompt token and a token that it attends to
    draft_ms: float = 0.0  # each drafted position
    draft_request_us: float = 0.0  # each drafted position of each request
    one_pass: bool = False  # All positions are drafted in one pass: draft_ms once
    host_ms: float = 0.0
    """Host time between two steps, already included in the costs above; an emulated host adds only what exceeds it."""

    residuals: Sequence[float] = ()
    """Ratios of measured to modelled time, ascending and evenly spread over quantiles, with a mean of 1."""

    persistence: float = 0.0
    """Correlation of the quantiles of consecutive steps' residuals, 0 to 1: a slow machine stays slow."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest fitted value of each field of StepShape."""

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


class Paces:
    """Draws the durations of steps, one after another."""

    def __init__(self, step_time: StepTime, random: Random) -> None:
        """Begin at a random pace."""
        self._step_time = step_time
        self._random = random
        self._mood = random.gauss(0, 1)

    def draw_ms(self, step: StepShape) -> float:
        """Draw the duration of the next step."""
        persistence, residuals = self._step_time.persistence, self._step_time.residuals
        self._mood = persistence * self._mood + math.sqrt(1 - persistence**2) * self._random.gauss(0, 1)
        ms = self._step_time.ms(step)
        if not residuals:
            return ms
        place = 0.5 * (1 + math.erf(self._mood / math.sqrt(2))) * (len(residuals) - 1)
        below = int(place)
        above = min(below + 1, len(residuals) - 1)
        return ms * _between(residuals[below], residuals[above], place - below)


def step_time_from_json(section: Mapping[str, Any]) -> StepTime:
    """Return the section ``step_time``.

    Raises
    ------
    ValueError
        The section is invalid; the message names the field.
    """
    known = {each.name for each in fields(StepTime)}
    if unknown := sorted(set(section) - known):
        raise ValueError(f"step_time: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    numbers = {name: _number(f"step_time.{name}", value) for name, value in section.items() if name in _NUMBERS}
    if numbers.get("persistence", 0.0) >= 1:
        raise ValueError(f"step_time.persistence: must be below 1, not {numbers['persistence']:g}")
    if not isinstance(given := section.get("one_pass", False), bool):
        raise ValueError(f"step_time.one_pass: must be true or false, not {given!r:.40}")  # noqa: TRY004
    return StepTime(
        curve=_curve(section.get("curve")),
        residuals=tuple(sorted(_number("step_time.residuals", each) for each in section.get("residuals", ()))),
        ranges=_ranges(section.get("ranges", {})),
        one_pass=given,
        **numbers,
    )


_NUMBERS = {each.name for each in fields(StepTime)} - {"curve", "residuals", "ranges", "one_pass"}


def _curve(given: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(given, list | tuple) or not given:
        raise ValueError("step_time.curve: must be a list of pairs [scheduled tokens, ms], such as [[1, 8.0]]")
    points = tuple(_pair("step_time.curve", point) for point in given)
    if any(later[0] <= earlier[0] for earlier, later in pairwise(points)):
        raise ValueError("step_time.curve: scheduled tokens must increase from pair to pair")
    return points


def _ranges(given: Any) -> dict[str, tuple[float, float]]:
    known = {each.name for each in fields(StepShape)}
    if not isinstance(given, Mapping) or not known.issuperset(given):
        raise ValueError(
            f"step_time.ranges: must map names to [lowest, highest]; known names: {', '.join(sorted(known))}"
        )
    return {name: _pair(f"step_time.ranges.{name}", pair) for name, pair in given.items()}


def _pair(name: str, given: Any) -> tuple[float, float]:
    match given:
        case [first, second]:
            return _number(name, first), _number(name, second)
    raise ValueError(f"{name}: must be a pair of numbers, not {given!r:.40}")


def _number(name: str, given: Any) -> float:
    if not _is_number(given):
        raise ValueError(f"{name}: must be a number of 0 or more, not {given!r:.40}")
    return float(given)


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


KEY: Final = "specdecode_emulated"
"""Key in --additional-config whose value is the path of the settings file."""


@dataclass(frozen=True)
class CachedLayers:
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


@dataclass(frozen=True)
class Settings:
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
    return settings_from_json(json.loads(Path(additional_config[KEY]).read_text(encoding="utf-8")))


def settings_from_json(given: Mapping[str, Any]) -> Settings:
    """Return settings as the file has them."""
    folder = given.get("folder")
    acceptance = given.get("acceptance")
    first, last = given.get("text", (300, 1000))
    return Settings(
        step_time=step_time_from_json(given["step_time"]),
        layers=tuple(CachedLayers(**each) for each in given["layers"]),
        kv_cache_bytes=given["kv_cache_bytes"],
        acceptance=None if acceptance is None else acceptance_from_json(acceptance),
        text=(first, last),
        seed=given.get("seed", 0),
        gpu=given.get("gpu"),
        folder=None if folder is None else Path(folder),
        tells_steps=given.get("tells_steps", False),
    )
