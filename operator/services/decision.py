"""Decides, from all that is known of one object, what should exist and what its status says.

No I/O: the reconciler brings what it saw and carries out what is decided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.base import Body
from specdecode_operator.api.capture_schedule import CaptureSchedule, ScheduleStatus
from specdecode_operator.api.deployment import SpecDecodeDeploymentSpec
from specdecode_operator.api.key import Key
from specdecode_operator.api.problems import InvalidSpecError
from specdecode_operator.api.status import ObservedStatus, PlanStatus, SpecDecodeDeploymentStatus
from specdecode_operator.cluster.engine_probe import Reading
from specdecode_operator.cluster.fleet import NodeFacts
from specdecode_operator.cluster.resources import LEADER_WORKER_SET
from specdecode_operator.labels import selector_labels
from specdecode_operator.services import proof
from specdecode_operator.services.capture_schedules import schedule_problems
from specdecode_operator.services.children import render_children, render_plan, wanted_replicas
from specdecode_operator.services.engine_pod import engine_timings
from specdecode_operator.services.facts import Facts, check_without_models, gather_facts
from specdecode_operator.services.findings import FALSE, TRUE, UNKNOWN, Finding, kept, stamp
from specdecode_operator.services.group_history import UNSEEN, GroupHistory
from specdecode_operator.services.group_rollout import read_group_rollout
from specdecode_operator.services.model_download import commits_read, download_first, downloaded, wanted_downloads
from specdecode_operator.services.model_facts import (
    KnownModels,
    ModelSource,
    checkpoint_doubts,
    entry,
    known_models,
    path_problems,
    sources_without_description,
)
from specdecode_operator.services.model_job import reading_jobs, reading_trouble, what_was_read
from specdecode_operator.services.model_storage import refuse_host_path
from specdecode_operator.services.pairing import pairing_doubts
from specdecode_operator.services.plan_status import plan_status, planned_finding
from specdecode_operator.services.planning import WaitingForNodes, full_matrix, make_plan, passed_over
from specdecode_operator.services.readiness import (
    ROLLED_BACK,
    Summary,
    available_finding,
    earlier_engines_finding,
    lent,
    naming_sharers,
    rolled_back,
    stalled,
    summarize,
    without_engines,
    working,
)
from specdecode_operator.services.residual import BudgetResidual, budget_residual
from specdecode_operator.services.rollback import Failure
from specdecode_operator.services.rollout import Rollout, beside, read_rollout
from specdecode_operator.services.spec_problems import spec_problems
from specdecode_operator.services.starters import STARTERS, refuse_group_name
from specdecode_operator.sizing.calibration import UNCALIBRATED, Calibration
from specdecode_operator.sizing.plan import Plan

_MISSES_BELIEVED = 3
"""Times in a row that no engine answers before that is news."""


@dataclass(frozen=True)
class Parent:
    """One SpecDecodeDeployment as the API server has it."""

    key: Key
    uid: str
    generation: int
    spec: Body
    status: SpecDecodeDeploymentStatus
    lent_to: str | None = None
    """The capture that has its GPUs."""


@dataclass(frozen=True)
class Launch:
    """A spec whose plan is in force, and what the status says of the plan."""

    facts: Facts
    plan: Plan
    told: PlanStatus


@dataclass(frozen=True)
class RolledBack:
    """A spec whose engines never served: those that served last are put back."""

    facts: Facts
    told: PlanStatus
    failure: Failure


@dataclass(frozen=True)
class Obstacle:
    """A spec that is not launched, and why. Engines of an earlier spec stay meanwhile."""

    summary: Summary
    told: PlanStatus | None = None


@dataclass(frozen=True)
class Intent:
    """What a spec comes to in this cluster."""

    course: Launch | RolledBack | Obstacle
    findings: list[Finding]
    children: list[Body] = field(default_factory=list)

    @property
    def starter(self) -> Body | None:
        """What is to start the engines."""
        return next((child for child in self.children if child["kind"] in STARTERS), None)


@dataclass(frozen=True)
class Observation:
    """What was seen of the engines after the children were applied."""

    starter: Body | None = None
    pods: list[Body] = field(default_factory=list)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    rested: bool = True
    """Whether the figures in the status may be written again already."""

    silent_rounds: int = 0
    """How many times in a row no engine answered."""

    sharers: tuple[str, ...] = ()
    """Other objects of the namespace whose models are on a claim of this one."""

    groups: GroupHistory = UNSEEN
    """What was seen of engines on several nodes before."""

    predecessor: Body | None = None
    """What started engines before, while it is there beside the starter, or in its place."""


def read_parent(body: Mapping[str, Any]) -> Parent:
    """Take an object apart; a status that cannot be read counts as none."""
    metadata = body["metadata"]
    try:
        # Fields of a newer operator are passed over: an upgrade that is rolled back loses nothing.
        status = SpecDecodeDeploymentStatus.model_validate(body.get("status") or {}, extra="ignore")
    except ValidationError:
        status = SpecDecodeDeploymentStatus()
    return Parent(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        spec=body.get("spec") or {},
        status=status,
    )


def lend(parent: Parent, capture: str | None) -> Parent:
    """Return the object as it holds while a capture has its GPUs: as if it were suspended."""
    if capture is None or parent.spec.get("suspend") or parent.spec.get("replicas") == 0:
        return parent
    return replace(parent, spec={**parent.spec, "suspend": True}, lent_to=capture)


def learn(parent: Parent, entries: Mapping[str, str], pods: Sequence[Body]) -> dict[str, str]:
    """Return what the object's pods have found out of its models and the entries do not hold yet, as entries."""
    try:
        spec = _parse(parent.spec)
    except InvalidSpecError:
        return {}
    lacking = _lacking(spec, known_models(spec, entries))
    return {source.key: entry(source, found) for source, found in what_was_read(pods, lacking).items()}


