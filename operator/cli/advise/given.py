"""What the options of `advise` say, as numbers of `payoff`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import typer

from specdecode_operator.payoff.acceptance import LARGEST_K, Acceptance, PayoffError
from specdecode_operator.payoff.speed_up import Load, full_cache
from specdecode_operator.payoff.step_cost import Curve
from specdecode_operator.problems import shown

MOST_NUMBERS: Final = 64
_LARGEST: Final = 2**31


@contextmanager
def refused_at(option: str) -> Iterator[None]:
    """Name the option whose number cannot be."""
    try:
        yield
    except PayoffError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def refuse_several(given: Mapping[str, object]) -> None:
    """End where more than one of some options says the same thing."""
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise typer.BadParameter(f"is given beside {named[0]}: give one of them", param_hint=named[1])


def acceptance_of(by_position: str | None, conditional: str | None, rate: float | None, k: int) -> Acceptance | None:
    """Return the acceptance that one of three options gives; None where none does."""
    if by_position is not None:
        with refused_at("--acceptance"):
            return Acceptance.by_position(numbers(by_position, "--acceptance"))
    if conditional is not None:
        with refused_at("--conditional-acceptance"):
            return Acceptance(tuple(numbers(conditional, "--conditional-acceptance")))
    if rate is not None:
        with refused_at("--acceptance-rate"):
            return Acceptance.of_rate(rate, k)
    return None


def curve_of(text: str, option: str) -> Curve:
    """Return a curve of ``MS``, or of ``TOKENS:MS,TOKENS:MS``."""
    parts = _parts(text, option)
    with refused_at(option):
        if len(parts) == 1 and ":" not in text:
            return Curve(((1.0, _number(text, option)),))
        return Curve(tuple(_point(part, option) for part in parts))


def _point(text: str, option: str) -> tuple[float, float]:
    tokens, colon, ms = text.partition(":")
    if not colon:
        raise typer.BadParameter(f"{shown(text)}: write TOKENS:MS, such as 64:21.5", param_hint=option)
    return _number(tokens, option), _number(ms, option)


def numbers(text: str, option: str) -> list[float]:
    """Return the numbers of a list with commas."""
    return [_number(part, option) for part in _parts(text, option)]


def counts(text: str, option: str) -> list[int]:
    """Return the numbers of a list with commas, which are whole and above 0."""
    found = numbers(text, option)
    for each in found:
        if each != int(each) or not 0 < each <= _LARGEST:
            raise typer.BadParameter(f"{each:g}: write whole numbers above 0, up to {_LARGEST}", param_hint=option)
    return [int(each) for each in found]


def _parts(text: str, option: str) -> Sequence[str]:
    parts = text.split(",")
    if len(parts) > MOST_NUMBERS:
        raise typer.BadParameter(f"has {len(parts)} numbers: give at most {MOST_NUMBERS}", param_hint=option)
    return parts


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{shown(text)}: is no number; write them with commas between", param_hint=option)
    return value


def asked_k(k: int | None, shares: str | None) -> int:
    """Return K: as asked, else as many as there are positions."""
    if k is not None:
        return k
    if shares is None:
        raise typer.BadParameter(f"is missing: give K, from 1 to {LARGEST_K}", param_hint="--num-speculative-tokens")
    return min(shares.count(",") + 1, LARGEST_K)


def with_verification(target: Curve, verify_ms: float | None, batch: int, k: int) -> Curve:
    """Return the curve through a plain step and one that verifies, both of the same requests."""
    if verify_ms is None:
        return target
    if len(target.points) > 1:
        message = "is given beside times by tokens in the step, which say it already: leave it out"
        raise typer.BadParameter(message, param_hint="--verify-step-ms")
    with refused_at("--verify-step-ms"):
        return Curve(((batch, target.points[0][1]), (batch * (k + 1), verify_ms)))


def loads_of(
    batches: Sequence[int], context: str | None, kv_tokens: int | None, kv_tokens_alone: int | None
) -> tuple[Load, ...]:
    """Return a load for each number of requests and context length, and where it is known those of a full cache."""
    contexts = [] if context is None else counts(context, "--context")
    loads = [Load.same(batch, tokens) for tokens in contexts or [0] for batch in batches]
    if (kv_tokens is None) != (kv_tokens_alone is None):
        missing = "--kv-tokens" if kv_tokens is None else "--kv-tokens-alone"
        raise typer.BadParameter("is missing: plan says both, give both or none", param_hint=missing)
    if kv_tokens is not None and kv_tokens_alone is not None:
        if not contexts:
            message = "is missing: how many requests fill the KV cache depends on how long they are"
            raise typer.BadParameter(message, param_hint="--context")
        with refused_at("--kv-tokens"):
            loads += [full_cache(kv_tokens, kv_tokens_alone, tokens) for tokens in contexts]
    return tuple(loads)
