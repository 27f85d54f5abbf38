"""How many drafted tokens of a request are accepted: the section ``acceptance`` of a model file, evaluated.

A request is easy or hard throughout: it is of one class from its first token to its last. Within a class a step's
outcome is drawn as a whole, how many tokens were drafted and how many of them were accepted, so that positions of one
draft belong together; where the class says so, it depends on the outcome before.

Runs inside vLLM, too: nothing but the standard library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any

Outcome = tuple[int, int]
"""Tokens drafted for a step of one request (0: the drafter found nothing), and how many of them were accepted."""


@dataclass(frozen=True)
class Difficulty:
    """A class of requests that are alike."""

    share: float  # of requests
    outcomes: Sequence[float]  # chance of each outcome of the section
    after: Sequence[Sequence[float]] = ()
    """Where outcomes hang together from step to step: their chances after each outcome, in the section's order; an
    empty row stands for ``outcomes``."""

    temperature: float | None = None  # of the requests it was fitted on


@dataclass(frozen=True)
class Acceptance:
    """What comes of drafts."""

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

    def draw(self, difficulty: Difficulty, before: int | None, width: int, random: Random) -> tuple[int, Outcome]:
        """Return what comes of a step for which so many tokens are to be drafted.

        The first is the index of an outcome of the section, to be given back for the next step; None begins. The
        second is what happened: of a shorter draft than was fitted the first part, and a longer one goes on as
        the last position did after the same step, which nobody has measured.
        """
        row = difficulty.outcomes
        if before is not None and difficulty.after and difficulty.after[before]:
            row = difficulty.after[before]
        index = random.choices(range(len(row)), row)[0]
        drafted, accepted = self.outcomes[index]
        most = self.num_speculative_tokens
        if width <= most or drafted < most:
            return index, (min(drafted, width), min(accepted, width))
        if accepted == most:
            refused = self.outcomes.index((most, most - 1)) if (most, most - 1) in self.outcomes else None
            rate = row[index] / (row[index] + row[refused]) if refused is not None else 1.0
            while accepted < width and random.random() < rate:
                accepted += 1
            # An easy passage has ended: what follows is as after a draft that was not accepted to its end.
            if accepted < width and refused is not None:
                index = refused
        return index, (width, accepted)

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


def from_rates(rates: Sequence[float], drafting: float = 1.0) -> Acceptance:
    """Return acceptance of given rates: one class, each step for itself.

    Parameters
    ----------
    rates
        The share of drafts of which this position was accepted, as ``accepted_tokens_per_pos`` by drafts: never rising.
    drafting
        How often a drafter that looks tokens up finds any; 1 for models, which always draft.
    """
    falls = [before - after for before, after in zip((1.0, *rates), (*rates, 0.0), strict=True)]
    if min(falls) < 0 or not rates:
        message = f"acceptance rates must not rise, from 1 at most to 0 at least: {list(rates)}"
        raise ValueError(message)
    width = len(rates)
    outcomes = [(0, 0), *((width, accepted) for accepted in range(width + 1))]
    chances = (1 - drafting, *(drafting * fall for fall in falls))
    return Acceptance(width, outcomes, [Difficulty(1.0, chances)])


def acceptance_from_json(section: Mapping[str, Any]) -> Acceptance:
    """Return the section ``acceptance``.

    Raises
    ------
    ValueError
        What is wrong with it, in one line that names the field.
    """
    known = {each.name for each in fields(Acceptance)} | {"ranges"}
    if unknown := sorted(set(section) - known):
        message = f"acceptance: unknown: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        raise ValueError(message)
    width = section.get("num_speculative_tokens")
    if not _is_count(width) or not width:
        message = f"acceptance.num_speculative_tokens: a number of 1 or more is needed, not {width!r:.40}"
        raise ValueError(message)
    outcomes = _outcomes(section.get("outcomes"), width)
    classes = section.get("classes")
    if not isinstance(classes, list) or not classes:
        message = "acceptance.classes: one or more classes are needed"
        raise ValueError(message)
    made = [_class(f"acceptance.classes[{index}]", each, len(outcomes)) for index, each in enumerate(classes)]
    if not any(each.share for each in made):
        message = "acceptance.classes: all shares are 0"
        raise ValueError(message)
    return Acceptance(width, outcomes, made)


def _outcomes(given: Any, width: int) -> list[Outcome]:
    pairs = given if isinstance(given, list) else []
    if not pairs or not all(_is_outcome(each, width) for each in pairs):
        message = f"acceptance.outcomes: pairs of tokens drafted, at most {width}, and of them accepted are needed"
        raise ValueError(message)
    return [(drafted, accepted) for drafted, accepted in pairs]


def _is_outcome(given: Any, width: int) -> bool:
    match given:
        case [drafted, accepted]:
            return _is_count(drafted) and _is_count(accepted) and accepted <= drafted <= width
    return False


def _class(name: str, given: Any, outcomes: int) -> Difficulty:
    if not isinstance(given, Mapping) or not {each.name for each in fields(Difficulty)}.issuperset(given):
        message = f"{name}: share, outcomes, and where known after and temperature are needed"
        raise ValueError(message)
    share = _number(f"{name}.share", given.get("share"))
    temperature = given.get("temperature")
    if temperature is not None:
        temperature = _number(f"{name}.temperature", temperature)
    after = given.get("after") or []
    if not isinstance(after, list) or len(after) not in (0, outcomes):
        message = f"{name}.after: a row for each of the {outcomes} outcomes is needed, or none"
        raise ValueError(message)
    rows = [_row(f"{name}.after", row, outcomes) if row else () for row in after]
    return Difficulty(share, _row(f"{name}.outcomes", given.get("outcomes"), outcomes), rows, temperature)


def _row(name: str, given: Any, outcomes: int) -> Sequence[float]:
    if not isinstance(given, list) or len(given) != outcomes or not all(map(_is_number, given)) or not sum(given):
        message = f"{name}: a chance for each of the {outcomes} outcomes is needed, not all of them 0"
        raise ValueError(message)
    return tuple(given)


def _number(name: str, given: Any) -> float:
    if not _is_number(given):
        message = f"{name}: a number of 0 or more is needed, not {given!r:.40}"
        raise ValueError(message)
    return float(given)


def _is_count(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < float("inf")
