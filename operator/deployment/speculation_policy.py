"""Decide the action of a speculation policy: keep, change, turn off, retry, or restart an engine.

`predict` estimates the goodput of each setting that a capture measured at the load of the last minutes; `decide`
applies the user's rules to it. Its inputs are from engines, captures and `status.policy`, which keeps the state that
must survive an operator restart; the rest is relearned. The decision table is in docs/design/policy.md.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture import CaptureWorkload
from specdecode_operator.api.capture_status import ArmVerdict, ComparedArm, ComparisonStatus, Outputs
from specdecode_operator.api.crd_validation import broken_rules
from specdecode_operator.api.deployment import MOST_DECISIONS, MOST_RESTARTS, Policy, PolicyDecision, PolicyStatus
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.api.speculation import Speculation
from specdecode_operator.cluster.clock import RFC3339, rfc3339
from specdecode_operator.cluster.drift import content_hash
from specdecode_operator.deployment.conditions import EFFECTIVE, FALSE, TRUE, UNKNOWN, ConditionUpdate
from specdecode_operator.deployment.desired_state import DesiredState, Launch
from specdecode_operator.deployment.observed.engine_reports import decimal
from specdecode_operator.deployment.observed.observation import Observation, rollout_of
from specdecode_operator.deployment.parsed_deployment import (
    WITHOUT_SPECULATION,
    ParsedDeployment,
    is_off_until_change,
    speculating,
)
from specdecode_operator.enums import Method, PolicyAction, PolicyMode, PolicyOutcome, RejectionSampling
from specdecode_operator.problems import InvalidSpecError, printable
from specdecode_operator.redaction import clip
from specdecode_operator.stats.engine_window import LOOK_STANDS_S, Sample, Window, Work
from specdecode_operator.vllm.engine_metrics import answering_engines


@dataclass(frozen=True)
class Point:
    """Measured goodput of one setting at one load step."""

    load: float  # Concurrent requests of the baseline, which identify the load step
    running: float  # Concurrent requests of this setting: fewer if it is faster, at the same request rate
    ratio: float = 1.0  # Goodput over that of the baseline, with the ends of its confidence interval
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Setting:
    """A measured speculation setting."""

    name: str
    points: Sequence[Point]  # In ascending order of load; the baseline's ratios are 1
    drafts: int = 0
    acceptance: float | None = None
    refused: str = ""

    @property
    def off(self) -> bool:
        """Whether speculation is off."""
        return self.drafts == 0

    def load_at(self, running: float) -> float:
        """Return the load at which this setting has ``running`` concurrent requests."""
        if running <= 0:
            return 0.0
        factors = sorted((point.running, point.load / point.running) for point in self.points)
        return running * _on_line(factors, running)

    def ratio_at(self, load: float) -> tuple[float, float, float]:
        """Return ratio, low and high at a load: interpolated over its logarithm, constant beyond the ends."""
        below, above, share = _between([point.load for point in self.points], load)
        left, right = self.points[below], self.points[above]
        return (
            left.ratio + share * (right.ratio - left.ratio),
            left.low + share * (right.low - left.low),
            left.high + share * (right.high - left.high),
        )

    def tokens_per_step(self, acceptance_factor: float) -> float:
        """Return tokens per step relative to the measured ones if acceptance changed by ``acceptance_factor``."""
        if self.acceptance is None or self.off:
            return 1.0
        accepted = self.acceptance * self.drafts
        return (1 + min(acceptance_factor * accepted, self.drafts)) / (1 + accepted)


@dataclass(frozen=True)
class Evidence:
    """Settings that one capture compared."""

    name: str
    settings: Sequence[Setting]
    goodput: Sequence[tuple[float, float]]  # Load and tokens/s of the baseline

    def find(self, name: str) -> Setting | None:
        """Return a setting by its name."""
        return next((each for each in self.settings if each.name == name), None)

    def goodput_at(self, load: float) -> float:
        """Return the baseline's goodput at a load: proportional below the first step, constant above the last."""
        lowest, first = self.goodput[0]
        return first * load / lowest if load < lowest else _on_line(self.goodput, load)

    def measured(self, load: float) -> bool:
        """Whether a load is within the measured range."""
        return self.goodput[0][0] <= load <= self.goodput[-1][0]


