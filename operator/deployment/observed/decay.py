"""Decide SpeculationEffective: whether acceptance is high enough, and whether acceptance or speed has declined.

A draft that never pays has an acceptance below break-even, or below LEAST_ACCEPTANCE if the break-even is lower or
unknown. This needs no baseline, so it counts from the first window.

For a decline, the baseline is the newest capture of these settings, and the engines' first windows after a start, by
load; it is relearned when the operator restarts. Windows with another draft length are skipped, as with K by batch
size, and acceptance is ignored under adaptive verification, which lowers the reported value by design.

`Decline` is an e-detector. Losses are non-negative and scaled so that the largest allowed mean is 1. A bet of
fraction b on losses above 1 multiplies wealth by 1 + b (loss - 1). A decline may begin at any loss, so a new bet starts
with each, and the wealth of all bets is summed (Shiryaev 1963, Roberts 1966; Shin, Ramdas and Rinaldo 2023). The sum
reaches A within n losses with a probability of at most n / A, which bounds the rate of false alarms.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_status import CapturePhase, SpecDecodeCaptureStatus
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.deployment.conditions import EFFECTIVE, FALSE, ConditionUpdate
from specdecode_operator.deployment.model_checks import runs_on_v1
from specdecode_operator.deployment.observed.engine_reports import decimal
from specdecode_operator.deployment.parsed_deployment import engine_spec_hash
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.enums import METHODS_OF_FREE_LENGTH, METHODS_WITH_SAMPLING, Method
from specdecode_operator.problems import InvalidSpecError, printable
from specdecode_operator.stats.engine_window import ENOUGH_DRAFTED_TOKENS, Recent, Work

_SHARES: Final = (0.0625, 0.125, 0.25, 0.5, 1.0)  # Bet fractions; each is best for another size of loss
# Larger losses are clipped, so that one stalled window does not decide. Clipping only lowers means.
_LARGEST: Final = 4.0
_LAST: Final = 8  # Losses whose mean must be allowed again before a decline is over


@dataclass(frozen=True)
class Decline:
    """State of the e-detector for one kind of loss."""

    sums: tuple[float, ...] = (0.0,) * len(_SHARES)
    last: tuple[float, ...] = ()
    found: bool = False

    def after(self, loss: float, losses_between_alarms: float) -> "Decline":
        """Return the state after one more loss; ``losses_between_alarms`` is the mean number between false alarms."""
        loss = min(loss, _LARGEST)
        last = (*self.last, loss)[-_LAST:]
        if self.found:
            is_over = len(last) == _LAST and fmean(last) <= 1
            return Decline() if is_over else Decline(self.sums, last, found=True)
        sums = tuple((won + 1) * (1 + share * (loss - 1)) for won, share in zip(self.sums, _SHARES, strict=True))
        found = fmean(sums) >= losses_between_alarms
        # Losses before the alarm do not count towards its end.
        return Decline(sums, () if found else last, found=found)


# Lower bound of the mean number of windows between false alarms: 17 days if each scrape of the engines is a window.
WINDOWS_BETWEEN_FALSE_ALARMS: Final = 100_000
LEARNED_WINDOWS: Final = 32  # Windows per load that make up the baseline
# A drop of accepted tokens by this share is always allowed, because traffic varies.
LESS_ACCEPTED: Final = 0.1
SLOWER: Final = 0.25  # An increase of the time per token by this share is always allowed, because contexts vary
# A window may also be worse by this many standard deviations of the baseline's windows.
DEVIATIONS: Final = 1.5
_OTHER_LENGTH: Final = 0.1
LEAST_ACCEPTANCE: Final = 0.05
"""Acceptance that every published setup which pays exceeds several times; mismatched drafts have 0 to 2 %."""
_SHORT_DRAFT: Final = 4
_MOST_NEEDED: Final = 0.95  # Upper limit of the break-even, because the loss would divide by zero at 1
_USELESS, _ACCEPTANCE, _GAIN, _PACE = "BelowBreakEven", "AcceptanceDecayed", "DraftsBringLess", "StepsSlower"
REASONS: Final = (_USELESS, _ACCEPTANCE, _GAIN, _PACE)
_TRAFFIC: Final = (
    "Other prompts, longer contexts or a higher temperature have the same effect. If the traffic did not change, check"
    " the engine logs and restart the engines"
)
_MACHINE: Final = (
    "Longer contexts have the same effect. If context lengths did not change, check preemptions, other workloads on the"
    " node and its GPU clocks"
)


@dataclass(frozen=True)
class Measured:
    """Acceptance that a capture measured with these settings."""

    capture: str
    acceptance: float
    gain: float  # Accepted tokens per step


@dataclass(frozen=True)
class Decay:
    """Baseline of an object's engines, and the state of its detectors."""

    settings: Any = None
    break_even: float | None = None  # Acceptance at which the draft costs as much as it saves at low load
    windows: int = 0  # Number of complete windows so far
    learned: Mapping[int, tuple[Work, ...]] = field(default_factory=dict)
    declines: Mapping[str, Decline] = field(default_factory=dict)
    # Messages with the numbers at the time of detection, so that the condition does not change at each reconcile.
    told: Mapping[str, str] = field(default_factory=dict)


