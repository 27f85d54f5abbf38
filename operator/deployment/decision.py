"""Compute the desired state of a SpecDecodeDeployment: parse, resolve, validate, plan, render.

`decide` is a pure function of the object and a `ClusterState`; it returns a `DesiredState`. The reconciler builds
the `ClusterState` and applies the `DesiredState`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from specdecode_operator.api.base import Body
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.deployment_status import PlanStatus
from specdecode_operator.cluster.nodes import NodeFacts, NodesFrom
from specdecode_operator.deployment.children import plan_config_map, plan_data, render_children
from specdecode_operator.deployment.conditions import (
    FALSE,
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
    Launch,
    NotLaunched,
    RolledBack,
)
from specdecode_operator.deployment.models.model_facts import SiteFacts, facts_entry, known_checkpoints, read_entries
from specdecode_operator.deployment.models.model_jobs import (
    READER,
    RESOLVING,
    at_commits,
    downloaded_commits,
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
from specdecode_operator.deployment.planning import full_matrix, make_plan, passed_over, plan_status, planned_condition
from specdecode_operator.deployment.rollout.engine_workload import pod_templates
from specdecode_operator.deployment.rollout.readiness import Readiness, readiness_of, stalled, without_engines, working
from specdecode_operator.deployment.rollout.rollback import LastGood, attempt_of, put_back, render_last_good
from specdecode_operator.deployment.rollout.rollout_gate import (
    GateState,
    held_at_gate,
    held_condition,
    passed_condition,
)
from specdecode_operator.deployment.spec_facts import Facts
from specdecode_operator.deployment.validation import (
    check_without_models,
    is_still_allowed,
    refuse_group_name,
    refuse_host_paths,
    refuse_pod_template,
    valid_facts,
)
from specdecode_operator.deployment.warnings import lossy_answers, plan_notes, plan_warnings, untested_version
from specdecode_operator.problems import InvalidSpecError
from specdecode_operator.sizing.calibration import Calibration
from specdecode_operator.sizing.plan import Plan

_ACCEPTED = ConditionUpdate("Accepted", TRUE, "Valid", "the spec holds together")
_PLANS_KEPT: Final = 32  # Specs whose plans are kept for other objects of the same spec: each is some hundred kilobytes


@dataclass(frozen=True)
class _Question:
    spec: SpecDecodeDeploymentSpec = field(compare=False)
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

    @classmethod
    def of(cls, spec: SpecDecodeDeploymentSpec, parent: ParsedDeployment, cluster: ClusterState) -> "_Question":
        """Return the question of one object; comparing and hashing its texts is cheaper than its models."""
        previous = parent.status.plan
        return cls(
            spec=spec,
            spec_text=spec.model_dump_json(),
            previous=previous,
            previous_text=None if previous is None else previous.model_dump_json(),
            models=frozenset(cluster.model_facts.items()),
            site_facts=frozenset(cluster.site_facts.items()),
            nodes=cluster.nodes,
            nodes_from=cluster.nodes_from,
            has_groups=cluster.has_leader_worker_sets,
            calibration=cluster.calibration,
            operator_image=cluster.operator_image,
        )


@dataclass(frozen=True)
class _Waiting:
    facts: Facts
    blocked: Blocked


@dataclass(frozen=True)
class _Planned:
    facts: Facts
    plan: Plan
    plan_texts: Mapping[str, str]
    condition: ConditionUpdate
    plan_status: PlanStatus

    @property
    def conditions(self) -> list[ConditionUpdate]:
        told = [_ACCEPTED, self.condition]
        if untested := untested_version(self.facts.spec, self.facts.profile):
            told.append(ConditionUpdate("EngineUntested", TRUE, "NewerThanKnown", str(untested)))
        if lossy := lossy_answers(self.facts):
            told.append(ConditionUpdate("OutputsDiffer", TRUE, "LossyRejectionSampling", lossy))
        return told

    @property
    def hindered(self) -> Readiness | None:
        if self.condition.status is FALSE:  # it fits nowhere; the plan tells what would
            return stalled(self.condition.reason, self.condition.message)
        if self.facts.replay is not None and self.facts.operator_image is None:
            return readiness_of(OPERATOR_IMAGE_UNKNOWN)
        return None

    def not_launched(self, parent: ParsedDeployment, readiness: Readiness, *jobs: Body) -> DesiredState:
        outcome = NotLaunched(readiness, self.plan_status)
        shown = plan_config_map(parent.key, parent.uid, self.plan_texts)
        return DesiredState(outcome, self.conditions, [shown, *jobs])


def newly_read_models(parent: ParsedDeployment, entries: Mapping[str, str], pods: Sequence[Body]) -> dict[str, str]:
    """Return what the object's pods have read of its models and ``entries`` do not hold yet, as entries."""
    if isinstance(parent.spec, InvalidSpecError):
        return {}
    unknown = _unknown_models(parent.spec, read_entries(parent.spec, entries))
    return {source.key: facts_entry(source, found) for source, found in READER.answers(pods, unknown).items()}