def _between(places: Sequence[float], place: float) -> tuple[int, int, float]:
    """Return the indexes below and above a place, and its logarithmic position between them; 0 at the ends."""
    above = bisect_right(places, place)
    low, high = max(above - 1, 0), min(above, len(places) - 1)
    left, right = places[low], places[high]
    return low, high, math.log(place / left) / math.log(right / left) if left < place < right else 0.0


def _on_line(points: Sequence[tuple[float, float]], place: float) -> float:
    below, above, share = _between([at for at, _ in points], place)
    return points[below][1] + (points[above][1] - points[below][1]) * share


@dataclass(frozen=True)
class Predicted:
    """Predicted goodput of one setting at the current load, compared with the setting in force."""

    setting: Setting
    gain: float
    low: float  # Lower bound of the gain by the confidence intervals of both settings
    # Gain in each third of the window, newest last. A short or past load change does not affect all thirds.
    thirds: tuple[float, ...]
    running: float
    measured: bool
    in_force: str

    def __str__(self) -> str:
        beyond = "" if self.measured else " (outside the measured range)"
        return (
            f"{self.setting.name}: {self.gain:+.1%} goodput compared with {self.in_force} (at least {self.low:+.1%}) at"
            f" {self.running:.1f} concurrent requests per replica{beyond}"
        )


@dataclass(frozen=True)
class Prediction:
    """Predictions for all settings except the one in force, best first."""

    running: float
    acceptance_factor: float  # Current acceptance over the measured one
    others: Sequence[Predicted]