NOTHING_DECAYED: Final = Decay()


def update_decay(
    before: Decay,
    recent: Recent,
    facts: Facts | None,
    measured: Callable[[], Measured | None] = lambda: None,
    break_even: Callable[[], float | None] = lambda: None,
) -> Decay:
    """Return the state after the engines' last complete window, if that window is new.

    ``facts`` describe the launched engines, or are None without a launch. The state is reset without a launch and when
    the settings or the engines change; ``break_even`` is called then.
    """
    if facts is None:
        return NOTHING_DECAYED
    settings = (facts.profile.version, facts.pair)
    if before.settings != settings or recent.windows < before.windows:
        before = Decay(settings, break_even())
    if recent.windows == before.windows or recent.last is None:
        return replace(before, windows=recent.windows)
    known, learned = _learn(before, recent, facts)
    losses = [*_below_break_even(facts, recent.last, before.break_even)]
    losses += _losses(facts, recent, known, measured()) if known else []
    declines, told = dict(before.declines), dict(before.told)
    for reason, size, words in losses:
        # Divide the rate of false alarms among the reasons.
        declines[reason] = declines.get(reason, Decline()).after(size, len(REASONS) * WINDOWS_BETWEEN_FALSE_ALARMS)
        if not declines[reason].found:
            told.pop(reason, None)
        else:
            told.setdefault(reason, words)
    return replace(before, windows=recent.windows, learned=learned, declines=declines, told=told)


def _learn(before: Decay, recent: Recent, facts: Facts) -> tuple[Sequence[Work], Mapping[int, tuple[Work, ...]]]:
    """Return the baseline of a window, empty while it is being learned, and the baselines of all loads."""
    if recent.running is None or recent.last is None or not recent.last.tokens:
        return (), before.learned
    load = round(2 * math.log2(max(1.0, recent.running)))
    known = before.learned.get(load, ())
    if known and facts.method not in METHODS_OF_FREE_LENGTH:
        now_long, long = (work.draft_tokens / max(1, work.drafts) for work in (recent.last, known[0]))
        known = () if abs(now_long - long) > _OTHER_LENGTH * max(long, 1.0) else known
    if len(known) < LEARNED_WINDOWS:
        return (), {**before.learned, load: (*known, recent.last)}
    return known, before.learned


def newest_measured(
    captures: Iterable[Body], spec: SpecDecodeDeploymentSpec | InvalidSpecError, plan: PlanStatus | None
) -> Measured | None:
    """Return the acceptance of the newest successful capture of these engines; None without one."""
    if isinstance(spec, InvalidSpecError):
        return None
    engine, found = engine_spec_hash(spec, plan), []
    for body in captures:
        try:
            status = SpecDecodeCaptureStatus.parse(body.get("status") or {}, newer=True)
        except ValidationError:
            continue
        summary, length = status.summary, decimal(status.summary.mean_acceptance_length) if status.summary else None
        is_of_it = status.phase is CapturePhase.SUCCEEDED and status.engine == engine
        if summary is None or summary.acceptance_percent is None or length is None or not is_of_it:
            continue
        name = printable(body["metadata"]["name"])
        found.append((status.finished_at or "", Measured(name, summary.acceptance_percent / 100, max(0.0, length - 1))))
    return max(found, key=lambda each: each[0])[1] if found else None


def decay_condition(decay: Decay) -> ConditionUpdate | None:
    """Return the condition SpeculationEffective if drafts do not pay or something has declined."""
    found = [reason for reason in REASONS if reason in decay.told]
    if not found:
        return None
    return ConditionUpdate(EFFECTIVE, FALSE, found[0], ". ".join(decay.told[each] for each in found))


def drafts_declined(decay: Decay) -> str | None:
    """Return the message if fewer drafted tokens are accepted than before, or never enough; None if not."""
    return next((decay.told[each] for each in (_ACCEPTANCE, _GAIN, _USELESS) if each in decay.told), None)


def has_baseline(decay: Decay) -> bool:
    """Whether a decline would be detected at some load."""
    return any(len(each) >= LEARNED_WINDOWS for each in decay.learned.values())


def _counts_all(facts: Facts) -> bool:
    """Whether all counted draft tokens were verified."""
    return facts.method is not Method.NONE and not facts.pair.adaptive_verification


