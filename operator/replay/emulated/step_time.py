"""How long a step of an engine takes, by what is in it: the section ``step_time`` of a model file, evaluated.

Runs inside vLLM, too: nothing but the standard library.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from random import Random
from typing import Any


@dataclass(frozen=True)
class StepShape:
    """What is in a step, and known before it runs."""

    requests: int
    scheduled_tokens: int  # of prompts and of outputs, drafted ones to be verified with them
    prefill_tokens: int = 0  # those of them that are of prompts, or are computed again after a preemption
    context_tokens: int = 0  # tokens in the KV cache that requests attend to at the end of the step, summed
    prefill_pairs: int = 0  # summed over prefilling requests: tokens scheduled times tokens attended to
    drafted: int = 0  # positions that are drafted in this step for the next: passes of the draft


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step: a curve over scheduled tokens, and what else costs time.

    Every term is 0 or more. Nothing here is multiplied by a share of the machine: what was fitted to one GPU and one
    tensor-parallel size holds for those.
    """

    curve: Sequence[tuple[float, float]]
    """(scheduled tokens, ms), tokens ascending: straight lines between; the first value before it, the last slope
    after it. Weights are read once however many tokens there are, then arithmetic takes over."""

    request_us: float = 0.0  # each request
    prefill_token_us: float = 0.0  # each prompt token, beside what the curve says
    context_ns: float = 0.0  # each token attended to
    prefill_pair_ps: float = 0.0  # each pair of a prompt token and a token that it attends to
    draft_ms: float = 0.0  # each drafted position
    draft_request_us: float = 0.0  # each drafted position of each request
    one_pass: bool = False  # All positions are drafted in one pass: draft_ms once
    host_ms: float = 0.0
    """How much of all this passed between two steps on the host where it was measured: another host's own time between
    steps is not added to it, up to so much."""

    residuals: Sequence[float] = ()
    """Measured by modelled time, ascending and evenly spread over quantiles, with a mean of 1."""

    persistence: float = 0.0
    """How much the place of a step among the residuals says of the next one's, 0 to 1: a machine that is slow now will
    be slow for a while, and who is served then notices."""

    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """What it was fitted on: lowest and highest of each field of StepShape."""

    def ms(self, step: StepShape) -> float:
        """Return how long the step takes, without chance."""
        passes = min(1, step.drafted) if self.one_pass else step.drafted
        drafts = passes * self.draft_ms + 1e-3 * self.draft_request_us * step.drafted * step.requests
        each_us = self.request_us * step.requests + self.prefill_token_us * step.prefill_tokens
        attention = 1e-6 * self.context_ns * step.context_tokens + 1e-9 * self.prefill_pair_ps * step.prefill_pairs
        return self._on_curve(step.scheduled_tokens) + drafts + 1e-3 * each_us + attention

    def outside(self, step: StepShape) -> dict[str, float]:
        """Return which fields lie outside of what was fitted on, with how far: 2 is twice the highest."""
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
    """Draws how long steps take, one after another."""

    def __init__(self, step_time: StepTime, random: Random) -> None:
        """Begin in no particular mood."""
        self._step_time = step_time
        self._random = random
        self._mood = random.gauss(0, 1)

    def draw_ms(self, step: StepShape) -> float:
        """Return how long the next step takes."""
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
        What is wrong with it, in one line that names the field.
    """
    known = {each.name for each in fields(StepTime)}
    if unknown := sorted(set(section) - known):
        message = f"step_time: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        raise ValueError(message)
    numbers = {name: _number(f"step_time.{name}", value) for name, value in section.items() if name in _NUMBERS}
    if numbers.get("persistence", 0.0) >= 1:
        message = f"step_time.persistence: a number below 1 is needed, not {numbers['persistence']:g}"
        raise ValueError(message)
    return StepTime(
        curve=_curve(section.get("curve")),
        residuals=tuple(sorted(_number("step_time.residuals", each) for each in section.get("residuals", ()))),
        ranges=_ranges(section.get("ranges", {})),
        one_pass=_truth("step_time.one_pass", section.get("one_pass", False)),
        **numbers,
    )


_NUMBERS = {each.name for each in fields(StepTime)} - {"curve", "residuals", "ranges", "one_pass"}


def _curve(given: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(given, list | tuple) or not given:
        message = "step_time.curve: one or more pairs of scheduled tokens and ms are needed, such as [[1, 8.0]]"
        raise ValueError(message)
    points = tuple(_pair("step_time.curve", point) for point in given)
    if any(later[0] <= earlier[0] for earlier, later in pairwise(points)):
        message = "step_time.curve: scheduled tokens must ascend from pair to pair"
        raise ValueError(message)
    return points


def _ranges(given: Any) -> dict[str, tuple[float, float]]:
    known = {each.name for each in fields(StepShape)}
    if not isinstance(given, Mapping) or not known.issuperset(given):
        message = f"step_time.ranges: a lowest and a highest value by name is needed, of {', '.join(sorted(known))}"
        raise ValueError(message)
    return {name: _pair(f"step_time.ranges.{name}", pair) for name, pair in given.items()}


def _pair(name: str, given: Any) -> tuple[float, float]:
    match given:
        case [first, second]:
            return _number(name, first), _number(name, second)
    message = f"{name}: pairs of numbers are needed, not {given!r:.40}"
    raise ValueError(message)


def _truth(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        message = f"{name}: true or false is needed, not {given!r:.40}"
        raise ValueError(message)  # noqa: TRY004  as of all that is wrong with it
    return given


def _number(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < float("inf"):
        message = f"{name}: a number of 0 or more is needed, not {given!r:.40}"
        raise ValueError(message)
    return float(given)


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
