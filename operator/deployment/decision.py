"""Compute the desired state of a SpecDecodeDeployment: parse, resolve, validate, plan, render."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.canaries import canaries_json
from specdecode_operator.deployment.children import plan_config_map, plan_data, render_children
from specdecode_operator.deployment.conditions import (
    FALSE,
    LOSSY_REJECTION_SAMPLING,
    NEWER_THAN_KNOWN,
    OPERATOR_IMAGE_UNKNOWN,
    TRUE,
    UNKNOWN,
    Blocked,
    ConditionUpdate,
)
from specdecode_operator.deployment.desired_state import (
    ClusterState,
    DesiredState,
    Gated,
    InCanary,
    Launch,
    NotLaunched,
    RolledBack,
)
from specdecode_operator.deployment.live_recorder import CANARIES_ENTRY, allows_token_ids, live_recorder_blocked
from specdecode_operator.deployment.models.model_facts import SiteFacts, facts_entry, known_checkpoints, read_entries
from specdecode_operator.deployment.models.model_jobs import (
    READER,
    RESOLVING,
    at_commits,
    downloaded_commits,
    jobs_that,
    pending_downloads,
    reading_jobs,
)
from specdecode_operator.deployment.models.model_locations import (
    KnownModels,
    ModelSource,
    model_source,
    undescribed_models,
)
from specdecode_operator.deployment.parsed_deployment import ParsedDeployment
from specdecode_operator.deployment.planning import (
    full_matrix,
    make_plan,
    passed_over,
    plan_status,
    planned_condition,
    without_devices,
)
from specdecode_operator.deployment.resource_claim import (
    API_MISSING,
    check_count,
    claim_templates,
    claimable_gpus,
    claims_devices,
)
from specdecode_operator.deployment.rollout.canary import (
    awaits_canary,
    canary_attempt,
    canary_settings,
    canary_workload,
    promoted_condition,
    rolled_back_condition,
    why_no_canary,
)
from specdecode_operator.deployment.rollout.engine_workload import pod_templates
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, stalled, without_engines, working
from specdecode_operator.deployment.rollout.rollback import attempt_of, put_back, render_last_good
from specdecode_operator.deployment.rollout.rollout_gate import (
    held_at_gate,
    held_condition,
    passed_condition,
)
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.startup_estimate import planned_startup
from specdecode_operator.deployment.validation import (
    check_without_models,
    is_still_allowed,
    refuse_group_name,
    refuse_host_paths,
    refuse_pod_template,
    valid_facts,
)
from specdecode_operator.deployment.warnings import (
    lossy_answers,
    plan_notes,
    plan_warnings,
    token_doubts,
    untested_version,
)
from specdecode_operator.enums import LiveTokenIds
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.calibration import Calibration
from specdecode_operator.sizing.plan import Plan

_ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "Spec is valid")
_PLANS_KEPT: Final = 32  # Plans cached for objects with equal specs; one takes some hundred kilobytes


@dataclass(frozen=True)
class _Question:
    spec: SpecDecodeDeploymentSpec = field(compare=False)  # spec_text is cheaper to compare and hash
    known: KnownModels = field(compare=False)  # Follows from models and site_facts
    spec_text: str
    previous: PlanStatus | None = field(compare=False)
    previous_text: str | None
    models: frozenset[tuple[str, str]]
    site_facts: frozenset[tuple[ModelSource, SiteFacts]]
    nodes: tuple[NodeFacts, ...]
    nodes_from: NodesFrom
    has_groups: bool
    calibration: Calibration
    operator_image: str | None
    live_token_ids: LiveTokenIds
    trained_draft: str | None


@dataclass(frozen=True)
class _Planned:
    facts: Facts
    plan: Plan
    plan_texts: Mapping[str, str]
    conditions: list[ConditionUpdate]  # Accepted and Planned, in this order
    plan_status: PlanStatus


def newly_read_models(parent: ParsedDeployment, entries: Mapping[str, str], pods: Sequence[Body]) -> dict[str, str]:
    """Return new ConfigMap entries: models that the object's pods have read and ``entries`` do not have."""
    if isinstance(parent.spec, InvalidSpecError):
        return {}
    read = read_entries(parent.spec, entries)
    unknown = {field: source for field, source in undescribed_models(parent.spec).items() if source not in read}
    return {source.key: facts_entry(source, found) for source, found in READER.answers(pods, unknown).items()}