def decide(parent: ParsedDeployment, cluster: ClusterState) -> DesiredState:
    """Return what should exist for an object: spec, then facts, then plan, then objects."""
    try:
        spec = parent.spec
        if isinstance(spec, InvalidSpecError):
            raise spec
        refuse_host_paths(spec, cluster.host_paths)
        refuse_pod_template(spec, cluster.pod_template, parent.key.namespace)
        known = known_checkpoints(spec, cluster.model_facts, cluster.site_facts)
        if unknown := _unknown_models(spec, known):
            return _read_first(parent, spec, unknown, cluster)
        planned = _plan(_Question.of(spec, parent, cluster))
        if isinstance(planned, _Waiting):
            return _wait_for_nodes(parent, planned.facts, planned.blocked)
        refuse_group_name(parent.key, planned.facts.takes_pods_of(planned.plan))
    except InvalidSpecError as error:
        return _not_accepted(error)
    if hindered := planned.hindered:
        return planned.not_launched(parent, hindered)
    commits = {**cluster.downloads, **downloaded_commits(cluster.model_pods, planned.facts.spec)}
    if download := pending_downloads(parent.key, parent.uid, planned.facts, commits, cluster.model_pods):
        readiness, jobs = download
        return planned.not_launched(parent, readiness, *jobs)
    return _launch(parent, planned, commits, _allowed_last_good(cluster, parent.key.namespace), cluster.gate)


