"""Compose the status of a SpecDecodeDeployment from the desired and the observed state.

SettingsInForce, SpeculationActive and `status.speculation` rely on an engine's counters, the settings it logged as
changed, and the configuration its core started with, not its command line. An engine may log one thing and do another,
so counters take precedence. They are lost when an engine ends, so the last acceptance is kept and shown with its time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

from specdecode_operator.api.deployment import PolicyStatus, ScheduleStatus
from specdecode_operator.api.deployment_status import (
    AcceptanceStatus,
    CanaryStatus,
    ConditionStatus,
    ObservedStatus,
    SpecDecodeDeploymentStatus,
    SpeculationFeature,
    TrainedDraftStatus,
)
from specdecode_operator.cluster.clock import rfc3339
from specdecode_operator.cluster.resources import (
    AUTOSCALERS,
    CANARY_POOL,
    EXPOSING,
    KEPT_MANAGERS_ANNOTATION,
    POOL_LABEL,
    selector_labels,
)
from specdecode_operator.deployment.autoscaler import autoscaled_condition
from specdecode_operator.deployment.conditions import (
    CRASH_LOOP,
    EFFECTIVE,
    FALSE,
    MESSAGE_LIMIT,
    OTHER_SETTING,
    REASONS,
    SEE_READY,
    TRUE,
    UNKNOWN,
    WRONG_ANSWERS,
    ConditionUpdate,
    kept,
    stamp,
)
from specdecode_operator.deployment.desired_state import DesiredState, Gated, InCanary, Launch, NotLaunched, Outcome
from specdecode_operator.deployment.engine_settings import engine_settings
from specdecode_operator.deployment.expose import exposed_condition
from specdecode_operator.deployment.model_checks import runs_on_v1
from specdecode_operator.deployment.observed.decay import decay_condition
from specdecode_operator.deployment.observed.engine_reports import (
    budget_condition,
    budget_residual,
    decimal,
    no_engine_condition,
    observed_status,
    other_version,
    steady,
)
from specdecode_operator.deployment.observed.observation import Observation, canary_decision, rollout_of
from specdecode_operator.deployment.observed.wrong_answers import canaries_status
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment, is_off_until_change
from specdecode_operator.deployment.rollout.canary import CANARY_FAILED, JUDGED
from specdecode_operator.deployment.rollout.readiness import (
    CAPTURE_OVERDUE,
    ROLLED_BACK,
    EngineCounts,
    Lending,
    Readiness,
    asked_for_zero,
    available_condition,
    name_claim_users,
    rolled_back,
    summarize,
    suspended_for_capture,
    without_engines,
)
from specdecode_operator.deployment.rollout.rollout_gate import held_readiness
from specdecode_operator.deployment.rollout.rollout_progress import pod_count
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.speculation_policy import policy_condition
from specdecode_operator.enums import METHODS_OF_FREE_LENGTH, Method
from specdecode_operator.problems import printable
from specdecode_operator.redaction import clip
from specdecode_operator.sizing.pair import effective_batch
from specdecode_operator.stats.engine_window import Recent
from specdecode_operator.vllm.engine_metrics import EngineReading, Reading, answering_engines
from specdecode_operator.vllm.model_runner import waits_for_steps
from specdecode_operator.vllm.settings_watch import word
from specdecode_operator.vllm.speculative_config import SPECULATIVE_KEYS, SPOKEN_KEYS, SpeculativeKey

_PROOFS: Final = ("SpeculationActive", "BudgetAccurate", "SettingsInForce")
_BY_POLICY: Final = "Turned off by the speculation policy; see status.policy"
_REPLAYED: Final = "; replaying a recording (spec.engine.replay), no model runs"


_CRASH_FIX: Final = (
    "Save the log (kubectl logs POD --previous). Then remove spec.speculation, or let the operator turn it off:"
    " spec.policy.onCrashLoop: ServeWithoutSpeculation"
)
_EARLIER_CRASH_FIX: Final = (
    "The policy does not replace them. Save the log (kubectl logs POD --previous). Then let this spec roll out (see"
    " Ready), or apply the earlier spec without spec.speculation"
)
_CONTESTED_FIX: Final = (
    "Backing off repairs: stop the other writer, or keep its changes by listing its field manager in annotation"
    f" {KEPT_MANAGERS_ANNOTATION}"
)


@dataclass(frozen=True)
class _EngineStatus:
    readiness: Readiness
    counts: EngineCounts
    conditions: list[ConditionUpdate]
    figures: ObservedStatus | None = None
    features: list[SpeculationFeature] = field(default_factory=list)
    replays: bool = False
    declined: ConditionUpdate | None = None


def compose_status(  # noqa: PLR0913  the status combines these inputs
    parent: ParsedDeployment,
    desired: DesiredState,
    observation: Observation,
    now: datetime,
    schedules: Sequence[ScheduleStatus] | None = None,
    *,
    policy: PolicyStatus | None = None,
    trained_draft: TrainedDraftStatus | None = None,
) -> SpecDecodeDeploymentStatus:
    """Return the status; without ``schedules``, keep the schedules of the previous status."""
    seen = _engine_status(parent, desired, observation)
    # If a capture has the GPUs, or the user asked for zero engines, Available gives that reason even if something else
    # is wrong with the object too.
    readiness = name_claim_users(seen.readiness, observation.claim_users)
    lending = None if parent.suspended_for is None else observation.lending or Lending(parent.suspended_for)
    if lending is not None:
        no_engine: Readiness | None = suspended_for_capture(lending, desired.outcome.plan_status, now)
    else:
        no_engine = asked_for_zero(
            suspend=parent.raw_spec.get("suspend") is True, replicas=parent.raw_spec.get("replicas")
        )
    if lending is not None and no_engine is not None and readiness.status is TRUE:
        readiness = no_engine
    available = available_condition(seen.counts, readiness)
    if no_engine is not None and available.status is FALSE:
        is_overdue = lending is not None and lending.is_overdue(now)
        reason = CAPTURE_OVERDUE if is_overdue else no_engine.reason
        message = SEE_READY if no_engine.message == readiness.message else no_engine.message
        available = replace(available, reason=reason, message=message)
    if seen.replays:
        readiness = replace(readiness, message=f"{readiness.message}{_REPLAYED}")
    facts = desired.outcome.facts if isinstance(desired.outcome, Launch) else None
    acceptance = last_acceptance(parent.status.acceptance, seen.figures, facts, now)
    proofs = [with_last_acceptance(each, acceptance) for each in seen.conditions]
    if parent.written_spec is not None:
        proofs = [replace(each, message=_BY_POLICY) if each.reason == "Disabled" else each for each in proofs]
    effective = _effective_condition(observation, seen.declined, policy)
    details = list(desired.conditions)
    if isinstance(desired.outcome, InCanary):
        details.append(canary_decision(desired.outcome, observation).condition())
    exposed = exposed_condition(parent, observation.route, observation.pool, observation.why_blocked(*EXPOSING))
    autoscaled = autoscaled_condition(
        parent, observation.autoscaler, observation.why_blocked(*AUTOSCALERS), observation.load
    )
    conditions = [*readiness.conditions(details), available, *proofs, *effective, *exposed, *autoscaled]
    if observation.contested:
        message = f"{'; '.join(observation.contested)}: changed again after each repair. {_CONTESTED_FIX}"
        conditions.append(ConditionUpdate("ChildrenInSync", FALSE, "RepairsUndone", message))
    workloads = [each or {} for each in (observation.workload, observation.replaced_workload)]
    return SpecDecodeDeploymentStatus(
        observed_generation=parent.generation,
        conditions=stamp(conditions, parent.status.conditions, parent.generation, now),
        plan=desired.outcome.plan_status,
        observed=seen.figures,
        acceptance=acceptance,
        speculation=seen.features,
        figures=observation.figures,
        policy=policy,
        trained_draft=trained_draft,
        canaries=canaries_status(facts, observation.answers, parent.status.canaries),
        canary=_canary_status(parent, desired, observation),
        captures=list(parent.status.captures if schedules is None else schedules),
        ready=f"{seen.counts.ready}/{_wanted_engines(parent)}",
        kept=parent.status.kept,
        replicas=sum(map(pod_count, workloads)),
        ready_replicas=sum(each.get("status", {}).get("readyReplicas", 0) for each in workloads),
        selector=_selector(parent, desired.outcome),
    )


def _selector(parent: ParsedDeployment, outcome: Outcome) -> str:
    """Return the selector of the pods that autoscalers count: without a canary, which is not part of the replicas."""
    labels = [f"{name}={value}" for name, value in sorted(selector_labels(parent.key.name).items())]
    # The API server rejects != in the selector of a scale subresource.
    without = [f"{POOL_LABEL} notin ({CANARY_POOL})"] if isinstance(outcome, InCanary) else []
    return ",".join([*labels, *without])


def _effective_condition(
    observation: Observation, declined: ConditionUpdate | None, policy: PolicyStatus | None
) -> list[ConditionUpdate]:
    """Return the condition SpeculationEffective, if crashes, wrong answers, a decline or a policy set it.

    Crashes and wrong answers of engines that speculate take precedence until the policy has turned speculation off. A
    decline comes before the policy, because it is measured now, while the policy uses earlier captures.
    """
    crash_loop, wrong = observation.crash_loop, observation.wrong_answers
    is_off = policy is not None and is_off_until_change(policy)
    told = {policy.reason: policy.message} if policy is not None else {}
    if crash_loop and not is_off:
        fix = told.get(CRASH_LOOP, _CRASH_FIX) if crash_loop.of_spec else _EARLIER_CRASH_FIX
        return [ConditionUpdate(EFFECTIVE, FALSE, CRASH_LOOP, f"{crash_loop.message}. {fix}")]
    if wrong is not None and not (is_off and wrong.speculates):
        return [wrong.condition(None if is_off else told.get(WRONG_ANSWERS))]
    by_policy = policy_condition(policy)
    if declined is not None and by_policy is not None:
        return [replace(declined, message=f"{declined.message}. By the policy: {by_policy.message}")]
    found = declined or by_policy
    return [found] if found else []


def _canary_status(parent: ParsedDeployment, desired: DesiredState, observation: Observation) -> CanaryStatus | None:
    """Return the comparison of the canary; the last one stays while its verdict applies."""
    if isinstance(desired.outcome, InCanary):
        return canary_decision(desired.outcome, observation).status
    judged = any((each.type, each.reason) in JUDGED for each in desired.conditions)
    return parent.status.canary if judged else None


def _wanted_engines(parent: ParsedDeployment) -> int:
    """Return the number of engines in the spec, even if it is invalid or a capture has the GPUs."""
    replicas = parent.raw_spec.get("replicas", 1)
    suspended = parent.raw_spec.get("suspend") is True and parent.suspended_for is None
    return replicas if isinstance(replicas, int) and not suspended else 0


def _engine_status(parent: ParsedDeployment, desired: DesiredState, observation: Observation) -> _EngineStatus:
    outcome, earlier = desired.outcome, EngineCounts.of_earlier(observation.workload)
    if observation.blocked:
        return _unproven(observation.blocked, earlier, "NotLaunched")
    if isinstance(outcome, NotLaunched):
        return _unproven(outcome.readiness, earlier, "NotLaunched")
    if isinstance(outcome, Launch):
        return _launched(parent, outcome, observation)
    rollout = rollout_of(outcome, observation)
    if isinstance(outcome, Gated):
        reason, readiness = "WaitsAtGate", held_readiness(outcome.held, rollout)
    elif isinstance(outcome, InCanary):
        reason, readiness = "InCanary", canary_decision(outcome, observation).readiness(rollout)
    else:
        failure, reason = outcome.failure, ROLLED_BACK
        if failure.reason == CANARY_FAILED:
            readiness = rolled_back(rollout, failure.message, "the canary of this spec failed")
        else:
            readiness = rolled_back(rollout, str(failure))
    return _unproven(without_engines(outcome.facts.spec) or readiness, EngineCounts.of_rollout(rollout), reason)


def _unproven(readiness: Readiness, counts: EngineCounts, reason: str) -> _EngineStatus:
    why = "No engine is launched for this spec" if reason == "NotLaunched" else "Engines run an earlier spec"
    return _EngineStatus(readiness, counts, [ConditionUpdate(type_, UNKNOWN, reason, why) for type_ in _PROOFS])


def _launched(parent: ParsedDeployment, launch: Launch, observation: Observation) -> _EngineStatus:
    facts, plan, readings = launch.facts, launch.plan, observation.readings
    rollout = rollout_of(launch, observation)
    residual = budget_residual(facts, plan, readings)
    figures = parent.status.observed
    if not observation.missed:
        seen = observed_status(facts, residual, readings, observation.pods)
        figures = steady(seen, figures, figures_due=observation.figures_due)
    speculation, features = prove_speculation(facts, plan.chosen.tensor, readings, figures, observation.recent)
    proofs = [speculation, budget_condition(facts, plan, residual, readings), settings_condition(facts, readings)]
    before = {condition.type: condition for condition in parent.status.conditions}
    if observation.missed:
        proofs = [kept(before.get(each.type), parent.generation) or each for each in proofs]
        if parent.status.observed_generation == parent.generation:
            features = parent.status.speculation
    paused = facts.spec.rollout.paused
    readiness = without_engines(facts.spec) or summarize(
        rollout, proofs[0], before.get("Ready"), parent.generation, paused=paused
    )
    return _EngineStatus(
        readiness,
        EngineCounts.of_rollout(rollout),
        proofs,
        figures,
        features,
        replays=facts.replay is not None and rollout.wanted > 0,
        declined=decay_condition(observation.decay),
    )


_TYPE: Final = "SettingsInForce"
_LENGTH: Final = "numSpeculativeTokens"
_SCHEDULE_FIELD: Final = "numSpeculativeTokensByBatchSize"
_LONGEST: Final = 256
_ACTIVE: Final = partial(ConditionUpdate, "SpeculationActive")
_SCHEDULE: Final = "spec.speculation.numSpeculativeTokensByBatchSize"


# Reason, effect and fix by changed setting; the most costly first.
_CHANGES: Final[Mapping[str, tuple[str, str, str]]] = {
    "schedule_with_data_parallel": (
        "ScheduleDropped",
        "K does not depend on the number of requests, because all data-parallel ranks must use the same K",
        f"remove {_SCHEDULE}, or use spec.replicas instead of data parallelism",
    ),
    "schedule_on_v1": (
        "ScheduleDropped",
        "K does not depend on the number of requests, because model runner V1 cannot shorten drafts of this method",
        f"remove {_SCHEDULE}, or use another method",
    ),
    "max_model_len": (
        "LengthReduced",
        "the draft limits requests to fewer tokens than spec.serving.maxModelLen",
        "lower spec.serving.maxModelLen, or use a draft with a longer context",
    ),
    "max_num_seqs": (
        "FewerRequests",
        "fewer than spec.serving.maxNumSeqs requests run concurrently, because each needs several tokens of a step",
        "raise spec.serving.maxNumBatchedTokens, or lower spec.serving.maxNumSeqs",
    ),
    "model_runner": (
        "RunnerChanged",
        "the engine uses model runner V1, but the plan assumes V2",
        "check spec.engine.extraArgs and spec.engine.env for settings that need V1",
    ),
    "async_scheduling": (
        "NotAsynchronous",
        "asynchronous scheduling is off, so the scheduler waits for each step",
        "check spec.engine.extraArgs and spec.engine.env for settings that disable it",
    ),
    "cudagraph_mode_with_schedule": (
        "GraphsReduced",
        "CUDA graphs are piecewise, because K depends on the number of requests on model runner V1",
        f"remove {_SCHEDULE}, or check spec.engine.extraArgs and spec.engine.env for settings that need V1",
    ),
    "cudagraph_mode_with_drafts": (
        "GraphsReduced",
        "CUDA graphs are piecewise or off, because the attention backend replays only one token per request",
        "choose another --attention-backend in spec.engine.extraArgs",
    ),
    "draft_graphs": (
        "GraphsReduced",
        "the draft runs without CUDA graphs, because its attention backend does not support them",
        "remove --attention-backend from spec.engine.extraArgs, or use another draft",
    ),
}


def _change_message(setting: str) -> str:
    _, what, fix = _CHANGES[setting]
    return f"{what}; {fix}"


def settings_condition(facts: Facts, readings: Mapping[str, Reading]) -> ConditionUpdate:
    """Return the condition SettingsInForce: whether engines run the planned vLLM version and settings."""
    if facts.replay is not None:
        return ConditionUpdate(_TYPE, UNKNOWN, "Replayed", "Not checked for a replay")
    engines = answering_engines(readings)
    if not engines:
        return no_engine_condition(_TYPE, readings)
    planned = set()
    on_v1 = runs_on_v1(facts.spec, facts.pair)
    if on_v1:
        planned |= {"model_runner", "cudagraph_mode_with_schedule"}
    # Model runner V1 also disables it with pipeline stages (as of vLLM 0.31).
    if waits_for_steps(facts.method, facts.profile, on_v1=on_v1) or (on_v1 and facts.spec.parallelism.pipeline > 1):
        planned.add("async_scheduling")
    if effective_batch(facts.pair) < facts.pair.limits.max_num_seqs:
        planned.add("max_num_seqs")
    made = {
        setting: [name for name, engine in engines.items() if setting in (engine.changed_settings or ())]
        for setting in _CHANGES
        if setting not in planned
    }
    told = [(setting, names[0]) for setting, names in made.items() if names]
    messages = [f"{name}: {_change_message(setting)}" for setting, name in told]
    if version := other_version(facts, readings):
        # The version comes first: flags and rules of the planned version may be wrong for this one.
        return ConditionUpdate(_TYPE, FALSE, "OtherVersion", ". ".join([version, *messages]))
    if told:
        return ConditionUpdate(_TYPE, FALSE, _CHANGES[told[0][0]][0], ". ".join(messages))
    silent = [name for name, engine in engines.items() if engine.changed_settings is None]
    if silent:
        message = (
            f"{silent[0]} does not report changed settings at /metrics; check VLLM_LOGGING_LEVEL and other logging"
            " variables in spec.engine.env and spec.podTemplate, or read its log"
        )
        return ConditionUpdate(_TYPE, UNKNOWN, "NotSaid", message)
    return ConditionUpdate(_TYPE, TRUE, "AsAsked", "Engines run with the planned settings")


_ENOUGH_DRAFTED_TOKENS: Final = 64  # With fewer, the ends of a few requests dominate the mean draft length
_ROUNDED: Final = 0.02  # Rounding error of a mean draft length in the status, if all drafts have one length
_MOSTLY: Final = 0.9  # Share of K that the mean draft length reaches if drafting works as requested
_WHERE: Final = "check spec.engine.extraArgs, spec.engine.env and spec.podTemplate for the cause"
_SHORTER: Final = (
    "drafts are shorter near spec.serving.maxModelLen, with structured output, and in steps that reach"
    " spec.serving.maxNumBatchedTokens"
)


@dataclass(frozen=True)
class _Engines:
    facts: Facts
    tensor: int
    readings: Mapping[str, EngineReading]
    observed: ObservedStatus | None
    recent: Recent
    drafting: ConditionUpdate

    @property
    def drafted(self) -> float | None:
        seen = self.observed
        enough = seen is not None and (seen.draft_tokens or 0) >= _ENOUGH_DRAFTED_TOKENS
        return decimal(seen.mean_draft_length) if enough and seen is not None else None


_Finding = tuple[ConditionStatus, str]


def _speculation_features(engines: _Engines, none_answers: str | None) -> list[SpeculationFeature]:
    """Return the requested features and whether each is in force; empty without speculation and for a replay."""
    facts, found = engines.facts, []
    settings = engine_settings(facts.spec, facts.pair, engines.tensor)
    if settings.speculation is None or facts.replay is not None:
        return []
    # These follow from the models and from the target's split unless the spec sets them.
    unasked = {"parallel_drafting", *([] if facts.spec.parallelism.draft_tensor else ["draft_tensor_parallel_size"])}
    for key in SPECULATIVE_KEYS:
        value = key.value(settings, settings.speculation, facts.profile)
        if value is None or key.key not in SPOKEN_KEYS or key.key in unasked:
            continue
        feature = key.field.removeprefix("spec.").removeprefix("speculation.")
        in_force, message = (UNKNOWN, none_answers) if none_answers else _judge(engines, feature, key, value)
        asked = str(value).lower() if isinstance(value, bool) else word(value)
        if isinstance(value, list):
            asked = clip(", ".join(f"{first}-{last}: {length}" for first, last, length in value), _LONGEST)
        told = clip(printable(message), MESSAGE_LIMIT)
        found.append(SpeculationFeature(feature=feature, asked=asked, in_force=in_force, message=told))
    return found


def _judge(engines: _Engines, feature: str, key: SpeculativeKey, value: Any) -> _Finding:
    if feature == "parallelism.draftTensor":
        # No vLLM version splits a draft differently, and none logs this (status.plan.draftTensor).
        if value == engines.tensor:
            return TRUE, "vLLM splits the draft like the target"
        over = f"over {engines.tensor} GPUs"
        return FALSE, f"vLLM splits the draft like the target, {over}; remove spec.parallelism.draftTensor"
    if wrong := _contradiction(engines, feature, key, value):
        return FALSE, wrong
    match feature:
        case "method":
            return engines.drafting.status, engines.drafting.message
        case "numSpeculativeTokens":
            return _length(engines, value)
    return _schedule(engines, value) if feature == _SCHEDULE_FIELD else _by_startup_log(engines, key)


def _contradiction(engines: _Engines, feature: str, key: SpeculativeKey, value: Any) -> str | None:
    """Return which engine differs, from its counters, its logged changes, or the settings it started with."""
    for name, engine in engines.readings.items():
        places = len(engine.speculation.accepted_per_position) if engine.speculation is not None else 0
        if feature == _LENGTH and places not in (0, value):
            return f"{name} drafts up to {places} tokens; {_WHERE}, or set spec.speculation.{_LENGTH} to {places}"
        for change in ("schedule_with_data_parallel", "schedule_on_v1") if feature == _SCHEDULE_FIELD else ():
            if change in (engine.changed_settings or ()):
                return f"{name}: {_change_message(change)}"
    for name, engine in engines.readings.items():
        said = engine.speculation_settings.get(key.key)
        if said is not None and said != word(value):
            return f"{name} started with {key.key} {said}; {_WHERE}"
    return None


def _length(engines: _Engines, value: int) -> _Finding:
    drafted, method = engines.drafted, engines.facts.method
    if drafted is None:
        return UNKNOWN, "too few drafted tokens to tell"
    seen = f"drafts have {drafted:.2f} tokens on average"
    if method in METHODS_OF_FREE_LENGTH:
        return TRUE, f"{seen}; method {method} proposes up to {value}"
    if engines.facts.pair.other_draft_lengths:
        return TRUE, f"{seen}; {_SCHEDULE_FIELD} sets the length, up to {value}"
    if drafted < value * _MOSTLY and abs(drafted - round(drafted)) <= _ROUNDED:
        return FALSE, f"each draft has {round(drafted)} tokens; {_WHERE}, or set spec.speculation.{_LENGTH} to this"
    return (TRUE, seen) if drafted >= value * _MOSTLY else (UNKNOWN, f"{seen}: {_SHORTER}")


def _schedule(engines: _Engines, value: Any) -> _Finding:
    tokens, drafted, method = engines.facts.pair.num_speculative_tokens, engines.drafted, engines.facts.method
    if method in METHODS_OF_FREE_LENGTH:
        return (
            UNKNOWN,
            f"draft lengths of method {method} vary anyway, so they do not show whether the schedule is in force",
        )
    lengths = {length for _, _, length in value}
    with_draft = engines.observed.drafted_steps_percent if engines.observed else None
    without = 100 - with_draft if 0 in lengths and with_draft is not None else 0
    if without:
        starved = f"{_STARVED}; " if engines.recent.acceptance_collapsed else ""
        return TRUE, f"{without} % of decoding steps had no draft; {starved}{_NOT_OFF}"
    if lengths == {tokens}:
        return TRUE, f"the schedule sets {tokens} tokens for every number of requests"
    if drafted is not None and abs(drafted - tokens) > _ROUNDED:
        return TRUE, f"drafts have {drafted:.2f} tokens on average, not always {tokens}"
    return UNKNOWN, f"all drafts had {tokens} tokens so far; the load may not have reached the other ranges"


_STARVED: Final = "acceptance fell to less than half of its earlier value"
_NOT_OFF: Final = (
    "0 tokens do not turn speculation off: a draft with layers still runs once per step and keeps its memory, and its"
    " acceptance may collapse when drafting resumes. Use 1 instead of 0, or remove spec.speculation"
)


def _by_startup_log(engines: _Engines, key: SpeculativeKey) -> _Finding:
    silent = [name for name, engine in engines.readings.items() if key.key not in engine.speculation_settings]
    if silent:
        return UNKNOWN, (
            f"no counter shows it, and {silent[0]} does not log its speculation settings: check for a custom logging"
            " configuration, or a VLLM_LOGGING_LEVEL above INFO in spec.engine.env"
        )
    return TRUE, "no counter shows it, but the engines logged it at startup"


# vllm/v1/core/sched/scheduler.py counts scheduled tokens; the GPU decides later how many of them are verified.
LOW_BY_DESIGN: Final = (
    "adaptiveVerification counts unverified tokens as not accepted; use the mean acceptance length instead"
)


def last_acceptance(
    before: AcceptanceStatus | None, figures: ObservedStatus | None, facts: Facts | None, now: datetime
) -> AcceptanceStatus | None:
    """Return the acceptance to show: the current one, or the last one with the same models, method and K."""
    with_ = None if facts is None else _measured_with(facts)
    if with_ is not None and figures is not None and figures.acceptance is not None:
        return AcceptanceStatus(
            text=figures.acceptance,
            percent=figures.acceptance_percent or 0,
            mean_length=figures.mean_acceptance_length,
            measured_with=with_,
        )
    if before is None or (facts is not None and before.measured_with != with_):
        return None
    if before.said_until is not None:
        return before
    return before.model_copy(update={"text": f"was {before.percent}%", "said_until": rfc3339(now)})


def with_last_acceptance(condition: ConditionUpdate, acceptance: AcceptanceStatus | None) -> ConditionUpdate:
    """Add the last acceptance to SpeculationActive if its status is Unknown."""
    is_unsure = condition.type == "SpeculationActive" and condition.status is UNKNOWN
    if not is_unsure or acceptance is None or acceptance.said_until is None:
        return condition
    known = f"; acceptance was {acceptance.percent}% until {acceptance.said_until}"
    # A kept condition already has this suffix.
    return replace(condition, message=f"{condition.message.removesuffix(known)}{known}")


def _measured_with(facts: Facts) -> str | None:
    if facts.method is Method.NONE:
        return None
    draft = facts.spec.speculation.draft if facts.spec.speculation else None
    models = [facts.spec.target.model, *([draft.model] if draft else [])]
    how = "" if facts.replay is None else "replayed, "
    adapting = ", adaptive verification" if facts.pair.adaptive_verification else ""
    lossy = ", fly" if facts.pair.checks_by_entropy else ""
    tokens = facts.pair.num_speculative_tokens
    return clip(f"{how}{facts.method}, K {tokens}{adapting}{lossy}, {', '.join(models)}", _LONGEST)


# Tokens without a draft after which a drafter counts as idle; before that, requests may just be short.
_ENOUGH_STEPS: Final = 64
_LEAST_DRAFTED_TOKENS: Final = 256
_USELESS: Final = (
    "no drafted token is accepted: the draft was not made for this target, or it lacks the prompt's KV cache, as can"
    " happen with --kv-transfer-config in spec.engine.extraArgs (vllm-project/vllm#54926)"
)
# For V1: vllm/v1/worker/gpu_model_runner.py, _input_fits_in_drafter.
_STOPPED: Final = (
    "The engines stopped drafting: no step of the last window had a draft. On model runner V1, one request beyond the"
    " draft's context length stops drafting for all requests. Otherwise, check the engine log and restart the engines"
)


def prove_speculation(
    facts: Facts, tensor: int, readings: Mapping[str, Reading], observed: ObservedStatus | None, recent: Recent
) -> tuple[ConditionUpdate, list[SpeculationFeature]]:
    """Return the condition SpeculationActive, from the figures in the status, and the features with their state."""
    drafting, engines = _drafts(facts, readings, observed, recent), answering_engines(readings)
    none_answers = None if engines else no_engine_condition("SpeculationActive", readings).message
    features = _speculation_features(_Engines(facts, tensor, engines, observed, recent, drafting), none_answers)
    missing = [each for each in features if each.in_force is FALSE]
    if drafting.status is FALSE or not missing:
        return drafting, features
    first = missing[0].feature
    messages = [f"{each.feature} {each.asked} is not in force: {each.message}" for each in missing]
    if drafting.status is TRUE:
        messages.append(drafting.message)
    return _ACTIVE(FALSE, REASONS.get(first, OTHER_SETTING), ". ".join(messages)), features


def _drafts(
    facts: Facts, readings: Mapping[str, Reading], observed: ObservedStatus | None, recent: Recent
) -> ConditionUpdate:
    if facts.method is Method.NONE:
        return _ACTIVE(FALSE, "Disabled", "Speculation is off: spec.speculation is not set, or its method is none")
    engines = answering_engines(readings)
    if not engines:
        return no_engine_condition("SpeculationActive", readings)
    without = [name for name, engine in engines.items() if engine.speculation is None]
    if without:
        message = (
            f"{without[0]} has no speculation counters, so it does not use spec.speculation.method {facts.method};"
            " check its log, spec.engine.extraArgs and spec.podTemplate for the cause"
        )
        if facts.replay is not None:
            message = "The replayed recording is of an engine without speculation"
        return _ACTIVE(FALSE, "NotDrafting", message)
    if observed is not None and observed.draft_tokens:
        # A step has no draft if a lookup finds no match, or if a schedule or a recording sets 0.
        may_rest = facts.method in METHODS_OF_FREE_LENGTH or 0 in facts.pair.other_draft_lengths
        if recent.stopped_drafting and not may_rest and facts.replay is None:
            return _ACTIVE(FALSE, "NotDrafting", _STOPPED)
        return _drafting(facts, observed)
    # First tokens have no draft, and some requests generate only one.
    steps = [
        engine.generation_tokens if engine.decode_steps is None else engine.decode_steps for engine in engines.values()
    ]
    return _nothing_drafted(facts, sum(steps))


def _drafting(facts: Facts, observed: ObservedStatus) -> ConditionUpdate:
    message = f"acceptance {observed.acceptance}, mean acceptance length {observed.mean_acceptance_length}"
    if facts.replay is not None:
        recorded = f"{message} with K={observed.num_speculative_tokens}, from the replayed recording"
        return _ACTIVE(TRUE, "Replayed", f"{recorded}; no model runs")
    message += f" with K={facts.pair.num_speculative_tokens}"
    # The counters exclude steps without a draft (vllm/v1/core/sched/scheduler.py).
    if facts.pair.other_draft_lengths:
        message += ", or as set by numSpeculativeTokensByBatchSize"
    if observed.accepted_tokens == 0 and (observed.draft_tokens or 0) >= _LEAST_DRAFTED_TOKENS:
        message += f"; {_USELESS}"
    if facts.pair.adaptive_verification:
        message += f"; {LOW_BY_DESIGN}"
    if facts.pair.checks_by_entropy:
        message += "; rejectionSampling fly also accepts tokens that the target would have rejected"
    return _ACTIVE(TRUE, "Drafting", message)


def _nothing_drafted(facts: Facts, tokens: int) -> ConditionUpdate:
    if tokens < _ENOUGH_STEPS:
        return _ACTIVE(UNKNOWN, "NoTraffic", "Engines are ready to draft; too little traffic to verify it")
    if facts.method in METHODS_OF_FREE_LENGTH:
        lookup = "part of an earlier answer" if facts.method is Method.SUFFIX else "n-gram of a prompt"
        return _ACTIVE(UNKNOWN, "NoMatches", f"Engines generate, but no {lookup} has repeated yet")
    message = f"Engines generated {tokens} tokens without any drafts of spec.speculation.method {facts.method}"
    ranges = facts.spec.speculation.num_speculative_tokens_by_batch_size if facts.spec.speculation else []
    if any(part.num_speculative_tokens == 0 for part in ranges):
        message += "; spec.speculation.numSpeculativeTokensByBatchSize sets 0 for some numbers of requests"
    else:
        message += "; check the engine log and spec.engine.extraArgs for the cause"
    return _ACTIVE(FALSE, "NotDrafting", message)