def decide(parent: ParsedDeployment, cluster: ClusterState) -> DesiredState:
    """Return the desired state of an object: resolve its spec, plan, and render its children."""
    try:
        planned = _resolve(parent, cluster)
    except InvalidSpecError as error:
        accepted = ConditionUpdate("Accepted", FALSE, error.reason, str(error))
        condition = ConditionUpdate("Planned", FALSE, "NotAccepted", "Spec is not accepted")
        return DesiredState(NotLaunched(stalled(error.reason, str(error))), [accepted, condition])
    if isinstance(planned, DesiredState):
        return planned
    facts, jobs = planned.facts, list[Body]()
    readiness: Readiness | None = None
    commits = {**cluster.downloads, **downloaded_commits(cluster.model_pods, facts.spec)}
    if planned.conditions[1].status is FALSE:  # it does not fit; the message has the fixes
        readiness = stalled(planned.conditions[1].reason, planned.conditions[1].message)
    elif facts.replay is not None and facts.operator_image is None:
        readiness = readiness_of(OPERATOR_IMAGE_UNKNOWN)
    elif download := pending_downloads(parent.key, parent.uid, facts, commits, cluster.model_pods):
        readiness, jobs = download
    if readiness is None:
        desired = _launch(parent, planned, commits, cluster)
        templates = claim_templates(parent.key, parent.uid, desired.children)
        return replace(desired, children=[*templates, *desired.children]) if templates else desired
    shown = plan_config_map(parent.key, parent.uid, planned.plan_texts)
    return DesiredState(NotLaunched(readiness, planned.plan_status), planned.conditions, [shown, *jobs])


def _resolve(parent: ParsedDeployment, cluster: ClusterState) -> _Planned | DesiredState:
    """Return the plan, or the desired state while models or nodes are missing."""
    spec, previous = parent.spec, parent.status.plan
    if isinstance(spec, InvalidSpecError):
        raise spec
    refuse_host_paths(spec, cluster.host_paths)
    refuse_pod_template(spec, cluster.pod_template, parent.key.namespace)
    claims = claims_devices(spec)
    gpus = claimable_gpus(spec, cluster.devices) if claims and cluster.devices is not None else None
    known = known_checkpoints(spec, cluster.model_facts, cluster.site_facts)
    if unknown := {field: source for field, source in undescribed_models(spec).items() if source not in known}:
        return _read_first(parent, spec, unknown, cluster)
    question = _Question(
        spec=spec,
        known=known,
        spec_text=spec.model_dump_json(),
        previous=previous,
        previous_text=None if previous is None else previous.model_dump_json(),
        models=frozenset(cluster.model_facts.items()),
        site_facts=frozenset(cluster.site_facts.items()),
        nodes=cluster.nodes if gpus is None else gpus.nodes,
        nodes_from=cluster.nodes_from,
        has_groups=cluster.has_leader_worker_sets,
        calibration=cluster.calibration,
        operator_image=cluster.operator_image,
        live_token_ids=cluster.live_token_ids,
        trained_draft=parent.trained_draft,
    )
    planned = _plan(question)
    if claims and not cluster.has_resource_claims:
        return _waiting(parent, API_MISSING)
    if isinstance(planned, _Planned):
        refuse_group_name(parent.key, planned.facts.takes_pods_of(planned.plan))
        return planned
    return _waiting(parent, without_devices(spec, planned, cluster.devices))


def _waiting(parent: ParsedDeployment, blocked: Blocked) -> DesiredState:
    """Return the desired state while the cluster lacks something that the plan needs."""
    condition = ConditionUpdate("Planned", UNKNOWN, blocked.reason, blocked.message)
    readiness = working(blocked.reason, blocked.message)
    if not isinstance(parent.spec, InvalidSpecError):
        readiness = without_engines(parent.spec) or readiness
    return DesiredState(NotLaunched(readiness, parent.status.plan), [_ACCEPTED, condition])


def internal_error(parent: ParsedDeployment, error: Exception) -> DesiredState:
    """Return the desired state after an internal error: no change to the object's children."""
    message = f"Internal error in the operator ({type(error).__name__}); see its log, and report the error"
    return DesiredState(NotLaunched(working("InternalError", message), parent.status.plan), [])


def _read_first(
    parent: ParsedDeployment, spec: SpecDecodeDeploymentSpec, unknown: Mapping[str, ModelSource], cluster: ClusterState
) -> DesiredState:
    check_without_models(spec, unknown)
    accepted = ConditionUpdate(
        "Accepted", UNKNOWN, RESOLVING, "Waiting for facts about the models; validation completes when they are known"
    )
    if cluster.operator_image is None:
        planned = ConditionUpdate("Planned", UNKNOWN, RESOLVING, OPERATOR_IMAGE_UNKNOWN.message)
        readiness = without_engines(spec) or readiness_of(OPERATOR_IMAGE_UNKNOWN)
        return DesiredState(NotLaunched(readiness, parent.status.plan), [accepted, planned])
    pods = cluster.model_pods
    jobs = reading_jobs(parent.key, parent.uid, spec, cluster.operator_image, unknown)
    models = " and ".join(map(str, dict.fromkeys(unknown.values())))
    reading = f"{jobs_that(jobs, 'read')} config.json and safetensors headers of {models}"
    reading = f"{reading}; {READER.progress(pods, unknown)}"
    blocked = READER.blocked(pods, unknown)
    if blocked is None:
        readiness = working(RESOLVING, reading)
        planned = ConditionUpdate("Planned", UNKNOWN, RESOLVING, reading)
    else:
        readiness = readiness_of(blocked)
        status, reason = (FALSE, blocked.reason) if blocked.permanent else (UNKNOWN, RESOLVING)
        planned = ConditionUpdate("Planned", status, reason, blocked.message)
    readiness = without_engines(spec) or readiness
    return DesiredState(NotLaunched(readiness, parent.status.plan), [accepted, planned], jobs)