def _below_break_even(facts: Facts, window: Work, break_even: float | None) -> Iterator[tuple[str, float, str]]:
    """Yield reason, loss and message for a window's acceptance; the loss is 1 at the lowest acceptance that may pay."""
    now = window.acceptance(ENOUGH_DRAFTED_TOKENS)
    if now is None or not _counts_all(facts):
        return
    # Of long drafts, a smaller share is worth as many tokens per step.
    least = LEAST_ACCEPTANCE * min(1.0, _SHORT_DRAFT / max(1, facts.pair.num_speculative_tokens))
    whose = "the least that any published setup needs"
    if break_even is not None and break_even > least:
        least, whose = min(break_even, _MOST_NEEDED), "the memory-bound estimate of break-even at low load"
    told = f"{now:.1%} of drafted tokens accepted, below {least:.1%}, {whose}. {_causes(facts)}"
    yield (_USELESS, max(0.0, 1 - now) / (1 - least), told)


def _causes(facts: Facts) -> str:
    """Return the likely causes of an acceptance that was never sufficient, the most likely first."""
    if facts.method in METHODS_OF_FREE_LENGTH:
        causes = ["answers repeat little of their prompts and of earlier answers, so another method suits them better"]
    else:
        causes = ["the draft was made for another target, fine-tune or quantization"]
        if facts.method in METHODS_WITH_SAMPLING and not facts.pair.samples_drafts:
            causes.append("requests have a temperature, but spec.speculation.draftSampling is not probabilistic")
        causes += [
            *(["draft and target map tokens differently"] if facts.method is Method.DRAFT_MODEL else []),
            "the chat template or the language differs from the draft's training data",
            *(["model runner V1 handles this method differently"] if runs_on_v1(facts.spec, facts.pair) else []),
        ]
    listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, 1))
    return f"Check in this order: {listed}. Then compare with an arm whose speculation.method is none in a capture"


def _losses(
    facts: Facts, recent: Recent, known: Sequence[Work], measured: Measured | None
) -> Iterator[tuple[str, float, str]]:
    """Yield reason, loss and message for each compared figure of a window; the largest allowed mean loss is 1."""
    window, running = recent.last or Work(), recent.running or 0.0
    where = f"at {running:.1f} concurrent requests per engine"
    drafts = _counts_all(facts)
    if drafts and facts.method not in METHODS_OF_FREE_LENGTH and window.draft_tokens:
        usual = Usual.of([each.accepted_tokens / each.draft_tokens for each in known if each.draft_tokens])
        usual, whose = _larger(usual, measured.acceptance if measured else None, measured)
        now = window.accepted_tokens / window.draft_tokens
        told = f"{now:.0%} of drafted tokens accepted {where}, down from {usual.mean:.0%} {whose}. {_TRAFFIC}"
        yield (_ACCEPTANCE, usual.loss_below(now, 1.0), told)
    if drafts and window.steps:
        usual = Usual.of([each.accepted_tokens / each.steps for each in known if each.steps])
        usual, whose = _larger(usual, measured.gain if measured else None, measured)
        now, most = window.accepted_tokens / window.steps, facts.pair.num_speculative_tokens
        told = f"{now:.2f} accepted tokens per step {where}, down from {usual.mean:.2f} {whose}. {_TRAFFIC}"
        yield (_GAIN, usual.loss_below(now, most), told)
    usual, now = Usual.of([each.seconds / each.tokens for each in known]), window.seconds / window.tokens
    if usual.mean:
        told = f"{1000 * now:.1f} ms per token {where}, up from {1000 * usual.mean:.1f} ms {_OWN}. {_MACHINE}"
        yield (_PACE, usual.loss_above(now), told)


@dataclass(frozen=True)
class Usual:
    """Mean and standard deviation of a figure in the baseline's windows."""

    mean: float
    deviation: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "Usual":
        """Return the mean and deviation of values; zero for both without values."""
        return cls(fmean(values), stdev(values)) if len(values) > 1 else cls(*values or (0.0,))

    def loss_below(self, value: float, most: float) -> float:
        """Return the loss of a window for a figure that should not fall; ``most`` is its upper limit."""
        least = min(self.mean, most) - max(LESS_ACCEPTED * self.mean, DEVIATIONS * self.deviation)
        return max(0.0, most - value) / (most - max(0.0, least))

    def loss_above(self, value: float) -> float:
        """Return the loss of a window for a figure that should not rise."""
        return value / (self.mean + max(SLOWER * self.mean, DEVIATIONS * self.deviation))


_OWN: Final = f"in the first {LEARNED_WINDOWS} windows at this load"


def _larger(own: Usual, found: float | None, measured: Measured | None) -> tuple[Usual, str]:
    if measured is None or found is None or found <= own.mean:
        return own, _OWN
    return replace(own, mean=found), f"in capture {measured.capture}"
