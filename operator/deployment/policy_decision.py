"""Decide the action of a speculation policy: keep, change, turn off, retry, or restart an engine.

All functions are pure. `predict` estimates the goodput of each setting that a capture measured at the load of the
last minutes; `decide` applies the user's rules to it. The decision table is in docs/explanation/policy.md.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from specdecode_operator.enums import PolicyAction, PolicyMode, PolicyOutcome
from specdecode_operator.stats.engine_window import LOOK_STANDS_S, Window


@dataclass(frozen=True)
class Point:
    """What one setting did in one load step."""

    load: float  # Requests running at once in the baseline: what all settings share
    # Requests running at once in this setting: a faster one has fewer of those that come at the same rate.
    running: float
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0  # The ends of its interval


@dataclass(frozen=True)
class Setting:
    """A way to speculate that was measured."""

    name: str
    points: Sequence[Point]  # By load, ascending; those of the baseline have a ratio of 1
    drafts: int = 0
    acceptance: float | None = None
    refused: str = ""

    @property
    def off(self) -> bool:
        """Whether it does not speculate."""
        return self.drafts == 0

    def load_at(self, running: float) -> float:
        """Return the load at which this setting has so many requests running."""
        if running <= 0:
            return 0.0
        factors = sorted((point.running, point.load / point.running) for point in self.points)
        return running * _on_line(factors, running)

    def ratio_at(self, load: float) -> tuple[float, float, float]:
        """Return ratio, low and high at a load: between two steps in the ratio of loads, beyond the ends as there."""
        below, above, share = _between([point.load for point in self.points], load)
        left, right = self.points[below], self.points[above]
        return (
            left.ratio + share * (right.ratio - left.ratio),
            left.low + share * (right.low - left.low),
            left.high + share * (right.high - left.high),
        )

    def tokens_a_step(self, acceptance_factor: float) -> float:
        """Return tokens a step over those when it was measured, where acceptance is so many times what it was then."""
        if self.acceptance is None or self.off:
            return 1.0
        accepted = self.acceptance * self.drafts
        return (1 + min(acceptance_factor * accepted, self.drafts)) / (1 + accepted)


@dataclass(frozen=True)
class Evidence:
    """All settings that one capture compared."""

    name: str
    settings: Sequence[Setting]
    goodput: Sequence[tuple[float, float]]  # Of the baseline: load and tokens a second

    def find(self, name: str) -> Setting | None:
        """Return a setting by its name."""
        return next((each for each in self.settings if each.name == name), None)

    def goodput_at(self, load: float) -> float:
        """Return what the baseline brings at a load: in proportion below the first step, no more above the last."""
        lowest, first = self.goodput[0]
        return first * load / lowest if load < lowest else _on_line(self.goodput, load)

    def measured(self, load: float) -> bool:
        """Whether a load lies between the lowest and the highest that were measured."""
        return self.goodput[0][0] <= load <= self.goodput[-1][0]


def _between(places: Sequence[float], place: float) -> tuple[int, int, float]:
    """Return the neighbours of a place, and how far it lies between them over the logarithm; at the ends 0."""
    above = bisect_right(places, place)
    low, high = max(above - 1, 0), min(above, len(places) - 1)
    left, right = places[low], places[high]
    return low, high, math.log(place / left) / math.log(right / left) if left < place < right else 0.0


def _on_line(points: Sequence[tuple[float, float]], place: float) -> float:
    below, above, share = _between([at for at, _ in points], place)
    return points[below][1] + (points[above][1] - points[below][1]) * share


@dataclass(frozen=True)
class Predicted:
    """One setting at the load that there is, against the one in force."""

    setting: Setting
    gain: float
    low: float  # The least that it may be by the intervals of both
    # The gain in each third of the window, the newest last: what is short, or over already, is not in all of them.
    thirds: tuple[float, ...]
    running: float
    measured: bool
    in_force: str

    def __str__(self) -> str:
        beyond = "" if self.measured else ", beyond what was measured"
        return (
            f"with {self.running:.1f} requests running at once in a replica{beyond}, {self.setting.name} brings"
            f" {self.gain:+.1%} goodput against {self.in_force} ({self.low:+.1%} at least)"
        )


@dataclass(frozen=True)
class Prediction:
    """All settings but the one in force, best first."""

    running: float
    acceptance_factor: float  # Acceptance over what was measured
    others: Sequence[Predicted]


def predict(evidence: Evidence, in_force: str, window: Window, acceptance_factor: float) -> Prediction | None:
    """Return what the settings would bring; None where the one in force was not measured.

    Goodput is summed over the looks of the window and not taken at their mean: between two loads that take turns the
    best setting may be neither's.
    """
    present = evidence.find(in_force)
    if present is None:
        return None
    spans = window.spans()
    seconds = sum(each for _, each in spans)
    running = sum(number * each for number, each in spans) / seconds
    loads = [present.load_at(number) for number, _ in spans]
    work = [each * evidence.goodput_at(load) for load, (_, each) in zip(loads, spans, strict=True)]
    measured = all(evidence.measured(load) for load, weight in zip(loads, work, strict=True) if weight)
    third = -(-len(loads) // 3)
    parts = [slice(None), *(slice(start, start + third) for start in range(0, len(loads), third))]
    mine = _goodput(present, loads, work, acceptance_factor)
    presents = [sum(each[0] for each in mine[part]) for part in parts]
    # Nothing ran where the newest look alone saw a request, which stands for no time yet.
    most, others = sum(each[2] for each in mine), []
    for setting in evidence.settings:
        if setting.name != in_force:
            its = _goodput(setting, loads, work, acceptance_factor)
            gain, *thirds = (
                sum(each[0] for each in its[part]) / goodput - 1 if goodput else 0.0
                for part, goodput in zip(parts, presents, strict=True)
            )
            low = sum(each[1] for each in its) / most - 1 if most else 0.0
            others.append(Predicted(setting, gain, low, tuple(thirds), running, measured, in_force))
    others.sort(key=lambda each: each.gain, reverse=True)
    return Prediction(running, acceptance_factor, others)


_Goodput = list[tuple[float, float, float]]  # Of each look, with its low and its high end, in units of the baseline's


def _goodput(setting: Setting, loads: Sequence[float], work: Sequence[float], factor: float) -> _Goodput:
    tokens = setting.tokens_a_step(factor)
    ratios = map(setting.ratio_at, loads)
    return [
        (ratio * weight * tokens, low * weight * tokens, high * weight * tokens)
        for (ratio, low, high), weight in zip(ratios, work, strict=True)
    ]


_DAY_S: Final = 86_400.0
_BACK: Final = 2
# Times the cool-down before speculation is tried again that was turned off because its acceptance fell: nobody sees it
# rise while nothing is drafted. After a try in vain it is a day.
_RETRY: Final = 6


@dataclass(frozen=True)
class Rules:
    """What a user allows."""

    mode: PolicyMode = PolicyMode.OBSERVE
    paused: bool = False
    min_gain: float = 0.03
    cooldown_s: float = 1800.0
    restarts_a_day: int = 6
    # An acceptance below which speculation is advised against where nothing was measured.
    acceptance_rule: float | None = None


@dataclass(frozen=True)
class Memory:
    """What a policy remembers."""

    in_force: str
    left: str = ""
    acceptance_factor: float = 1.0  # Acceptance over what was measured, when speculation was turned off
    tried_in_vain: bool = False
    restarts: tuple[float, ...] = ()
    looked_s: float | None = None
    # How far each other setting would be ahead since the last change, in seconds of the goodput in force: it falls
    # again, to 0, where the one in force is better.
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Seen:
    """What is seen of the engines."""

    now_s: float
    window: Window
    settled: bool = True
    start_s: float = 0.0  # How long an engine takes to start: what a change costs each replica
    # Whether acceptance counts what was verified: not with adaptive verification, which leaves some out.
    counts_all: bool = True


@dataclass(frozen=True)
class Decision:
    """What is to be done, why, and its outcome."""

    action: PolicyAction
    reason: str
    message: str
    target: str = ""  # The setting to change to, or the engine to start anew
    outcome: PolicyOutcome = PolicyOutcome.KEPT

    @property
    def changes(self) -> bool:
        """Whether another setting is in force from now on."""
        return self.outcome is PolicyOutcome.DONE and self.action is not PolicyAction.RESTART


Fits = Callable[[str], str]  # Says why a setting cannot be had where the engines are; an empty text where it can


@dataclass(frozen=True)
class NoEvidence:
    """Why nothing measured can be decided by."""

    reason: str
    message: str


def decide(
    rules: Rules, evidence: Evidence | NoEvidence, seen: Seen, memory: Memory, fits: Fits
) -> tuple[Decision, Memory]:
    """Return what to do, and what is to be remembered of it."""
    memory = replace(memory, restarts=tuple(each for each in memory.restarts if seen.now_s - each < _DAY_S))
    prediction = None
    if isinstance(evidence, Evidence) and seen.window.enough and not seen.window.idle:
        prediction = predict(evidence, memory.in_force, seen.window, _acceptance_factor(rules, evidence, seen, memory))
    if prediction is not None and seen.settled:
        passed_s = 0.0 if memory.looked_s is None else max(0.0, min(seen.now_s - memory.looked_s, LOOK_STANDS_S))
        names = [(each.setting.name, each.thirds[-1]) for each in prediction.others]
        ahead_s = {name: max(0.0, memory.ahead_s.get(name, 0.0) + gain * passed_s) for name, gain in names}
        memory = replace(memory, ahead_s=ahead_s)
    memory = replace(memory, looked_s=seen.now_s)
    wanted = _of_engines(seen) or _of_evidence(rules, evidence, seen) or _of_goodput(rules, seen, memory, prediction)
    if wanted.action is PolicyAction.CHANGE and isinstance(evidence, Evidence):
        target, present = evidence.find(wanted.target), evidence.find(memory.in_force)
        if refusal := fits(wanted.target):
            wanted = _keep("SettingDoesNotFit", f"{wanted.message}; but it cannot be had: {refusal}")
        elif target is not None and target.off:
            wanted = replace(wanted, action=PolicyAction.TURN_OFF)
        elif present is not None and present.off:
            wanted = replace(wanted, action=PolicyAction.TRY_AGAIN)
    if wanted.action is PolicyAction.KEEP:
        return wanted, memory
    outcome, more = _outcome(rules, seen, memory, wanted)
    decision = replace(wanted, outcome=outcome, message=f"{wanted.message}{more}")
    return decision, _after(decision, prediction, seen, memory, rules)


def _keep(reason: str, message: str) -> Decision:
    return Decision(PolicyAction.KEEP, reason, message)


def _of_engines(seen: Seen) -> Decision | None:
    decayed = seen.window.decayed()
    if decayed is not None:
        name, length, others = decayed
        what = f"{name} has {length:.2f} tokens a draft accepted, the other engines {others:.2f}"
        if not seen.settled:
            return _keep("OthersNotReady", f"{what}; it is started anew once all others are ready")
        return Decision(PolicyAction.RESTART, "ReplicaDecayed", f"{what}: its drafter decayed, a start ends that", name)
    if not seen.settled:
        return _keep("RollingOut", "not all engines are those of the setting in force, and ready")
    return None


def _of_evidence(rules: Rules, evidence: Evidence | NoEvidence, seen: Seen) -> Decision | None:
    if isinstance(evidence, NoEvidence):
        reason, message, acceptance = evidence.reason, evidence.message, seen.window.acceptance
        if rules.acceptance_rule is None or acceptance is None or acceptance >= rules.acceptance_rule:
            return _keep(reason, message)
        if not seen.counts_all:
            return _keep(reason, f"{message}; acceptance says nothing with adaptiveVerification")
        said = f"acceptance is {acceptance:.0%}, below {rules.acceptance_rule:.0%}; {message}"
        return Decision(PolicyAction.TURN_OFF, "AcceptanceLow", said)
    if not seen.window.enough:
        minutes = f"{seen.window.length_s / 60:.0f} minutes"
        return _keep("TooFewSamples", f"the engines were not seen at work for most of the last {minutes} yet")
    return _keep("Idle", "no request ran: nothing is lost or won") if seen.window.idle else None


def _of_goodput(rules: Rules, seen: Seen, memory: Memory, prediction: Prediction | None) -> Decision:
    """Return the change to the best setting, where it is surely better and staying has cost what a change costs."""
    if prediction is None:
        return _keep("EvidenceOutdated", f"{memory.in_force} is none of the settings that were measured")
    better = [
        each
        for each in prediction.others
        if min(each.gain, *each.thirds) >= rules.min_gain
        and not each.setting.refused
        and each.setting.name not in memory.failed
    ]
    if not better:
        message = (
            f"with {prediction.running:.1f} requests running at once in a replica, no measured setting brings"
            f" {rules.min_gain:.0%} more than {memory.in_force}"
        )
        return _keep("BestMeasured", message)
    best = next((each for each in better if each.low > 0), None)
    if best is None:
        return _keep("Unclear", f"{better[0]}: not more than the intervals leave open")
    ahead_s = memory.ahead_s.get(best.setting.name, 0.0)
    # One to change, and one to take it back.
    cost_s = 2 * seen.start_s
    if ahead_s < cost_s:
        wait = f"it waits until staying has cost as much as two starts of an engine ({ahead_s:.0f} of {cost_s:.0f} s)"
        return _keep("NotYetPaid", f"{best}; {wait}")
    return Decision(PolicyAction.CHANGE, "BetterMeasured", str(best), best.setting.name)


def _outcome(rules: Rules, seen: Seen, memory: Memory, wanted: Decision) -> tuple[PolicyOutcome, str]:
    if rules.mode is PolicyMode.OBSERVE:
        return PolicyOutcome.OBSERVED, ""
    if rules.mode is PolicyMode.ADVISE or wanted.reason == "AcceptanceLow":
        return PolicyOutcome.ADVISED, ""
    if rules.paused:
        return PolicyOutcome.PAUSED, "; the policy is paused"
    is_return = wanted.target == memory.left and wanted.action is not PolicyAction.TURN_OFF
    cools_s = rules.cooldown_s * (_BACK if is_return else 1)
    left_s = max(memory.restarts, default=-cools_s) + cools_s - seen.now_s
    if memory.restarts and left_s > 0:
        return PolicyOutcome.COOLING_DOWN, f"; it cools down from its last act for {left_s / 60:.0f} minutes more"
    # A try may have to be taken back.
    needed = 2 if wanted.action is PolicyAction.TRY_AGAIN else 1
    if len(memory.restarts) + needed > rules.restarts_a_day:
        return PolicyOutcome.BUDGET_SPENT, f"; engines were started anew {len(memory.restarts)} times in a day already"
    return PolicyOutcome.DONE, ""


def _acceptance_factor(rules: Rules, evidence: Evidence, seen: Seen, memory: Memory) -> float:
    setting, now = evidence.find(memory.in_force), seen.window.acceptance
    if setting is not None and not setting.off:
        return now / setting.acceptance if now is not None and setting.acceptance else 1.0
    waits_s = _DAY_S if memory.tried_in_vain else _RETRY * rules.cooldown_s
    recent = any(seen.now_s - each < waits_s for each in memory.restarts)
    return memory.acceptance_factor if recent else 1.0


def _after(decision: Decision, prediction: Prediction | None, seen: Seen, memory: Memory, rules: Rules) -> Memory:
    if decision.outcome is not PolicyOutcome.DONE:
        return memory
    restarts = (*memory.restarts, seen.now_s)
    if decision.action is PolicyAction.RESTART:
        return replace(memory, restarts=restarts)
    now = replace(memory, in_force=decision.target, left=memory.in_force, restarts=restarts, ahead_s={})
    if decision.action is not PolicyAction.TURN_OFF or prediction is None:
        return now
    stayed_s = seen.now_s - max(memory.restarts, default=0.0)
    in_vain = bool(memory.left) and prediction.acceptance_factor < 1 and stayed_s < _RETRY * rules.cooldown_s
    return replace(now, acceptance_factor=prediction.acceptance_factor, tried_in_vain=in_vain)