@lru_cache(maxsize=_PLANS_KEPT)
def _plan(question: _Question) -> _Planned | Blocked:
    """Return the plan of a spec, or why no node is usable. Cached, because hundreds of objects may have one spec."""
    nodes, known, site_facts = question.nodes, question.known, dict(question.site_facts)
    facts = valid_facts(question.spec, known, question.calibration)
    facts = replace(
        facts,
        operator_image=question.operator_image,
        live_token_ids=question.live_token_ids,
        trained_draft=question.trained_draft,
    )
    plan = make_plan(facts, nodes, question.previous, groups=question.has_groups, nodes_from=question.nodes_from)
    if isinstance(plan, Blocked):
        return plan
    check_count(facts.spec, plan.chosen)
    matrix = full_matrix(facts, nodes, plan)
    facts = facts.at(*plan.chosen.served)
    texts = plan_data(plan, matrix, planned_startup(facts, plan.chosen))
    if live_recorder_blocked(facts.spec) is None and (canaries := canaries_json(facts)) is not None:
        texts[CANARIES_ENTRY] = canaries
    condition = planned_condition(facts, plan, passed_over(facts, nodes))
    remarks = [*plan_warnings(facts, known, plan.chosen.tensor), *map(str, token_doubts(facts.spec))]
    for _, model, geometry in facts.models():
        if given := site_facts.get(model_source(facts.spec, model)):
            how = geometry.knowledge.value
            remarks.append(f"facts of {model.model} ({how}) come from the operator's facts file {given.file}")
    message = "; ".join([condition.message, *remarks, *plan_notes(facts)])
    conditions = [_accepted(facts), replace(condition, message=message)]
    return _Planned(facts, plan, texts, conditions, plan_status(facts, plan))


def _accepted(facts: Facts) -> ConditionUpdate:
    """Return Accepted=True with the warnings about the spec."""
    untested, lossy = untested_version(facts.spec, facts.profile), lossy_answers(facts)
    caveats = {
        NEWER_THAN_KNOWN: str(untested) if untested else None,
        LOSSY_REJECTION_SAMPLING: lossy,
    }
    found = {reason: message for reason, message in caveats.items() if message}
    if not found:
        return _ACCEPTED
    message = f"{_ACCEPTED.message}; {'; '.join(found.values())}"
    return replace(_ACCEPTED, reason=next(iter(found)), message=message)


def _launch(
    parent: ParsedDeployment, planned: _Planned, commits: Mapping[str, str], cluster: ClusterState
) -> DesiredState:
    """Launch the plan, or keep the last good workload if these engines failed before or are not yet judged."""
    key, uid, plan, last_good, gate = parent.key, parent.uid, planned.plan, cluster.last_good, cluster.gate
    if last_good is not None:
        allowed = (cluster.host_paths, cluster.pod_template, key.namespace)
        pods = pod_templates(last_good.workload)
        is_allowed = all(is_still_allowed(each, *allowed) for each in pods)
        if not is_allowed or not allows_token_ids(pods, cluster.live_token_ids):
            last_good = None
    facts, kept_commits = at_commits(key, uid, planned.facts, commits, parent.written_spec)
    launch, spec = Launch(facts, plan, planned.plan_status), facts.spec
    *others, workload = [*kept_commits, *render_children(key, uid, facts, plan, planned.plan_texts)]
    passed_gate = passed_condition(key, spec, workload, last_good, gate)
    passed = [*passed_gate, *promoted_condition(spec, workload, last_good)]
    if last_good is None:
        return DesiredState(launch, [*planned.conditions, *passed], [*others, workload])
    kept, failure = render_last_good(key, uid, last_good), last_good.failure
    earlier = put_back(key, uid, workload, last_good.workload)
    # The gate and the canary do not apply to a policy's choice: a capture with arms measured it, and the golden capture
    # has other settings.
    in_canary = not parent.by_policy and awaits_canary(spec, workload, last_good)
    attempt = canary_attempt(spec, plan.chosen) if in_canary else ""
    if failure is not None and failure.attempt in {attempt_of(spec, plan.chosen), attempt}:
        rolled_back = RolledBack(facts, planned.plan_status, failure)
        judged = [rolled_back_condition(failure)] if failure.attempt == attempt else []
        return DesiredState(rolled_back, [*planned.conditions, *judged], [kept, *others, earlier])
    held = None if parent.by_policy else held_at_gate(key, spec, workload, last_good, gate)
    if held:
        gated = Gated(facts, planned.plan_status, launch, held)
        return DesiredState(gated, [*planned.conditions, held_condition(held)], [kept, *others, earlier])
    if in_canary:
        waits = why_no_canary(spec, workload, last_good.workload)
        outcome = InCanary(facts, planned.plan_status, launch, attempt, workload, waits)
        replicas = canary_settings(spec).replicas
        canary = [] if waits else [canary_workload(key, uid, workload, replicas)]
        return DesiredState(outcome, [*planned.conditions, *passed_gate], [kept, *others, *canary, earlier])
    return DesiredState(launch, [*planned.conditions, *passed], [kept, *others, workload])