def internal_error(parent: ParsedDeployment, error: Exception) -> DesiredState:
    """Return the desired state of an object that the operator itself failed on: all stays as it is."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return DesiredState(NotLaunched(working("InternalError", message), parent.status.plan), [])


def _unknown_models(spec: SpecDecodeDeploymentSpec, known: KnownModels) -> dict[str, ModelSource]:
    sources = undescribed_models(spec)
    return {field: source for field, source in sources.items() if source not in known}


def _read_first(
    parent: ParsedDeployment, spec: SpecDecodeDeploymentSpec, unknown: Mapping[str, ModelSource], cluster: ClusterState
) -> DesiredState:
    check_without_models(spec, unknown)
    accepted = ConditionUpdate("Accepted", UNKNOWN, RESOLVING, "the rest is checked once the models are known")
    if cluster.operator_image is None:
        planned = ConditionUpdate("Planned", UNKNOWN, RESOLVING, OPERATOR_IMAGE_UNKNOWN.message)
        readiness = without_engines(spec) or readiness_of(OPERATOR_IMAGE_UNKNOWN)
        return DesiredState(NotLaunched(readiness, parent.status.plan), [accepted, planned])
    pods = cluster.model_pods
    jobs = reading_jobs(parent.key, parent.uid, spec, cluster.operator_image, unknown)
    models = " and ".join(map(str, dict.fromkeys(unknown.values())))
    names = " and ".join(job["metadata"]["name"] for job in jobs)
    reading = f"Job {names} reads config.json and safetensors headers of {models}; {READER.progress(pods, unknown)}"
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


def _not_accepted(error: InvalidSpecError) -> DesiredState:
    accepted = ConditionUpdate("Accepted", FALSE, error.reason, str(error))
    planned = ConditionUpdate("Planned", FALSE, "NotAccepted", "the spec is not accepted")
    return DesiredState(NotLaunched(stalled(error.reason, str(error))), [accepted, planned])


def _wait_for_nodes(parent: ParsedDeployment, facts: Facts, waiting: Blocked) -> DesiredState:
    planned = ConditionUpdate("Planned", UNKNOWN, waiting.reason, waiting.message)
    readiness = without_engines(facts.spec) or working(waiting.reason, waiting.message)
    return DesiredState(NotLaunched(readiness, parent.status.plan), [_ACCEPTED, planned])


@lru_cache(maxsize=_PLANS_KEPT)
def _plan(question: _Question) -> _Planned | _Waiting:
    spec, nodes = question.spec, question.nodes
    site_facts = dict(question.site_facts)
    known = known_checkpoints(spec, dict(question.models), site_facts)
    facts = replace(valid_facts(spec, known, question.calibration), operator_image=question.operator_image)
    plan = make_plan(facts, nodes, question.previous, groups=question.has_groups, nodes_from=question.nodes_from)
    return _Waiting(facts, plan) if isinstance(plan, Blocked) else _planned(facts, plan, nodes, known, site_facts)


def _planned(
    facts: Facts,
    plan: Plan,
    nodes: tuple[NodeFacts, ...],
    known: KnownModels,
    site_facts: Mapping[ModelSource, SiteFacts],
) -> _Planned:
    texts = plan_data(plan, full_matrix(facts, nodes, plan))
    facts = facts.at(*plan.chosen.served)
    condition = planned_condition(facts, plan, passed_over(facts, nodes))
    remarks = [*plan_warnings(facts, known, plan.chosen.tensor), *_site_notes(facts, site_facts), *plan_notes(facts)]
    condition = replace(condition, message="; ".join([condition.message, *remarks]))
    return _Planned(facts, plan, texts, condition, plan_status(facts, plan))


def _site_notes(facts: Facts, site_facts: Mapping[ModelSource, SiteFacts]) -> Iterator[str]:
    draft = facts.spec.speculation.draft if facts.spec.speculation else None
    for model, geometry in ((facts.spec.target, facts.pair.target), (draft, facts.pair.draft)):
        if model is None or geometry is None:
            continue
        given = site_facts.get(model_source(facts.spec, model))
        if given is not None:
            yield f"{model.model} is known ({geometry.knowledge.value}) from the operator's facts file {given.file}"


def _allowed_last_good(cluster: ClusterState, namespace: str) -> LastGood | None:
    last_good = cluster.last_good
    if last_good is None:
        return None
    templates = pod_templates(last_good.workload)
    allowed = all(is_still_allowed(each, cluster.host_paths, cluster.pod_template, namespace) for each in templates)
    return last_good if allowed else None


def _launch(
    parent: ParsedDeployment, planned: _Planned, commits: Mapping[str, str], last_good: LastGood | None, gate: GateState
) -> DesiredState:
    key, uid, plan = parent.key, parent.uid, planned.plan
    facts, kept_commits = at_commits(key, uid, planned.facts, commits, parent.written_spec)
    launch = Launch(facts, plan, planned.plan_status)
    *others, workload = [*kept_commits, *render_children(key, uid, facts, plan, planned.plan_texts)]
    passed = passed_condition(key, facts.spec, workload, last_good, gate)
    if last_good is None:
        return DesiredState(launch, [*planned.conditions, *passed], [*others, workload])
    kept, failure = render_last_good(key, uid, last_good), last_good.failure
    earlier = put_back(key, uid, workload, last_good.workload)
    if failure is not None and failure.attempt == attempt_of(facts.spec, plan):
        rolled_back = RolledBack(facts, planned.plan_status, failure)
        return DesiredState(rolled_back, planned.conditions, [kept, *others, earlier])
    # What a policy chose, a capture with arms has measured: a golden one of other speculation has no say in it.
    held = None if parent.by_policy else held_at_gate(key, facts.spec, workload, last_good, gate)
    if held:
        gated = Gated(facts, planned.plan_status, launch, held)
        return DesiredState(gated, [*planned.conditions, held_condition(held)], [kept, *others, earlier])
    return DesiredState(launch, [*planned.conditions, *passed], [kept, *others, workload])