def intend(  # noqa: PLR0913  all that a decision depends on
    parent: Parent,
    nodes: tuple[NodeFacts, ...],
    entries: Mapping[str, str] = MappingProxyType({}),
    pods: Sequence[Body] = (),
    calibration: Calibration = UNCALIBRATED,
    *,
    downloads: Mapping[str, str] = MappingProxyType({}),
    host_paths: tuple[str, ...] = (),
    groups: bool = False,
) -> Intent:
    """Decide what should exist for a spec.

    ``entries`` are facts of models that were read in its namespace, ``pods``
    its own, some of which may be reading a model or downloading one;
    ``calibration`` is what measurements say of the estimates, ``downloads``
    what is in its cache, ``host_paths`` what may be mounted of nodes;
    ``groups`` says whether the cluster has LeaderWorkerSets.
    """
    previous = parent.status.plan
    try:
        spec = _parse(parent.spec)
        refuse_host_path(spec, host_paths)
        known = known_models(spec, entries)
        if lacking := _lacking(spec, known):
            return _read_first(parent, spec, lacking, pods)
        facts = gather_facts(spec, known, calibration)
        plan = make_plan(facts, nodes, previous, groups=groups)
        if isinstance(plan, Plan):
            refuse_group_name(parent.key, plan.chosen.nodes)
    except InvalidSpecError as error:
        summary = stalled(error.reason, str(error))
        accepted = Finding("Accepted", FALSE, error.reason, str(error))
        return Intent(
            Obstacle(summary), [accepted, Finding("Planned", FALSE, "NotAccepted", "the spec is not accepted")]
        )
    accepted = Finding("Accepted", TRUE, "Valid", "the spec holds together")
    if isinstance(plan, WaitingForNodes):
        waiting = Finding("Planned", UNKNOWN, plan.reason, plan.message)
        summary = without_engines(facts.spec) or working(waiting.reason, waiting.message)
        # The last plan is shown while the nodes that it was made for are away.
        return Intent(Obstacle(summary, previous), [accepted, waiting])
    matrix = full_matrix(facts, nodes, plan)
    facts = facts.settled(plan.chosen.target_precision, plan.chosen.draft_precision)
    planned = planned_finding(facts, plan, passed_over(facts, nodes))
    doubts = checkpoint_doubts(facts.spec, facts.pair, known)
    doubts += pairing_doubts(facts.spec, facts.profile, known, plan.chosen.tensor)
    planned = replace(planned, message="; ".join([planned.message, *doubts]))
    told = plan_status(facts, plan)
    if planned.status is FALSE:
        summary = stalled(planned.reason, planned.message)
        children = [render_plan(parent.key, parent.uid, plan, matrix)]
        return Intent(Obstacle(summary, told), [accepted, planned], children)
    commits = {**downloads, **commits_read(pods, wanted_downloads(facts.spec))}
    if on_the_way := download_first(parent.key, parent.uid, facts, commits, pods):
        summary, jobs = on_the_way
        children = [render_plan(parent.key, parent.uid, plan, matrix), *jobs]
        return Intent(Obstacle(summary, told), [accepted, planned], children)
    facts, kept_commits = downloaded(parent.key, parent.uid, facts, commits)
    children = [*kept_commits, *render_children(parent.key, parent.uid, facts, plan, matrix)]
    return Intent(Launch(facts, plan, told), [accepted, planned], children)