def predict(evidence: Evidence, in_force: str, window: Window, acceptance_factor: float) -> Prediction | None:
    """Return the predicted goodput of each setting; None if the one in force was not measured.

    Goodput is summed over the samples of the window, not computed at the mean load: if two loads alternate, the best
    setting at their mean may not be the best at either.
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
    # The sum is zero if only the newest sample has requests: it does not represent any time yet.
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


_Goodput = list[tuple[float, float, float]]  # Goodput of each sample with its low and high end, in tokens


def _goodput(setting: Setting, loads: Sequence[float], work: Sequence[float], factor: float) -> _Goodput:
    tokens = setting.tokens_per_step(factor)
    ratios = map(setting.ratio_at, loads)
    return [
        (ratio * weight * tokens, low * weight * tokens, high * weight * tokens)
        for (ratio, low, high), weight in zip(ratios, work, strict=True)
    ]


_DAY_S: Final = 86_400.0
_BACK: Final = 2  # Factor of the cool-down before a return to the previous setting
# Factor of the cool-down before a retry of speculation that was turned off for low acceptance, which cannot be measured
# while it is off. After a failed retry, the wait is a day.
_RETRY: Final = 6


@dataclass(frozen=True)
class Rules:
    """Rules of a policy, from its spec."""

    mode: PolicyMode = PolicyMode.OBSERVE
    paused: bool = False
    min_gain: float = 0.03
    cooldown_s: float = 1800.0
    restarts_a_day: int = 6
    # Acceptance below which turning speculation off is advised without evidence.
    acceptance_rule: float | None = None


@dataclass(frozen=True)
class Memory:
    """State of a policy between decisions."""

    in_force: str
    left: str = ""  # The previous setting
    acceptance_factor: float = 1.0  # Acceptance over the measured one, when speculation was turned off
    tried_in_vain: bool = False
    restarts: tuple[float, ...] = ()
    looked_s: float | None = None
    # Accumulated gain of each other setting since the last change, in seconds of the goodput in force. It decreases to
    # at least 0 while the setting in force is better.
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Seen:
    """Observed state of the engines."""

    now_s: float
    window: Window
    settled: bool = True
    start_s: float = 0.0  # Start time of an engine, which is the cost of a change per replica
    # Whether all counted draft tokens were verified; not so with adaptive verification.
    counts_all: bool = True


@dataclass(frozen=True)
class Decision:
    """Action of a policy, with its reason and outcome."""

    action: PolicyAction
    reason: str
    message: str
    target: str = ""  # The setting to change to, or the engine to restart
    outcome: PolicyOutcome = PolicyOutcome.KEPT

    @property
    def changes(self) -> bool:
        """Whether the decision changes the setting in force."""
        return self.outcome is PolicyOutcome.DONE and self.action is not PolicyAction.RESTART


Fits = Callable[[str], str]  # Returns why a setting cannot run at the engines' placement; an empty text if it can


@dataclass(frozen=True)
class NoEvidence:
    """Why there is no usable measurement."""

    reason: str
    message: str


def decide(
    rules: Rules, evidence: Evidence | NoEvidence, seen: Seen, memory: Memory, fits: Fits
) -> tuple[Decision, Memory]:
    """Return the decision and the new state of the policy."""
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
            wanted = _keep("SettingDoesNotFit", f"{wanted.message}; not possible: {refusal}")
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
        what = f"{name} accepts {length:.2f} tokens per draft, the other engines {others:.2f}"
        if not seen.settled:
            return _keep("OthersNotReady", f"{what}; it is restarted when all others are ready")
        return Decision(
            PolicyAction.RESTART, "ReplicaDecayed", f"{what}; its drafter decayed, and a restart fixes it", name
        )
    if not seen.settled:
        return _keep("RollingOut", "Waiting until all engines are ready with the setting in force")
    return None


def _of_evidence(rules: Rules, evidence: Evidence | NoEvidence, seen: Seen) -> Decision | None:
    if isinstance(evidence, NoEvidence):
        reason, message, acceptance = evidence.reason, evidence.message, seen.window.acceptance
        if rules.acceptance_rule is None or acceptance is None or acceptance >= rules.acceptance_rule:
            return _keep(reason, message)
        if not seen.counts_all:
            return _keep(reason, f"{message}; acceptance is not meaningful with adaptiveVerification")
        said = f"acceptance is {acceptance:.0%}, below {rules.acceptance_rule:.0%}; {message}"
        return Decision(PolicyAction.TURN_OFF, "AcceptanceLow", said)
    if not seen.window.enough:
        minutes = f"{seen.window.length_s / 60:.0f} minutes"
        return _keep("TooFewSamples", f"Too few samples: the policy needs samples for most of the last {minutes}")
    return _keep("Idle", "No requests in the window") if seen.window.idle else None


def _of_goodput(rules: Rules, seen: Seen, memory: Memory, prediction: Prediction | None) -> Decision:
    """Return a change to the best setting if it is better beyond doubt and its accumulated gain covers the cost."""
    if prediction is None:
        return _keep("EvidenceOutdated", f"The setting in force, {memory.in_force}, was not measured")
    better = [
        each
        for each in prediction.others
        if min(each.gain, *each.thirds) >= rules.min_gain
        and not each.setting.refused
        and each.setting.name not in memory.failed
    ]
    if not better:
        message = (
            f"No measured setting gains {rules.min_gain:.0%} or more over {memory.in_force} at"
            f" {prediction.running:.1f} concurrent requests per replica"
        )
        return _keep("BestMeasured", message)
    best = next((each for each in better if each.low > 0), None)
    if best is None:
        return _keep("Unclear", f"{better[0]}; the difference is within the confidence intervals")
    ahead_s = memory.ahead_s.get(best.setting.name, 0.0)
    # One start for the change, and one to revert it.
    cost_s = 2 * seen.start_s
    if ahead_s < cost_s:
        wait = f"waiting until the accumulated gain covers two engine starts ({ahead_s:.0f} of {cost_s:.0f} s)"
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
        return PolicyOutcome.COOLING_DOWN, f"; cooling down for {left_s / 60:.0f} more minutes"
    # A retry may have to be reverted.
    needed = 2 if wanted.action is PolicyAction.TRY_AGAIN else 1
    if len(memory.restarts) + needed > rules.restarts_a_day:
        return (
            PolicyOutcome.BUDGET_SPENT,
            f"; restart budget used: {len(memory.restarts)} restarts in the last 24 hours",
        )
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


def observe_engines(desired: DesiredState, observation: Observation, window: Window, now_s: float) -> Seen:
    """Return the observed state with the current sample added to the window, unless a rollout is in progress."""
    settled = False
    if not observation.blocked and isinstance(desired.outcome, Launch):
        rollout = rollout_of(desired.outcome, observation)
        settled = rollout.complete and rollout.wanted > 0
    engines = answering_engines(observation.readings)
    if settled and engines:
        drafting = {
            name: Work(0, its.drafts, its.draft_tokens, its.accepted_tokens)
            for name, engine in engines.items()
            if (its := engine.speculation) is not None
        }
        running = sum(engine.requests_running for engine in engines.values()) / len(engines)
        window = window.add(Sample(now_s, running, drafting))
    speculation = desired.outcome.facts.spec.speculation if isinstance(desired.outcome, Launch) else None
    adapts = speculation is not None and bool(speculation.adaptive_verification)
    return Seen(now_s, window, settled, _slowest_start_s(observation.pods), counts_all=not adapts)


def _slowest_start_s(pods: Sequence[Body]) -> float:
    taken = [0.0]
    for pod in pods:
        status = pod.get("status") or {}
        begun = _read_time(status.get("startTime"))
        for each in status.get("conditions") or []:
            if each["type"] == "Ready" and each["status"] == "True":
                ready = _read_time(each.get("lastTransitionTime"))
                taken += [(ready - begun).total_seconds()] if begun and ready else []
    return max(taken)


def _read_time(text: object) -> datetime | None:
    try:
        return datetime.strptime(str(text), RFC3339).replace(tzinfo=UTC)
    except ValueError:
        return None


OFF: Final = Speculation(method=Method.NONE)
_NONE: Final = "No SpecDecodeCapture of this deployment compared arms; create one with spec.arms"


@dataclass(frozen=True)
class Measured:
    """Evidence of one capture, and its arms as speculation settings."""

    evidence: Evidence
    speculations: Mapping[str, Speculation]
    written: Speculation
    in_force: str


def read_measured(
    captures: Sequence[Body], name: str | None, engine: str, asked: Speculation | None, in_force: Speculation | None
) -> Measured | NoEvidence:
    """Return the evidence of the named capture, or of the newest one if ``name`` is None; or why it is unusable.

    ``engine`` identifies the engines of the written spec, ``asked`` is its speculation.
    """
    capture = _chosen(captures, name)
    if isinstance(capture, NoEvidence):
        return capture
    found, status = capture["metadata"]["name"], capture["status"]
    if status.get("engine") != engine:
        return NoEvidence(
            "EvidenceOutdated", f"Capture {found} measured engines of another spec or placement; capture again"
        )
    try:
        comparison = ComparisonStatus.parse(status["comparison"], newer=True)
    except ValidationError:
        return NoEvidence("EvidenceUnusable", f"The comparison of capture {found} is not valid; capture again")
    speculations = _speculations(capture["spec"].get("arms") or [], asked)
    arm = next((each for each, its in speculations.items() if its == (in_force or OFF)), None)
    if arm is None:
        return NoEvidence(
            "EvidenceOutdated",
            f"No arm of capture {found} has the engines' speculation settings; capture again with such an arm",
        )
    evidence = _evidence(found, comparison, speculations, capture["spec"].get("arms") or [])
    if evidence is None:
        return NoEvidence(
            "EvidenceUnusable", f"Capture {found} has no confidence interval at any load; capture again, for longer"
        )
    return Measured(evidence, speculations, asked or OFF, arm)


def _chosen(captures: Sequence[Body], name: str | None) -> Body | NoEvidence:
    if name is not None:
        captures = [each for each in captures if each["metadata"]["name"] == name]
        if not captures:
            return NoEvidence("NoEvidence", f"spec.policy.evidence: {name}: no SpecDecodeCapture of this deployment")
    compared = [each for each in captures if (each.get("status") or {}).get("comparison")]
    # Phases of a sweep differ in temperature, lengths or prompts, so they are not loads of the same traffic.
    ended = [each for each in compared if not _is_sweep(each)]
    if ended:
        return max(ended, key=lambda each: (str(each["status"].get("finishedAt")), each["metadata"]["name"]))
    if name is not None and compared:
        why = "is a sweep: its phases send different requests and are not loads of the same traffic; choose another"
        return NoEvidence("EvidenceUnusable", f"{name} {why}")
    phase = (captures[-1].get("status") or {}).get("phase") if name is not None else None
    return NoEvidence("NoEvidence", f"Capture {name} compared no arms; its phase is {phase}" if name else _NONE)


def _is_sweep(capture: Body) -> bool:
    try:
        workload = CaptureWorkload.parse(capture["spec"].get("workload") or {}, newer=True)
    except ValidationError:
        return False
    return len({phase.asks for phase in workload.phases}) > 1


def _speculations(arms: Sequence[Any], asked: Speculation | None) -> dict[str, Speculation]:
    found = {}
    for arm in arms:
        if arm.get("targetQuantization") or arm.get("kvCacheDtype"):
            continue
        try:
            given = arm.get("speculation")
            found[str(arm.get("name"))] = Speculation.parse(given, newer=True) if given else asked or OFF
        except ValidationError:
            continue
    return found


def _evidence(
    name: str, comparison: ComparisonStatus, speculations: Mapping[str, Speculation], arms: Sequence[Any]
) -> Evidence | None:
    as_asked = {str(arm.get("name")) for arm in arms if not arm.get("speculation")}
    loads = {
        running: goodput
        for arm in comparison.arms
        for load in arm.loads
        if (running := decimal(load.running))
        and running > 0
        and (goodput := decimal(load.baseline_goodput))
        and goodput > 0
    }
    settings = []
    for arm in comparison.arms:
        points = []
        for load in arm.loads:
            texts = (load.running, load.arm_running or load.running, load.ratio, load.low, load.high)
            numbers = [number for number in map(decimal, texts) if number is not None and number > 0]
            points += [Point(*numbers)] if len(numbers) == len(texts) else []
        points.sort(key=lambda point: point.load)
        if points and arm.name in speculations:
            its = speculations[arm.name]
            refused = "" if arm.name in as_asked else _refusal(arm, its)
            settings.append(_setting(arm.name, points, its, arm.acceptance_percent, refused))
    if not settings or not loads:
        return None
    if comparison.baseline in speculations:
        points = [Point(load, load) for load in sorted(loads)]
        its = speculations[comparison.baseline]
        settings.append(_setting(comparison.baseline, points, its, comparison.baseline_acceptance_percent))
    return Evidence(name, settings, sorted(loads.items()))


def _refusal(arm: ComparedArm, its: Speculation) -> str:
    """Return why an arm is never chosen, which is that its outputs may differ; an empty text otherwise."""
    if its.rejection_sampling is RejectionSampling.FLY:
        return "its outputs may differ from the target's (rejectionSampling fly)"
    if arm.verdict is ArmVerdict.INCORRECT or arm.outputs in {Outputs.DIFFERENT, Outputs.LOSSY}:
        return "its outputs differ from the baseline's"
    return ""


def _setting(
    name: str, points: Sequence[Point], speculation: Speculation, percent: int | None, refused: str = ""
) -> Setting:
    drafts = 0 if speculation.method is Method.NONE else speculation.num_speculative_tokens or 0
    # With K by batch size, K moves with the load, so acceptance does not give tokens per step.
    by_batch = bool(speculation.num_speculative_tokens_by_batch_size)
    return Setting(name, points, drafts, None if percent is None or by_batch else percent / 100, refused)


_PLACE: Final = (
    *("product", "tensor", "pipeline", "data", "gpus_per_replica", "nodes_per_replica", "target_quantization"),
)


def with_speculation(parent: ParsedDeployment, speculation: Speculation) -> ParsedDeployment | str:
    """Return an object with another speculation in its spec, or why the API server would reject it."""
    written = parent.written_spec or parent.spec
    if isinstance(written, InvalidSpecError):
        return str(written)
    spec = speculating(written, speculation)
    if broken := "; ".join(map(str, broken_rules(spec, "spec"))):
        return broken
    raw = {**parent.raw_spec, "speculation": speculation.model_dump(mode="json", by_alias=True, exclude_unset=True)}
    return replace(parent, raw_spec=raw, spec=spec, written_spec=written, by_policy=True)


def why_not_plannable(desired: DesiredState, in_force: PlanStatus | None) -> str:
    """Return why a speculation cannot replace the one in force; an empty text if it can."""
    if not isinstance(desired.outcome, Launch):
        return refusal(desired) or "it cannot be launched now"
    plan = desired.outcome.plan_status
    others = [name for name in _PLACE if in_force is None or getattr(plan, name) != getattr(in_force, name)]
    if not others:
        return ""
    words = ", ".join(f"{name.replace('_', ' ')} {getattr(plan, name)}" for name in others)
    return f"its placement would differ from the measured one: {words}"


def refusal(desired: DesiredState) -> str:
    """Return why a spec is not accepted or does not fit; an empty text otherwise."""
    named = {each.type: each for each in desired.conditions}
    told = [named[each] for each in ("Accepted", "Planned") if each in named]
    refused = next((each for each in told if each.status is FALSE), None)
    return f"{refused.reason}: {refused.message}" if refused else ""


_LONGEST: Final = 1024
_LONGEST_ARM: Final = 200


@dataclass(frozen=True)
class Remembered:
    """State that lives only as long as the operator process; it is observed again after a restart."""

    window: Window
    looked_s: float | None = None
    ahead_s: dict[str, float] = field(default_factory=dict)
    written_s: float = 0.0


def of_this_spec(status: PolicyStatus | None, asked: str) -> PolicyStatus | None:
    """Return the stored status if it belongs to this spec; otherwise only its restarts and decisions."""
    if status is None or status.asked == asked:
        return status
    return PolicyStatus(
        mode=status.mode,
        action=PolicyAction.KEEP,
        outcome=PolicyOutcome.KEPT,
        reason="NoEvidence",
        message="",
        asked=asked,
        restarts=status.restarts,
        decisions=status.decisions,
    )


@dataclass(frozen=True)
class PolicyInputs:
    """Inputs of a decision that do not come from the engines."""

    policy: Policy
    asked: str
    before: PolicyStatus | None
    measured: Measured | NoEvidence
    rollout_paused: bool = False


def judge(case: PolicyInputs, seen: Seen, remembered: Remembered, fits: Fits) -> tuple[Decision, Memory]:
    """Return the decision and the new state; the old state comes from the status and from ``remembered``."""
    measured, before = case.measured, case.before
    memory = Memory(
        in_force=measured.in_force if isinstance(measured, Measured) else "",
        looked_s=remembered.looked_s,
        ahead_s=remembered.ahead_s,
    )
    if before is not None:
        factor = decimal(before.acceptance_factor)
        memory = replace(
            memory,
            left=before.left or "",
            acceptance_factor=1.0 if factor is None else max(factor, 0.0),
            tried_in_vain=before.tried_in_vain,
            restarts=tuple(time.timestamp() for time in map(_read_time, before.restarts) if time is not None),
        )
    if before is not None and isinstance(measured, Measured):
        # Compare digests, because another capture may use another name for the same arm.
        failed = {each.rpartition("@")[2] for each in before.failed_arms}
        names = frozenset(name for name, its in measured.speculations.items() if _digest(its) in failed)
        memory = replace(memory, failed=names)
    policy, rule = case.policy, case.policy.acceptance_rule
    rules = Rules(
        mode=policy.mode,
        paused=policy.paused or case.rollout_paused,
        min_gain=policy.min_gain_percent / 100,
        cooldown_s=float(policy.cooldown_seconds),
        restarts_a_day=policy.max_restarts_per_day,
        acceptance_rule=rule.acceptance if rule else None,
    )
    return decide(rules, measured.evidence if isinstance(measured, Measured) else measured, seen, memory, fits)


def policy_status(case: PolicyInputs, decision: Decision, memory: Memory, now: datetime) -> PolicyStatus:
    """Return `status.policy` after a decision."""
    measured, before, moment = case.measured, case.before, rfc3339(now)
    speculation, since, decisions = (before.speculation, before.since, before.decisions) if before else (None, None, [])
    is_done = decision.outcome is PolicyOutcome.DONE
    if is_done or (decision.outcome is PolicyOutcome.ADVISED and not is_unchanged(before, decision)):
        told = PolicyDecision(
            at=moment,
            action=decision.action,
            outcome=decision.outcome,
            target=decision.target or None,
            message=clip(decision.message, _LONGEST),
        )
        decisions = [told, *decisions][:MOST_DECISIONS]
    if isinstance(measured, Measured) and decision.changes:
        taken = measured.speculations[decision.target]
        speculation, since = None if taken == measured.written else taken, moment
    if case.policy.mode is not PolicyMode.ENFORCE:
        speculation = since = None
    return PolicyStatus(
        mode=case.policy.mode,
        action=decision.action,
        outcome=decision.outcome,
        reason=decision.reason,
        message=clip(decision.message, _LONGEST),
        target=decision.target or None,
        evidence=measured.evidence.name if isinstance(measured, Measured) else None,
        arm=memory.in_force or (before.arm if before and speculation else None),
        since=since,
        speculation=speculation,
        asked=case.asked,
        left=memory.left or None,
        acceptance_factor=None if memory.acceptance_factor == 1 else f"{memory.acceptance_factor:.4f}",
        tried_in_vain=memory.tried_in_vain,
        failed_arms=before.failed_arms if before else [],
        restarts=[rfc3339(datetime.fromtimestamp(each, UTC)) for each in memory.restarts][-MOST_RESTARTS:],
        decisions=decisions,
    )


def turned_off(case: PolicyInputs, reason: str, why: str, refusal: str, now: datetime) -> PolicyStatus:
    """Return the status after a crash loop or wrong answers: speculation is off until the spec changes.

    The policy does not try again, because an hour without crashes would not prove that the drafter works. ``refusal``
    is why engines cannot run without speculation, or empty.
    """
    before = case.before or PolicyStatus(
        mode=case.policy.mode,
        action=PolicyAction.TURN_OFF,
        outcome=PolicyOutcome.REFUSED,
        reason=reason,
        message="",
        asked=case.asked,
    )
    action, moment = PolicyAction.TURN_OFF, rfc3339(now)
    outcome = PolicyOutcome.REFUSED
    if case.policy.paused or case.rollout_paused:
        outcome, refusal = PolicyOutcome.PAUSED, "the policy is paused"
    elif any(each.endswith(f"@{_digest(OFF)}") for each in before.failed_arms):
        refusal = "engines without speculation did not serve"
    if refusal:
        told = {"action": action, "outcome": outcome, "reason": reason, "target": None}
        return before.model_copy(update={**told, "message": _clipped(f"Speculation stays on: {refusal}")})
    message, done = _clipped(why), PolicyOutcome.DONE
    decision = PolicyDecision(at=moment, action=action, outcome=done, message=message)
    return PolicyStatus(
        mode=case.policy.mode,
        action=action,
        outcome=done,
        reason=reason,
        message=message,
        arm=WITHOUT_SPECULATION,
        since=moment,
        speculation=OFF,
        asked=case.asked,
        failed_arms=before.failed_arms,
        restarts=[*before.restarts, moment][-MOST_RESTARTS:],
        decisions=[decision, *before.decisions][:MOST_DECISIONS],
    )


def _clipped(untrusted: str) -> str:
    """Return a text that fits into the status: escaping makes unprintable characters longer."""
    return clip(printable(untrusted), _LONGEST)


def is_unchanged(before: PolicyStatus | None, decision: Decision) -> bool:
    """Whether the status already reflects the decision, ignoring numbers in its message."""
    return before is not None and (before.action, before.outcome, before.target) == (
        *(decision.action, decision.outcome, decision.target or None),
    )


def given_up(status: PolicyStatus, why: str, now: datetime) -> PolicyStatus:
    """Return the status after the arm in force failed: the written spec is in force again."""
    arm, failed = status.arm or "", list[str]()
    if status.arm and status.speculation is not None:
        failed = [f"{status.arm[:_LONGEST_ARM]}@{_digest(status.speculation)}"]
    earlier = [each for each in status.failed_arms if each not in failed]
    message = _clipped(f"{arm} failed, and the speculation of the spec is in force again: {why}")
    done, at = PolicyOutcome.DONE, rfc3339(now)
    told = PolicyDecision(at=at, action=PolicyAction.KEEP, outcome=done, target=arm or None, message=message)
    return status.model_copy(
        update={
            "action": PolicyAction.KEEP,
            "outcome": PolicyOutcome.KEPT,
            "reason": "ArmFailed",
            "message": message,
            "decisions": [told, *status.decisions][:MOST_DECISIONS],
            **dict.fromkeys(("speculation", "since", "target", "arm", "left")),
            # Keep the arm that just failed, or the policy would choose it again.
            "failed_arms": [*earlier[1 - MOST_DECISIONS :], *failed],
        }
    )


def _digest(speculation: Speculation) -> str:
    return content_hash(speculation.model_dump(mode="json", exclude_none=True))[:10]


def steady(new: PolicyStatus, old: PolicyStatus | None, *, due: bool) -> PolicyStatus:
    """Return the old status if only the message differs and no write is due: its numbers change with every request."""
    if old is None or due or new.model_copy(update={"message": old.message}) != old:
        return new
    return old


def policy_condition(status: PolicyStatus | None) -> ConditionUpdate | None:
    """Return the condition SpeculationEffective: whether the best measured setting is in force; None for Observe."""
    if status is not None and is_off_until_change(status):
        message = f"Speculation is off until the spec changes: {status.message}"
        return ConditionUpdate(EFFECTIVE, FALSE, status.reason, message)
    if status is None or status.mode is PolicyMode.OBSERVE:
        return None
    if status.action is not PolicyAction.KEEP:
        return ConditionUpdate(EFFECTIVE, FALSE, status.reason, f"{status.action}: {status.message}")
    is_best = status.reason == "BestMeasured"
    return ConditionUpdate(EFFECTIVE, TRUE if is_best else UNKNOWN, status.reason, status.message)