def _lacking(spec: SpecDecodeDeploymentSpec, known: KnownModels) -> dict[str, ModelSource]:
    """Models that nobody describes and that were not read yet, by the field that names them."""
    sources = sources_without_description(spec)
    return {field: source for field, source in sources.items() if source not in known}


def _read_first(
    parent: Parent, spec: SpecDecodeDeploymentSpec, lacking: Mapping[str, ModelSource], pods: Sequence[Body]
) -> Intent:
    """Have models read that nobody describes; the plan comes after that."""
    if problems := path_problems(lacking):
        raise InvalidSpecError(problems)
    jobs = reading_jobs(parent.key, parent.uid, spec, check_without_models(spec), lacking)
    models = " and ".join(map(str, dict.fromkeys(lacking.values())))
    names = " and ".join(job["metadata"]["name"] for job in jobs)
    reading = f"Job {names} reads config.json and safetensors headers of {models}"
    accepted = Finding("Accepted", UNKNOWN, "ResolvingModel", "the rest is checked once the models are known")
    trouble = reading_trouble(pods, lacking)
    if trouble is None:
        summary, planned = working("ResolvingModel", reading), Finding("Planned", UNKNOWN, "ResolvingModel", reading)
    elif trouble.permanent:
        summary = stalled(trouble.reason, trouble.message)
        planned = Finding("Planned", FALSE, trouble.reason, trouble.message)
    else:
        summary = working(trouble.reason, trouble.message)
        planned = Finding("Planned", UNKNOWN, "ResolvingModel", trouble.message)
    summary = without_engines(spec) or summary
    return Intent(Obstacle(summary, parent.status.plan), [accepted, planned], jobs)


def observed_residual(intent: Intent, observation: Observation) -> BudgetResidual | None:
    """Return how far the engines are from the plan in force; None while there is nothing to compare."""
    course = intent.course
    return budget_residual(course.facts, course.plan, observation.readings) if isinstance(course, Launch) else None


def blocked(intent: Intent, summary: Summary) -> Intent:
    """Return the same intent with something in its way that only the cluster showed."""
    return Intent(Obstacle(summary, intent.course.told), intent.findings)


def broken(parent: Parent, error: Exception) -> Intent:
    """Return the intent for an object that the operator itself stumbles over."""
    message = f"the operator failed on this object ({type(error).__name__}); its log tells more, please report it"
    return Intent(Obstacle(working("InternalError", message), parent.status.plan), [])


def schedules_of(parent: Parent) -> list[CaptureSchedule] | None:
    """Return the schedules of captures; None where the spec does not hold together."""
    try:
        schedules = _parse(parent.spec).captures
    except InvalidSpecError:
        return None
    return None if schedule_problems(schedules) else schedules


def compose_status(
    parent: Parent,
    intent: Intent,
    observation: Observation,
    now: datetime,
    schedules: Sequence[ScheduleStatus] | None = None,
) -> SpecDecodeDeploymentStatus:
    """Say in the status what is intended and what was seen; schedules stay as they were where none are given."""
    course, observed = intent.course, None
    if isinstance(course, Obstacle):
        summary = course.summary
        findings = [
            earlier_engines_finding(observation.starter),
            *(
                Finding(type_, UNKNOWN, "NotLaunched", "nothing is launched for this spec")
                for type_ in ("SpeculationActive", "BudgetAccurate")
            ),
        ]
    elif isinstance(course, RolledBack):
        summary, findings = _earlier(course, observation)
    else:
        observed, residual = parent.status.observed, observed_residual(intent, observation)
        if not 0 < observation.silent_rounds < _MISSES_BELIEVED:
            seen = proof.observe(course.facts, residual, observation.readings)
            observed = proof.settle(seen, observed, rested=observation.rested)
        summary, findings = _proof(parent, course, observation, observed, residual)
    summary = naming_sharers(summary, observation.sharers)
    if parent.lent_to is not None and summary.status is TRUE:
        summary = lent(parent.lent_to)
    counts = [(each or {}).get("status", {}) for each in (observation.starter, observation.predecessor)]
    return SpecDecodeDeploymentStatus(
        observed_generation=parent.generation,
        conditions=stamp(
            [*summary.findings(), *intent.findings, *findings], parent.status.conditions, parent.generation, now
        ),
        plan=course.told,
        observed=observed,
        captures=list(parent.status.captures if schedules is None else schedules),
        replicas=sum(each.get("replicas", 0) for each in counts),
        ready_replicas=sum(each.get("readyReplicas", 0) for each in counts),
        selector=",".join(f"{name}={value}" for name, value in sorted(selector_labels(parent.key.name).items())),
    )


def rollout_of(course: Launch | RolledBack, observation: Observation) -> Rollout:
    """Return how far the engines of a course are."""
    starter, wanted = observation.starter, wanted_replicas(course.facts)
    if starter is None or starter.get("kind") != LEADER_WORKER_SET.kind:
        return beside(read_rollout(starter, observation.pods, wanted), observation.predecessor)
    deadline_s = engine_timings(course.facts, course.plan).progress_deadline_s if isinstance(course, Launch) else None
    rollout = read_group_rollout(starter, observation.pods, wanted, observation.groups, deadline_s)
    return beside(rollout, observation.predecessor)


def _earlier(course: RolledBack, observation: Observation) -> tuple[Summary, list[Finding]]:
    """What there is to say of engines that were put back."""
    rollout = rollout_of(course, observation)
    message = "the engines are those of an earlier spec"
    summary = without_engines(course.facts.spec) or rolled_back(rollout, str(course.failure))
    return summary, [
        available_finding(rollout),
        *(Finding(type_, UNKNOWN, ROLLED_BACK, message) for type_ in ("SpeculationActive", "BudgetAccurate")),
    ]


def _proof(
    parent: Parent,
    launch: Launch,
    observation: Observation,
    observed: ObservedStatus | None,
    residual: BudgetResidual | None,
) -> tuple[Summary, list[Finding]]:
    """What the engines show of a plan in force."""
    spec = launch.facts.spec
    rollout = rollout_of(launch, observation)
    speculation = proof.speculation_finding(launch.facts, observation.readings, observed)
    budget = proof.budget_finding(launch.plan, residual, observation.readings)
    before = {condition.type: condition for condition in parent.status.conditions}
    if 0 < observation.silent_rounds < _MISSES_BELIEVED:
        # A busy engine may miss a question; what it proved stands until it stays silent.
        speculation = kept(before.get("SpeculationActive"), parent.generation) or speculation
        budget = kept(before.get("BudgetAccurate"), parent.generation) or budget
    summary = without_engines(spec) or summarize(
        rollout, speculation, before.get("Ready"), parent.generation, paused=spec.rollout.paused
    )
    return summary, [available_finding(rollout), speculation, budget]


def _parse(spec: Body) -> SpecDecodeDeploymentSpec:
    """Parse a spec; the CRD refuses what fails here, unless an older one is installed.

    Fields of a newer CRD are passed over, as the API server passes over fields of no CRD.
    """
    try:
        return SpecDecodeDeploymentSpec.model_validate(spec, extra="ignore")
    except ValidationError as error:
        raise InvalidSpecError(spec_problems(error)) from error
